"""Mixture-of-experts layers whose weight gradients wait for W."""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import Tensor, nn

from zeropipe.engine.backward.ops import SlottedGrouped, grouped, new_slot
from zeropipe.engine.backward.products import Product, grouped_product
from zeropipe.engine.backward.store import put_or_give
from zeropipe.engine.torch_private import save, saved, use_number

_NAMES = ("gate_up_proj", "down_proj")


def defer_experts(module: nn.Module) -> int:
    """Let transformers' stacks of gated experts leave their weight gradients to W; returns how many stacks do."""
    for child in module.modules():
        if _is_known(child):
            child.__class__ = _deferred(type(child))
            child.slots = _slots(child)
    return sum(getattr(child, "defers_experts", False) for child in module.modules())


def _is_known(module: nn.Module) -> bool:
    """Experts as two stacks of weights, computed in one of the usual ways, without biases."""
    facts = vars(module)
    return (
        all(name in module._parameters for name in _NAMES)
        and facts.get("has_gate", False)
        and not facts.get("has_bias", True)
        and not facts.get("has_post_expert_norm", False)
        and facts["config"]._experts_implementation in (None, "eager", "grouped_mm", "batched_mm")
        and not getattr(module, "defers_experts", False)
    )


def _slots(module: nn.Module) -> tuple[Tensor, ...]:
    return tuple(new_slot(module, name) for name in _NAMES)


@functools.cache
def _deferred(kind: type[nn.Module]) -> type[nn.Module]:
    """A subclass that sorts tokens by expert and defers both products."""

    def forward(self: Any, hidden: Tensor, index: Tensor, weights: Tensor) -> Tensor:
        computed = not all(isinstance(getattr(self, name), nn.Parameter) for name in _NAMES)  # by a parametrization
        if computed or not (torch.is_grad_enabled() and hidden.requires_grad):
            return kind.forward(self, hidden, index, weights)
        each = index.shape[-1]
        order = index.flatten().argsort(stable=True)
        counts = torch.zeros(self.num_experts, dtype=torch.int32, device=index.device)
        counts = counts.scatter_add(0, index.flatten(), torch.ones_like(index.flatten(), dtype=torch.int32))
        offsets = counts.cumsum(0, dtype=torch.int32)
        x = hidden[order // each]
        x = _product(x, self.gate_up_proj, offsets, self.slots[0], self.is_transposed)
        x = _product(self._apply_gate(x), self.down_proj, offsets, self.slots[1], self.is_transposed)
        x = x * weights.flatten()[order, None].to(x.dtype)
        back = torch.empty_like(order).scatter(0, order, torch.arange(len(order), device=order.device))
        return x[back].view(*index.shape, -1).sum(1)

    def __setstate__(self: Any, state: dict[str, Any]) -> None:
        kind.__setstate__(self, state)
        self.slots = _slots(self)

    body = {"forward": forward, "__setstate__": __setstate__, "defers_experts": True, "__module__": kind.__module__}
    return type(kind.__name__, (kind,), body)


def _product(x: Tensor, weight: nn.Parameter, offsets: Tensor, slot: Tensor, transposed: bool) -> Tensor:
    if torch.compiler.is_compiling() and weight.requires_grad:
        return SlottedGrouped.apply(x, weight, offsets, slot, use_number(), transposed)
    return _Grouped.apply(x, weight, offsets, transposed)


class _Grouped(torch.autograd.Function):
    """Rows of x through their expert's weight; backward puts (x, dy) into the store."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: nn.Parameter, offsets: Tensor, transposed: bool) -> Tensor:
        save(ctx, x, weight, offsets)
        ctx.parameter, ctx.transposed = weight, transposed
        return grouped(x, weight, offsets, transposed)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, Tensor | None, None, None]:
        x, weight, offsets = saved(ctx)
        dw = None
        if ctx.needs_input_grad[1]:
            dw = put_or_give(Product(ctx.parameter, x, dy, ctx.transposed, offsets))
        return grouped_product(dy, weight.transpose(1, 2) if ctx.transposed else weight, offsets), dw, None, None
