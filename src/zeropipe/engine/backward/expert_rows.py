"""Rows of tokens through a stack of experts, sorted by expert so that each product is one call for all of them."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from zeropipe.engine.backward.gradients import to_local
from zeropipe.engine.backward.stacks import expert_linear
from zeropipe.engine.transformers_private import apply_expert_gate


def num_local_experts(module: Any) -> int:
    """The number of experts whose weights a stack has in this process."""
    return int(to_local(getattr(module, module.defers[0])).shape[0])


def run_experts(module: Any, x: Tensor, offsets: Tensor, experts: Tensor | None) -> Tensor:
    """The outputs of rows that are sorted by expert."""
    x = add_bias(module, 0, expert_linear(module, 0, x, offsets), experts)
    return add_bias(module, 1, expert_linear(module, 1, apply_activation(module, x), offsets), experts)


def apply_activation(module: Any, x: Tensor) -> Tensor:
    if not hasattr(module, "has_gate"):
        gate, up = x.chunk(2, dim=-1)
        return up * module.act_fn(gate)
    return apply_expert_gate(module, x) if module.has_gate else module.act_fn(x)


def experts_for_bias(module: Any, index: Tensor, order: Tensor) -> Tensor | None:
    """The expert of each sorted row, if there are biases."""
    return index.flatten()[order] if module.has_bias else None


def add_bias(module: Any, stack: int, x: Tensor, experts: Tensor | None) -> Tensor:
    """Add to each row the bias of its expert, if that is in this process.

    As a product: the gradient of an index lookup adds thousands of rows to few, one after the other.
    """
    if experts is None:
        return x
    bias = to_local(getattr(module, f"{module.defers[stack]}_bias"))
    one_hot = experts[:, None] == torch.arange(len(bias), device=experts.device)
    return x + one_hot.to(x.dtype) @ bias.to(x.dtype)


def sort_by_expert(index: Tensor, num_experts: int) -> tuple[Tensor, Tensor]:
    """The permutation that sorts (token, choice) by expert, and the end of each expert's rows."""
    order = index.flatten().argsort(stable=True)
    counts = torch.zeros(num_experts, dtype=torch.int32, device=index.device)
    counts = counts.scatter_add(0, index.flatten(), torch.ones_like(index.flatten(), dtype=torch.int32))
    return order, counts.cumsum(0, dtype=torch.int32)


def sorted_tokens(hidden: Tensor, order: Tensor, num_choices: int) -> Tensor:
    """The token of each (token, choice), in the order of `sort_by_expert`."""
    return _TakeTokens.apply(hidden, order, invert(order), num_choices)


def sorted_weights(weights: Tensor, order: Tensor) -> Tensor:
    """The weight of each (token, choice), in that order."""
    return _Permute.apply(weights.flatten(), order, invert(order))[:, None]


def sum_choices(x: Tensor, order: Tensor, index: Tensor) -> Tensor:
    """Undo the sort and sum over each token's choices."""
    return _Permute.apply(x, invert(order), order).view(*index.shape, x.shape[-1]).sum(1)


class _Permute(torch.autograd.Function):
    """Rows in another order. The gradient of an index lookup sorts indices and adds rows; here each comes once."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, order: Tensor, inverse: Tensor) -> Tensor:
        ctx.save_for_backward(order, inverse)
        return x[order]

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, None, None]:
        order, inverse = ctx.saved_tensors
        return _Permute.apply(dy, inverse, order), None, None


class _TakeTokens(torch.autograd.Function):
    """`hidden[order // num_choices]`, whose gradient is a sum over each token's choices."""

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, order: Tensor, inverse: Tensor, num_choices: int) -> Tensor:
        ctx.save_for_backward(inverse)
        ctx.num_choices = num_choices
        return hidden[order // num_choices]

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, None, None, None]:
        (inverse,) = ctx.saved_tensors
        return dy[inverse].view(len(dy) // ctx.num_choices, ctx.num_choices, dy.shape[-1]).sum(1), None, None, None


def invert(permutation: Tensor) -> Tensor:
    """The permutation that undoes another."""
    positions = torch.arange(len(permutation), device=permutation.device)
    return torch.empty_like(permutation).scatter(0, permutation, positions)
