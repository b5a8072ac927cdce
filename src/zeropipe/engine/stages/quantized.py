"""Quantized tensors, dequantized when they are read. Models are trained and saved without quantization."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor

from zeropipe.errors import ConfigError

_FLOAT8 = (torch.float8_e4m3fn, torch.float8_e5m2)
_FP4_VALUES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0)  # by 4-bit code


class StorageFormat(Protocol):
    """How weights are stored."""

    def names(self, stored: Iterable[str]) -> list[str]:
        """The names that can be read, given those that are stored."""

    def read(self, name: str, stored: Iterable[str], get: Callable[[str], Tensor]) -> Tensor:
        """Read one tensor; `get` returns a stored one."""


class PlainFormat:
    """Tensors that are not quantized."""

    def names(self, stored: Iterable[str]) -> list[str]:
        return list(stored)

    def read(self, name: str, stored: Iterable[str], get: Callable[[str], Tensor]) -> Tensor:
        return get(name)


@dataclass(frozen=True)
class Fp8Format:
    """Matrices in float8 with one scale per block, as DeepSeek-V3 is stored."""

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
            raise ConfigError(
                f"{name} is in float8: must come with {name + self.scale}, which is missing; copy all files"
            )
        scale = get(name + self.scale)
        (rows, columns), (high, wide) = weight.shape[-2:], self.block
        expected = (*weight.shape[:-2], -(-rows // high), -(-columns // wide))  # blocks at the edges may be smaller
        if tuple(scale.shape) != expected or not scale.dtype.is_floating_point:
            raise ConfigError(
                f"{name + self.scale} is {tuple(scale.shape)} of {str(scale.dtype).removeprefix('torch.')}: must be "
                f"{expected} of a floating-point type for blocks of {high} x {wide}"
            )
        each = scale.float().repeat_interleave(high, -2).repeat_interleave(wide, -1)
        return weight.float() * each[..., :rows, :columns]


class Mxfp4Format:
    """Experts in mxfp4, as gpt-oss is stored: two 4-bit numbers per byte, and a power of two as scale of each block."""

    blocks, scales = "_blocks", "_scales"

    def names(self, stored: Iterable[str]) -> list[str]:
        packed = {name.removesuffix(self.blocks) for name in stored if name.endswith(self.blocks)}
        parts = {name + part for name in packed for part in (self.blocks, self.scales)}
        return [*(name for name in stored if name not in parts), *packed]

    def read(self, name: str, stored: Iterable[str], get: Callable[[str], Tensor]) -> Tensor:
        if name + self.blocks not in stored:
            return get(name)
        if name + self.scales not in stored:
            raise ConfigError(
                f"{name + self.blocks} must come with {name + self.scales}, which is missing; copy all files"
            )
        blocks, scales = get(name + self.blocks), get(name + self.scales)
        if blocks.dtype != torch.uint8 or scales.dtype != torch.uint8 or blocks.shape[:-1] != scales.shape:
            raise ConfigError(
                f"{name + self.blocks} and {name + self.scales} must be mxfp4: uint8, with one scale per block"
            )
        table = torch.tensor(_FP4_VALUES)
        pairs = torch.stack([table[(blocks & 15).int()], table[(blocks >> 4).int()]], -1).flatten(-2)
        return torch.ldexp(pairs, scales.int()[..., None] - 127).flatten(-2).transpose(-1, -2)


def find_format(quantization: dict[str, Any] | None, directory: Path) -> StorageFormat:
    """The storage format of a quantization config; ConfigError for one that is not supported."""
    if quantization is None:
        return PlainFormat()
    method: Any = quantization.get("quant_method")
    block: Any = quantization.get("weight_block_size")
    is_pair = isinstance(block, list | tuple) and len(block) == 2 and all(type(n) is int and n > 0 for n in block)
    if method == "fp8" and is_pair and quantization.get("activation_scheme", "dynamic") == "dynamic":
        return Fp8Format((block[0], block[1]))
    if method == "mxfp4":
        return Mxfp4Format()
    raise ConfigError(
        f"{directory} is quantized with quant_method={method!r}, weight_block_size={block!r}: must be fp8 in blocks, "
        "or mxfp4; dequantize it with transformers and save it"
    )
