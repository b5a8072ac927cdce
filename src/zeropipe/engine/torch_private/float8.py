"""Numbers of 8 bits and their products: torch._scaled_mm on a GPU, the same numbers multiplied in float32 on a CPU.

A matrix is stored as float8 numbers and powers of two: one for all of it, or one for each of its vectors. Multiplying
by a power of two is exact, so the rounding to float8 is the only one, and compiled code gives the same numbers.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
MULTIPLE = 16  # the kernels take sizes that it divides
MIN_CAPABILITY = (8, 9)  # compute capability of a GPU with products of float8
_MAX_EXPONENT = {E4M3: 8, E5M2: 15}  # the largest number is 1.75 * 2**exponent, in both
_TOLERANCE = 0.01  # of a product, to its largest number: results by row are bfloat16, fast sums have fewer bits
_SMALLEST = 2.0**-100  # matrices with smaller numbers only are converted as if it were the largest


class Float8(NamedTuple):
    """A matrix: `data` times `power`, which has one element, or one for each row (n, 1) or column (1, n)."""

    data: Tensor
    power: Tensor


def explain_device(device: torch.device) -> str | None:
    """Why a device cannot compute products of float8; None if it can."""
    if device.type == "cpu":
        return None
    if device.type != "cuda" or torch.version.hip is not None:
        return f"the device {device} has no products of float8 that were tested; use an NVIDIA GPU"
    capability = torch.cuda.get_device_capability(device)
    if capability < MIN_CAPABILITY:
        found, needed = (".".join(map(str, each)) for each in (capability, MIN_CAPABILITY))
        return f"{torch.cuda.get_device_name(device)} has compute capability {found}, products of float8 need {needed}"
    return None


@functools.cache
def has_right_products(device: torch.device, by_row: bool) -> bool:
    """Whether a GPU's conversions and products give the numbers of a CPU, up to the order of its sums."""
    a, b = (torch.randn(size, 160, generator=torch.Generator().manual_seed(size)).bfloat16() for size in (48, 32))
    dim = 1 if by_row else None
    for dtype, fast in itertools.product((E4M3,) if by_row else (E4M3, E5M2), (True, False)):
        wanted, found = (
            multiply(quantize(a.to(where), dtype, dim), quantize(b.to(where), E4M3, dim), torch.float32, fast=fast)
            for where in (torch.device("cpu"), device)
        )
        if not (found.cpu() - wanted).abs().max() <= _TOLERANCE * wanted.abs().max():
            return False
    return True


def quantize(x: Tensor, dtype: torch.dtype, dim: int | None = None) -> Float8:
    """Round a matrix to float8 numbers: with one power of two, or one for each vector along dimension `dim`.

    Infinities and NaNs give powers that are NaN, and so do products with them.
    """
    if x.is_cuda and not torch.compiler.is_compiling():
        return Float8(*_compiled(_quantize)(x.detach().contiguous(), dtype, dim))
    return Float8(*_quantize(x, dtype, dim))


def _quantize(x: Tensor, dtype: torch.dtype, dim: int | None) -> tuple[Tensor, Tensor]:
    if dim is None:  # by rows first: a compiler that does not know the sizes makes one block of a whole reduction
        largest = x.abs().amax(1, keepdim=True).amax(0, keepdim=True)
    else:
        largest = x.abs().amax(dim, keepdim=True)
    largest = largest.float().clamp(min=_SMALLEST)
    # the exponent, one more where the other bits are above 1.75: the largest number then has the largest exponent
    exponent = ((largest.view(torch.int32) + 0x1FFFFF) >> 23) - _MAX_EXPONENT[dtype]
    power, inverse = ((bits << 23).view(torch.float32) for bits in (exponent, 254 - exponent))
    return (x.float() * inverse).to(dtype), torch.where(largest < torch.inf, power, torch.nan)


def transpose(data: Tensor) -> Tensor:
    """The transposed float8 numbers, contiguous; zeros fill its rows up to a multiple of 16."""
    numbers = data.view(torch.uint8)
    if missing := -len(data) % MULTIPLE:
        numbers = functional.pad(numbers, (0, 0, 0, missing))
    call = _compiled(_transpose) if data.is_cuda else _transpose
    return call(numbers).view(data.dtype)  # type: ignore[no-any-return]


def _transpose(numbers: Tensor) -> Tensor:
    return numbers.t().contiguous()


def multiply(a: Float8, b: Float8, dtype: torch.dtype, *, fast: bool) -> Tensor:
    """The product of a (n, k) and the transposed b (m, k), both contiguous, with one power for each row or for all.

    With a power for each row, it is rounded to bfloat16 first, as torch's kernel does. `fast`: sums of a GPU's tensor
    cores are not added in float32 in between.
    """
    by_row = a.power.numel() > 1 or b.power.numel() > 1
    out_dtype = torch.bfloat16 if by_row else dtype
    if a.data.is_cuda:
        y = torch._scaled_mm(
            a.data, b.data.t(), scale_a=a.power, scale_b=b.power.t(), out_dtype=out_dtype, use_fast_accum=fast
        )
    else:
        y = (torch.mm(a.data.float(), b.data.float().t()) * a.power * b.power.t()).to(out_dtype)
    return y.to(dtype)


@functools.cache
def _compiled(function: Callable[..., Any]) -> Callable[..., Any]:
    """A function as few kernels of a GPU."""
    return torch.compile(function, dynamic=True)


@functools.cache
def count_flops(op: Any) -> None:
    """Tell torch's counter of FLOPs, which the compiler uses for its memory budget, what an operator computes."""
    from torch.utils.flop_counter import register_flop_formula

    @register_flop_formula(op.overloadpacket)
    def count(x_shape: Any, *args: Any, out_shape: Any = None, **kwargs: Any) -> int:
        return 2 * int(x_shape[0]) * int(x_shape[1]) * int(out_shape[1])
