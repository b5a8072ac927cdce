"""Weights that are stored in few bits, read as real numbers. What is trained, and saved, is not quantised."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor

from zeropipe.errors import ConfigError

_FLOAT8 = (torch.float8_e4m3fn, torch.float8_e5m2)
_FLOAT4 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0)  # by their 4 bits


class Form(Protocol):
    """A way of storing weights."""

    def names(self, stored: Iterable[str]) -> list[str]:
        """The tensors that can be read, given those that are stored."""

    def read(self, name: str, stored: Iterable[str], get: Callable[[str], Tensor]) -> Tensor:
        """One of them; `get` gives a stored one."""


class Plain:
    """Tensors as they are."""

    def names(self, stored: Iterable[str]) -> list[str]:
        return list(stored)

    def read(self, name: str, stored: Iterable[str], get: Callable[[str], Tensor]) -> Tensor:
        return get(name)


@dataclass(frozen=True)
class Float8:
    """Blocks of a matrix in float8, each to be multiplied with its scale: DeepSeek-V3's form."""

    block: tuple[int, int]
    scale = "_scale_inv"

    def names(self, stored: Iterable[str]) -> list[str]:
        scales = {name + self.scale for name in stored}
        return [name for name in stored if name not in scales]

    def read(self, name: str, stored: Iterable[str], get: Callable[[str], Tensor]) -> Tensor:
        weight = get(name)
        if weight.dtype not in _FLOAT8:
            return weight
        if name + self.scale not in stored:
            raise ConfigError(f"{name} is in float8 and has no {name + self.scale}: it cannot be read")
        scale = get(name + self.scale)
        (rows, columns), (high, wide) = weight.shape[-2:], self.block
        wanted = (*weight.shape[:-2], -(-rows // high), -(-columns // wide))  # blocks at the edges may be cut
        if tuple(scale.shape) != wanted or not scale.dtype.is_floating_point:
            raise ConfigError(
                f"{name + self.scale} is {tuple(scale.shape)} of {str(scale.dtype).removeprefix('torch.')}: blocks of "
                f"{high} x {wide} need {wanted} real numbers"
            )
        each = scale.float().repeat_interleave(high, -2).repeat_interleave(wide, -1)
        return weight.float() * each[..., :rows, :columns]


class Float4:
    """Experts in float4, two numbers to a byte, with a power of two for every few of them: gpt-oss's form (mxfp4)."""

    blocks, scales = "_blocks", "_scales"

    def names(self, stored: Iterable[str]) -> list[str]:
        packed = {name.removesuffix(self.blocks) for name in stored if name.endswith(self.blocks)}
        parts = {name + part for name in packed for part in (self.blocks, self.scales)}
        return [*(name for name in stored if name not in parts), *packed]

    def read(self, name: str, stored: Iterable[str], get: Callable[[str], Tensor]) -> Tensor:
        if name + self.blocks not in stored:
            return get(name)
        if name + self.scales not in stored:
            raise ConfigError(f"{name + self.blocks} has no {name + self.scales}: it cannot be read")
        blocks, scales = get(name + self.blocks), get(name + self.scales)
        if blocks.dtype != torch.uint8 or scales.dtype != torch.uint8 or blocks.shape[:-1] != scales.shape:
            raise ConfigError(f"{name + self.blocks} and {name + self.scales} do not fit: they are no mxfp4")
        table = torch.tensor(_FLOAT4)
        pairs = torch.stack([table[(blocks & 15).int()], table[(blocks >> 4).int()]], -1).flatten(-2)
        return torch.ldexp(pairs, scales.int()[..., None] - 127).flatten(-2).transpose(-1, -2)


def form_of(quantization: dict[str, Any] | None, directory: Path) -> Form:
    """How a directory's weights are stored, by its config; ConfigError for a form that is not read."""
    if quantization is None:
        return Plain()
    method: Any = quantization.get("quant_method")
    block: Any = quantization.get("weight_block_size")
    is_pair = isinstance(block, list | tuple) and len(block) == 2 and all(type(n) is int and n > 0 for n in block)
    if method == "fp8" and is_pair and quantization.get("activation_scheme", "dynamic") == "dynamic":
        return Float8((block[0], block[1]))
    if method == "mxfp4":
        return Float4()
    raise ConfigError(
        f"{directory} is quantised (quant_method={method!r}, weight_block_size={block!r}): only fp8 in blocks and "
        "mxfp4 are read; dequantise it with transformers and save that"
    )
