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
    high_ptr, low_ptr, grad_ptr, exp_avg_ptr, exp_avg_sq_ptr, corrections_ptr, size,
    factor, lr, beta2, one_minus_beta1, one_minus_beta2, eps, weight_decay,
    decoupled: tl.constexpr, block: tl.constexpr,
):  # fmt: skip
    index = tl.program_id(0).to(tl.int64) * block + tl.arange(0, block)
    inside = index < size
    bits = (tl.load(high_ptr + index, inside).to(tl.int32) << 16) + tl.load(low_ptr + index, inside).to(tl.int32)
    weight = bits.to(tl.float32, bitcast=True)
    grad = tl.load(grad_ptr + index, inside).to(tl.float32) * factor
    exp_avg, exp_avg_sq = tl.load(exp_avg_ptr + index, inside), tl.load(exp_avg_sq_ptr + index, inside)
    correction1, root_of_correction2 = tl.load(corrections_ptr), tl.load(corrections_ptr + 1)

    if decoupled:
        weight -= lr * weight_decay * weight
    else:
        grad += weight_decay * weight
    exp_avg += one_minus_beta1 * (grad - exp_avg)
    exp_avg_sq = beta2 * exp_avg_sq + one_minus_beta2 * grad * grad
    weight -= lr / correction1 * exp_avg / (tl.sqrt(exp_avg_sq) / root_of_correction2 + eps)

    bits = weight.to(tl.int32, bitcast=True)
    high = (bits + 0x8000) >> 16
    tl.store(high_ptr + index, high.to(tl.int16), inside)
    tl.store(low_ptr + index, (bits - (high << 16)).to(tl.int16), inside)
    tl.store(exp_avg_ptr + index, exp_avg, inside)
    tl.store(exp_avg_sq_ptr + index, exp_avg_sq, inside)


def step(
    high: Tensor, low: Tensor, grad: Tensor, exp_avg: Tensor, exp_avg_sq: Tensor, corrections: Tensor, *,
    factor: float, lr: float, betas: tuple[float, float], eps: float, weight_decay: float, decoupled: bool,
) -> None:  # fmt: skip
    """Update a parameter in place. All but `corrections` (1 - beta1**t and sqrt(1 - beta2**t)) have its elements."""
    size = high.numel()
    one_minus_beta1, one_minus_beta2 = (1 - beta for beta in betas)  # not in the kernel, whose numbers have 32 bits
    _step[(triton.cdiv(size, BLOCK),)](
        high, low, grad, exp_avg, exp_avg_sq, corrections, size,
        factor, lr, betas[1], one_minus_beta1, one_minus_beta2, eps, weight_decay, decoupled=decoupled, block=BLOCK,
    )  # fmt: skip
