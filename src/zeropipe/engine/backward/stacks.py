"""Products with a stack of weights, one for each expert, whose gradient waits for W."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from zeropipe.engine.backward.gradients import local
from zeropipe.engine.backward.ops import SlottedStack, new_slot, stacked
from zeropipe.engine.backward.products import Product, stacked_product
from zeropipe.engine.backward.store import put_or_give
from zeropipe.engine.torch_private import save, saved, use_number


def new_slots(module: Any) -> tuple[Tensor, ...]:
    """What stands for the module's stacks (`defers` names them) inside compiled graphs."""
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
