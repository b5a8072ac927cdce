"""Products with a stack of weights, one for each expert, whose gradient waits for W."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from zeropipe.engine.backward.expert_adapters import add_adapter
from zeropipe.engine.backward.gradients import to_local
from zeropipe.engine.backward.ops import CompiledGroupedLinear, create_slot, grouped_linear
from zeropipe.engine.backward.products import Product, grouped_mm
from zeropipe.engine.backward.store import store_or_return
from zeropipe.engine.torch_private.autograd import has_grad_hooks, save, saved
from zeropipe.engine.torch_private.compile import use_number


def create_deferred_class(
    base: type[nn.Module], names: tuple[str, ...], forward: Callable[..., Tensor], **attributes: Any
) -> type[nn.Module]:
    """A subclass of `base` with another forward, which leaves the gradients of the stacks `names` to W."""

    def __setstate__(self: Any, state: dict[str, Any]) -> None:
        base.__setstate__(self, state)
        self.slots = _create_slots(self)

    body = {
        "forward": forward, "__setstate__": __setstate__, "defers_experts": True, "defers": names,
        "has_hooks": False, "adapters": {}, "first_expert": 0, "__module__": base.__module__, **attributes,
    }  # fmt: skip
    return type(base.__name__, (base,), body)


def convert(module: Any, deferred_class: type[nn.Module]) -> None:
    """Make a module an instance of such a subclass, in place."""
    module.__class__ = deferred_class
    module.slots = _create_slots(module)
    module.has_hooks = any(has_grad_hooks(module._parameters[name]) for name in module.defers)


def _create_slots(module: Any) -> tuple[Tensor, ...]:
    return tuple(create_slot(module, name) for name in module.defers)


def expert_linear(module: Any, index: int, x: Tensor, offsets: Tensor | None) -> Tensor:
    """Apply to each row of x its expert's weight in stack number `index` of the module, in the dtype of x."""
    y = _apply_weight(module, index, x, offsets)
    if offsets is None or not module.adapters:
        return y
    return add_adapter(y, module, module.defers[index], x, offsets)


def _apply_weight(module: Any, index: int, x: Tensor, offsets: Tensor | None) -> Tensor:
    name = module.defers[index]
    weight, transposed = to_local(getattr(module, name)), getattr(module, "is_transposed", True)
    if not torch.is_grad_enabled():
        return grouped_linear(x, weight, offsets, transposed)
    if not weight.requires_grad:
        return _FrozenGroupedLinear.apply(weight, offsets, x, transposed)
    if torch.compiler.is_compiling() and not module.has_hooks:
        return CompiledGroupedLinear.apply(x, weight, offsets, module.slots[index], use_number(), transposed)
    return _GroupedLinear.apply(x, weight, offsets, transposed, module, name)


class _FrozenGroupedLinear(torch.autograd.Function):
    """`grouped_linear` with weights that are not trained: x is not kept."""

    @staticmethod
    def forward(ctx: Any, weight: Tensor, offsets: Tensor | None, x: Tensor, transposed: bool) -> Tensor:
        keep = ctx.save_for_backward if torch.compiler.is_compiling() else functools.partial(save, ctx)
        keep(weight, *([] if offsets is None else [offsets]))
        ctx.transposed = transposed
        return grouped_linear(x, weight, offsets, transposed)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[None, None, Tensor, None]:
        weight, *offsets = ctx.saved_tensors if torch.compiler.is_compiling() else saved(ctx)
        return None, None, grouped_linear(dy, weight, next(iter(offsets), None), not ctx.transposed), None


class _GroupedLinear(torch.autograd.Function):
    """`grouped_linear`, whose backward puts (x, dy) into the store."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, offsets: Tensor | None, transposed: bool, module: nn.Module, name: str
    ) -> Tensor:
        save(ctx, x, weight, *([] if offsets is None else [offsets]))
        ctx.parameter, ctx.transposed = module._parameters[name], transposed
        ctx.has_hooks = module.has_hooks
        return grouped_linear(x, weight, offsets, transposed)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, Tensor | None, None, None, None, None]:
        x, weight, *offsets = saved(ctx)
        offsets = next(iter(offsets), None)
        product = Product(ctx.parameter, x, dy, ctx.transposed, offsets)
        dw = product.compute() if ctx.has_hooks else store_or_return(product, ctx, 1)
        weight = weight.to(dy.dtype)
        dx = grouped_mm(dy, weight.transpose(1, 2) if ctx.transposed else weight, offsets)
        return dx, dw, None, None, None, None
