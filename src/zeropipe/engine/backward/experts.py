"""Mixture-of-experts layers whose weight gradients wait for W."""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import Tensor, nn

from zeropipe.engine.backward.gradients import is_watched, local
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
            child.is_watched = any(is_watched(child._parameters[name]) for name in _NAMES)
    return sum(getattr(child, "defers_experts", False) for child in module.modules())


def keep_experts(module: Any, place: int, number: int) -> bool:
    """Let a stack compute its share of the experts only, number `place` of `number` shares; False if it cannot.

    The caller then leaves it the weights of these experts, and sums the outputs.
    """
    defer_experts(module)
    if not getattr(module, "defers_experts", False):
        return False
    module.first_expert = module.num_experts // number * place
    return True


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
        if self.first_expert is not None:
            return _some_experts(self, hidden, index, weights)
        computed = not all(isinstance(getattr(self, name), nn.Parameter) for name in _NAMES)  # by a parametrization
        if computed or self.is_watched or not (torch.is_grad_enabled() and hidden.requires_grad):
            return kind.forward(self, hidden, index, weights)
        order, offsets = _sorted(index, self.num_experts)
        x = _product(self, 0, hidden[order // index.shape[-1]], offsets)
        x = _product(self, 1, self._apply_gate(x), offsets)
        return _back(x * weights.flatten()[order, None].to(x.dtype), order, index)

    def __setstate__(self: Any, state: dict[str, Any]) -> None:
        kind.__setstate__(self, state)
        self.slots = _slots(self)

    body = {
        "forward": forward, "__setstate__": __setstate__, "defers_experts": True, "defers": _NAMES,
        "first_expert": None, "is_watched": False, "__module__": kind.__module__,
    }  # fmt: skip
    return type(kind.__name__, (kind,), body)


def _some_experts(module: Any, hidden: Tensor, index: Tensor, weights: Tensor) -> Tensor:
    """The sum over those experts that are here; the rows of all others, which come last, are zeros.

    A grouped kernel leaves in them what was there, so they are cleared on both ways before anything is added to them.
    """
    order, offsets = _sorted((index - module.first_expert) % module.num_experts, module.num_experts)
    offsets = offsets[: local(module.gate_up_proj).shape[0]]
    is_here = (torch.arange(len(order), device=order.device) < offsets[-1])[:, None]
    x = torch.where(is_here, hidden[order // index.shape[-1]], 0)
    x = torch.where(is_here, _product(module, 0, x, offsets), 0)
    x = _product(module, 1, module._apply_gate(x), offsets)
    return _back(torch.where(is_here, x, 0) * weights.flatten()[order, None].to(x.dtype), order, index)


def _sorted(index: Tensor, num_experts: int) -> tuple[Tensor, Tensor]:
    """The order that sorts (token, choice) by expert, and where the rows of each expert end."""
    order = index.flatten().argsort(stable=True)
    counts = torch.zeros(num_experts, dtype=torch.int32, device=index.device)
    counts = counts.scatter_add(0, index.flatten(), torch.ones_like(index.flatten(), dtype=torch.int32))
    return order, counts.cumsum(0, dtype=torch.int32)


def _back(x: Tensor, order: Tensor, index: Tensor) -> Tensor:
    """The rows in their own order, summed over each token's choices."""
    back = torch.empty_like(order).scatter(0, order, torch.arange(len(order), device=order.device))
    return x[back].view(*index.shape, -1).sum(1)


def _product(module: Any, number: int, x: Tensor, offsets: Tensor) -> Tensor:
    weight = local(getattr(module, _NAMES[number]))
    if not torch.is_grad_enabled():
        return grouped(x, weight, offsets, module.is_transposed)
    if torch.compiler.is_compiling() and weight.requires_grad and not module.is_watched:
        return SlottedGrouped.apply(x, weight, offsets, module.slots[number], use_number(), module.is_transposed)
    return _Grouped.apply(x, weight, offsets, module.is_transposed, module, _NAMES[number])


class _Grouped(torch.autograd.Function):
    """Rows of x through their expert's weight; backward puts (x, dy) into the store."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, offsets: Tensor, transposed: bool, module: nn.Module, name: str
    ) -> Tensor:
        save(ctx, x, weight, offsets)
        ctx.parameter, ctx.transposed = module._parameters[name], transposed
        ctx.is_watched = module.is_watched
        return grouped(x, weight, offsets, transposed)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, Tensor | None, None, None, None, None]:
        x, weight, offsets = saved(ctx)
        dw = None
        if ctx.needs_input_grad[1]:
            product = Product(ctx.parameter, x, dy, ctx.transposed, offsets)
            dw = product.value() if ctx.is_watched else put_or_give(product, ctx, 1)
        dx = grouped_product(dy, weight.transpose(1, 2) if ctx.transposed else weight, offsets)
        return dx, dw, None, None, None, None
