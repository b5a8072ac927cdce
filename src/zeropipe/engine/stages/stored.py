"""The tensors in a directory of safetensors, read one by one."""

from __future__ import annotations

import json
from collections import OrderedDict
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from zeropipe.errors import ConfigError, MissingExtra

SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"
_MOST_OPEN = 8  # files at once: each holds a descriptor
_SCALE = "_scale_inv"  # beside a weight in float8: what each of its blocks is multiplied with


class Stored:
    """Tensors by name. A tensor is read when it is asked for; a file is opened once, not once per tensor."""

    def __init__(self, directory: Path, quantization: dict[str, Any] | None = None, *, single: str = SINGLE) -> None:
        self.directory = directory
        self._block = None if quantization is None else _block(quantization, directory)
        self._open: OrderedDict[str, Any] = OrderedDict()
        if (directory / single).exists():  # transformers prefers it too
            self.file_of = dict.fromkeys(self._file(single).keys(), single)
        elif (directory / INDEX).exists() and single == SINGLE:
            self.file_of = self.index_of(directory)
        else:
            raise ConfigError(f"{directory} holds no {single}: save it as safetensors")

    @staticmethod
    def index_of(directory: Path) -> dict[str, str]:
        """Which file holds which tensor, as a directory's index says."""
        return _weight_map(directory / INDEX)

    @property
    def names(self) -> list[str]:
        """All tensors but the scales of float8 weights, which are read with their weights."""
        scales = {name + _SCALE for name in self.file_of} if self._block else set()
        return [name for name in self.file_of if name not in scales]

    def read(self, name: str) -> Tensor:
        """One tensor, in real numbers if it is stored as blocks of float8."""
        tensor = self._call(name, "get_tensor")
        if self._block is None or tensor.dtype not in (torch.float8_e4m3fn, torch.float8_e5m2):
            return tensor
        if name + _SCALE not in self.file_of:
            raise ConfigError(f"{self.directory} has {name} in float8 but no {name + _SCALE}: it cannot be read")
        return dequantised(name, tensor, self._call(name + _SCALE, "get_tensor"), self._block)

    def is_equal(self, one: str, other: str) -> bool:
        """Whether two tensors have the same values, compared a few rows at a time."""
        first, second = self._call(one, "get_slice"), self._call(other, "get_slice")
        shape = first.get_shape()
        if shape != second.get_shape() or first.get_dtype() != second.get_dtype():
            return False
        return all(torch.equal(first[i : i + 1024], second[i : i + 1024]) for i in range(0, shape[0], 1024))

    def _call(self, name: str, method: str) -> Any:
        from safetensors import SafetensorError

        file = self.file_of[name]
        try:
            return getattr(self._file(file), method)(name)
        except SafetensorError as error:
            raise ConfigError(f"cannot read {name} of {self.directory / file}: {error}") from None

    def _file(self, file: str) -> Any:
        """An open file; the one not used for longest is closed if there are too many."""
        try:
            from safetensors import SafetensorError, safe_open
        except ImportError:
            raise MissingExtra("safetensors", "engine") from None
        if file not in self._open:
            try:
                self._open[file] = safe_open(self.directory / file, framework="pt")
            except (SafetensorError, OSError) as error:
                raise ConfigError(f"cannot read {self.directory / file}: {error}") from None
            if len(self._open) > _MOST_OPEN:
                self._open.popitem(last=False)
        self._open.move_to_end(file)
        return self._open[file]


def dequantised(name: str, weight: Tensor, scale: Tensor, block: tuple[int, int]) -> Tensor:
    """A weight whose blocks are each to be multiplied with their entry of `scale`; blocks at the edges may be cut."""
    rows, columns = weight.shape[-2:]
    wanted = (*weight.shape[:-2], -(-rows // block[0]), -(-columns // block[1]))
    if tuple(scale.shape) != wanted or not scale.dtype.is_floating_point:
        raise ConfigError(
            f"{name + _SCALE} is {tuple(scale.shape)} of {str(scale.dtype).removeprefix('torch.')}: blocks of "
            f"{block[0]} x {block[1]} need {wanted} real numbers"
        )
    each = scale.float().repeat_interleave(block[0], -2).repeat_interleave(block[1], -1)
    return weight.float() * each[..., :rows, :columns]


def _block(quantization: dict[str, Any], directory: Path) -> tuple[int, int]:
    """The block size of the one quantised form that is read: float8 blocks, as DeepSeek-V3 is published."""
    method, block = quantization.get("quant_method"), quantization.get("weight_block_size")
    is_pair = isinstance(block, list | tuple) and len(block) == 2 and all(type(n) is int and n > 0 for n in block)
    if method != "fp8" or not is_pair or quantization.get("activation_scheme", "dynamic") != "dynamic":
        raise ConfigError(
            f"{directory} is quantised (quant_method={method!r}, weight_block_size={block!r}): only fp8 in blocks with "
            "dynamic activations is read; dequantise it with transformers and save that"
        )
    return tuple(block)


def _weight_map(index: Path) -> dict[str, str]:
    try:
        files = json.loads(index.read_text())["weight_map"]
    except (OSError, ValueError, RecursionError) as error:
        raise ConfigError(f"cannot read {index}: {str(error).splitlines()[0]}") from None
    except (KeyError, TypeError):
        raise ConfigError(f"{index} has no weight_map: it is no index of safetensors") from None
    if not isinstance(files, dict) or not all(isinstance(f, str) and f == Path(f).name for f in files.values()):
        raise ConfigError(f"the weight_map of {index} must say which file beside it holds each tensor")
    return files
