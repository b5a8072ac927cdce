"""Products with a stack of weights, one for each expert, whose gradient waits for W."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from zeropipe.engine.backward.gradients import is_watched, local
from zeropipe.engine.backward.ops import SlottedStack, new_slot, stacked
from zeropipe.engine.backward.products import Product, stacked_product
from zeropipe.engine.backward.store import put_or_give
from zeropipe.engine.torch_private.autograd import save, saved
from zeropipe.engine.torch_private.compile import use_number


def deferring(
    kind: type[nn.Module], names: tuple[str, ...], forward: Callable[..., Tensor], **facts: Any
) -> type[nn.Module]:
    """A subclass with another forward, whose products with the stacks of these names leave their gradients to W."""

    def __setstate__(self: Any, state: dict[str, Any]) -> None:
        kind.__setstate__(self, state)
        self.slots = _new_slots(self)

    body = {
        "forward": forward, "__setstate__": __setstate__, "defers_experts": True, "defers": names,
        "is_watched": False, "__module__": kind.__module__, **facts,
    }  # fmt: skip
    return type(kind.__name__, (kind,), body)


def take_over(module: Any, kind: type[nn.Module]) -> None:
    """Make a module one of such a subclass."""
    module.__class__ = kind
    module.slots = _new_slots(module)
    module.is_watched = any(is_watched(module._parameters[name]) for name in module.defers)


def _new_slots(module: Any) -> tuple[Tensor, ...]:
    """What stands for the module's stacks inside compiled graphs."""
    return tuple(new_slot(module, name) for name in module.defers)


def product(module: Any, number: int, x: Tensor, offsets: Tensor | None) -> Tensor:
    """Rows of x through their expert's weight in the module's stack with this number, in the dtype of x."""
    name = module.defers[number]
    weight, transposed = local(getattr(module, name)), getattr(module, "is_transposed", True)
    if not torch.is_grad_enabled():
        return stacked(x, weight, offsets, transposed)
    if torch.compiler.is_compiling() and weight.requires_grad and not module.is_watched:
        return SlottedStack.apply(x, weight, offsets, module.slots[number], use_number(), transposed)
    return _Stack.apply(x, weight, offsets, transposed, module, name)


class _Stack(torch.autograd.Function):
    """Rows of x through their expert's weight; backward puts (x, dy) into the store."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, offsets: Tensor | None, transposed: bool, module: nn.Module, name: str
    ) -> Tensor:
        save(ctx, x, weight, *([] if offsets is None else [offsets]))
        ctx.parameter, ctx.transposed = module._parameters[name], transposed
        ctx.is_watched = module.is_watched
        return stacked(x, weight, offsets, transposed)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, Tensor | None, None, None, None, None]:
        x, weight, *offsets = saved(ctx)
        offsets, dw = next(iter(offsets), None), None
        if ctx.needs_input_grad[1]:
            product = Product(ctx.parameter, x, dy, ctx.transposed, offsets)
            dw = product.value() if ctx.is_watched else put_or_give(product, ctx, 1)
        weight = weight.to(dy.dtype)
        dx = stacked_product(dy, weight.transpose(1, 2) if ctx.transposed else weight, offsets)
        return dx, dw, None, None, None, None
