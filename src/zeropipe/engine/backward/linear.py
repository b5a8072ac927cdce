"""Layers whose weight gradient waits for W: `defer` swaps them in, in any model, without touching its code."""

from __future__ import annotations

import functools
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.nn import functional

from zeropipe.engine.backward.experts import defer_experts
from zeropipe.engine.backward.gated import defer_gated
from zeropipe.engine.backward.gradients import is_watched, local
from zeropipe.engine.backward.ops import SlottedLinear, new_slot
from zeropipe.engine.backward.products import Product, rows
from zeropipe.engine.backward.store import put_or_give
from zeropipe.engine.torch_private.autograd import in_transform, save, saved, without_autocast
from zeropipe.engine.torch_private.compile import use_number
from zeropipe.engine.torch_private.tensors import ends_of_spread, from_local, owned


def defer(module: nn.Module) -> int:
    """Let every linear layer in `module` leave its weight gradient to W; returns how many weights do.

    Layers are changed in place and keep their parameters and names. What is not a plain linear layer
    (norms, embeddings, convolutions, linear layers with a forward of their own) does its whole backward in I.
    """
    for child in module.modules():
        deferred = _deferred_class(child)
        if deferred is not None:
            child.__class__ = deferred
            child.slot = new_slot(child)
    defer_experts(module)
    defer_gated(module)
    return sum(len(layer.defers) for layer in deferred_in(module))


def deferred_in(module: nn.Module) -> list[Any]:
    """The layers, and stacks of experts, that leave weight gradients to W."""
    return [m for m in module.modules() if isinstance(m, Deferred) or getattr(m, "defers_experts", False)]


def see_hooks(layers: Iterable[Any]) -> None:
    """Before a step: weights that have got hooks since are not deferred, as if they had had them before."""
    for layer in layers:
        watched = any(is_watched(layer._parameters.get(name)) for name in layer.defers)
        if layer.is_watched != watched:
            layer.is_watched = watched


class _Linear(torch.autograd.Function):
    """x W^T + b, whose backward gives dx and db and puts (x, dy) into the store."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, transposed: bool, layer: nn.Module) -> Tensor:
        save(ctx, x, weight)
        # Under checkpointing what was saved comes back as a detached alias of the Parameter: its .grad would be lost.
        ctx.parameter = layer._parameters["weight"]
        ctx.transposed = transposed
        return owned(functional.linear(x, weight.t() if transposed else weight, bias))

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, Tensor | None, Tensor | None, None, None]:
        x, weight = saved(ctx)
        dx = db = None
        if ctx.needs_input_grad[0]:
            weight = weight.to(dy.dtype)
            dx = without_autocast(torch.matmul, dy, weight.t() if ctx.transposed else weight)
        if ctx.needs_input_grad[2]:
            db = rows(dy).sum(0)
        return dx, put_or_give(Product(ctx.parameter, x, dy, ctx.transposed), ctx, 1), db, None, None


class Deferred(nn.Module):
    """What deferred layers have in common: a number that stands for them inside compiled graphs."""

    weight: nn.Parameter
    bias: nn.Parameter | None
    slot: Tensor
    defers: tuple[str, ...] = ("weight",)
    adds_bias: bool = True  # of a layer that several processes share, one adds the bias
    is_watched: bool = False  # hooks wait for its weight's gradient

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self.slot = new_slot(self)  # a copy is a layer of its own

    def is_learning(self) -> bool:
        """Whether there is a weight gradient to defer; a weight computed in each F (a parametrization) has none.

        The products of complex numbers have conjugates in them: those are left to autograd.
        """
        weight = self.weight
        is_learning = torch.is_grad_enabled() and weight.requires_grad and isinstance(weight, nn.Parameter)
        return is_learning and not self.is_watched and not weight.is_complex() and not in_transform()

    def deferred(self, x: Tensor, transposed: bool = False) -> Tensor:
        if torch.is_autocast_enabled(x.device.type) and x.dtype != torch.float64:
            x = x.to(torch.get_autocast_dtype(x.device.type))
        weight, bias = self.pieces()
        if not torch.compiler.is_compiling():
            return _Linear.apply(x, weight, bias, transposed, self)
        if x.requires_grad:
            return SlottedLinear.apply(x, weight, bias, self.slot, use_number(), transposed)
        # The operator computes the input gradient, too, which nobody needs here.
        return functional.linear(x, weight.t() if transposed else weight, bias)

    def pieces(self) -> tuple[Tensor, Tensor | None]:
        """What this process has of weight and bias: all, unless tensor parallelism spreads them."""
        bias = self.bias if self.adds_bias else None
        return local(self.weight), None if bias is None else local(bias)


class DeferredLinear(Deferred, nn.Linear):
    """nn.Linear with its weight gradient left to W."""

    def forward(self, input: Tensor) -> Tensor:
        if isinstance(input, DTensor):
            return self._of_spread(input)
        if self.is_learning():
            return self.deferred(input)
        weight, bias = self.pieces()
        return functional.linear(input, weight, bias)

    def _of_spread(self, input: Any) -> Tensor:
        """A layer that torch's own tensor parallelism has spread: with pieces where those make one product."""
        weight: Any = self.weight
        ends = None
        if self.is_learning() and isinstance(weight, DTensor):
            ends = ends_of_spread(input, weight, self.bias is not None)
        if ends is None:
            return functional.linear(input, weight, self.bias)
        gradients, outputs = ends
        y = self.deferred(input.to_local(grad_placements=gradients))
        return from_local(y, weight.device_mesh, outputs)


class DeferredConv1D(Deferred):
    """transformers' Conv1D (a linear layer with its weight transposed) with its weight gradient left to W."""

    def forward(self, x: Tensor) -> Tensor:
        if self.is_learning():
            return self.deferred(x, transposed=True)
        return functional.linear(x, self.weight.t(), self.bias)


def _deferred_class(module: nn.Module) -> type[Deferred] | None:
    kind = type(module)
    if "forward" in module.__dict__ or "weight" not in module._parameters:  # a hook makes the weight anew in each F
        return None
    if is_watched(module._parameters["weight"]):
        return None
    if isinstance(module, Deferred):
        return None
    if kind is nn.Linear:
        return DeferredLinear
    if isinstance(module, nn.Linear) and kind.forward is nn.Linear.forward:
        return _deferred_kind(kind)
    # known by their names, so that transformers need not be imported
    if (kind.__module__, kind.__name__) == ("transformers.pytorch_utils", "Conv1D"):
        return DeferredConv1D
    if (kind.__module__, kind.__name__) == ("transformers.models.falcon.modeling_falcon", "FalconLinear"):
        return _deferred_kind(kind) if module.bias is None else None  # it rounds before it adds a bias
    return None


@functools.cache
def _deferred_kind(kind: type[nn.Linear]) -> type[Deferred]:
    """A deferred layer that is a `kind`, too: for models with linear layers of their own that compute as torch's do."""
    return type(kind.__name__, (DeferredLinear, kind), {"__module__": kind.__module__})
