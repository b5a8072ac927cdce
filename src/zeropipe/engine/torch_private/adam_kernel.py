"""A step of Adam or AdamW over bfloat16 parameters and the lower halves of their float32 copies, as a kernel of Triton.

Imported on GPUs only: torch brings Triton along there.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

BLOCK = 1024  # elements that a block of the kernel updates


@triton.jit
def _step(
    high_ptr, low_ptr, grad_ptr, average_ptr, square_ptr, correction_ptr, size,
    factor, lr, beta2, other1, other2, eps, decay, decoupled: tl.constexpr, block: tl.constexpr,
):  # fmt: skip
    place = tl.program_id(0).to(tl.int64) * block + tl.arange(0, block)
    inside = place < size
    bits = (tl.load(high_ptr + place, inside).to(tl.int32) << 16) + tl.load(low_ptr + place, inside).to(tl.int32)
    weight = bits.to(tl.float32, bitcast=True)
    grad = tl.load(grad_ptr + place, inside).to(tl.float32) * factor
    average, square = tl.load(average_ptr + place, inside), tl.load(square_ptr + place, inside)
    correction, root = tl.load(correction_ptr), tl.load(correction_ptr + 1)

    if decoupled:
        weight -= lr * decay * weight
    else:
        grad += decay * weight
    average += other1 * (grad - average)
    square = beta2 * square + other2 * grad * grad
    weight -= lr / correction * average / (tl.sqrt(square) / root + eps)

    bits = weight.to(tl.int32, bitcast=True)
    high = (bits + 0x8000) >> 16
    tl.store(high_ptr + place, high.to(tl.int16), inside)
    tl.store(low_ptr + place, (bits - (high << 16)).to(tl.int16), inside)
    tl.store(average_ptr + place, average, inside)
    tl.store(square_ptr + place, square, inside)


def step(
    high: Tensor, low: Tensor, grad: Tensor, average: Tensor, square: Tensor, corrections: Tensor, *,
    factor: float, lr: float, betas: tuple[float, float], eps: float, decay: float, decoupled: bool,
) -> None:  # fmt: skip
    """Update a parameter in place. All but `corrections` (1 - beta1**t and sqrt(1 - beta2**t)) have its elements."""
    size = high.numel()
    other1, other2 = (1 - beta for beta in betas)  # not in the kernel, whose numbers have 32 bits
    _step[(triton.cdiv(size, BLOCK),)](
        high, low, grad, average, square, corrections, size,
        factor, lr, betas[1], other1, other2, eps, decay, decoupled=decoupled, block=BLOCK,
    )  # fmt: skip
