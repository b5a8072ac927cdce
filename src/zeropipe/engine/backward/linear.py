"""Layers whose weight gradient waits for W: `defer` converts those of any model, without changes to its code."""

from __future__ import annotations

import functools
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.nn import functional

from zeropipe.engine.backward.embedding import defer_embeddings
from zeropipe.engine.backward.experts import defer_experts
from zeropipe.engine.backward.float8 import run_float8
from zeropipe.engine.backward.gated import defer_gated
from zeropipe.engine.backward.gradients import to_local
from zeropipe.engine.backward.ops import CompiledLinear, create_slot
from zeropipe.engine.backward.products import Product, flatten_rows
from zeropipe.engine.backward.store import store_or_return
from zeropipe.engine.torch_private.autograd import has_grad_hooks, in_transform, save, saved, without_autocast
from zeropipe.engine.torch_private.compile import use_number
from zeropipe.engine.torch_private.float8 import Float8
from zeropipe.engine.torch_private.tensors import from_local, linear_placements, not_a_view
from zeropipe.errors import ConfigError, EngineError


def defer(module: nn.Module) -> int:
    """Let every linear layer in `module` leave its weight gradient to W; returns the number of such weights.

    Layers are converted in place and keep their parameters and names. Embeddings whose gradient has 32 bits add it row
    by row, in W. All other layers (norms, convolutions, linear layers with a forward of their own) run their full
    backward in I.
    """
    for child in module.modules():
        defer_layer(child)
    defer_experts(module)
    defer_gated(module)
    defer_embeddings(module)
    return sum(len(layer.defers) for layer in find_deferred(module))


def defer_layer(module: nn.Module) -> bool:
    """Let a module leave its weight gradient to W if it is a linear layer; whether it does so now."""
    deferred = _deferred_class(module)
    if deferred is not None:
        module.__class__ = deferred
        module.slot = create_slot(module)
    return isinstance(module, Deferred)


def find_deferred(module: nn.Module) -> list[Any]:
    """The layers and stacks of experts that leave weight gradients to W."""
    return [m for m in module.modules() if isinstance(m, Deferred) or getattr(m, "defers_experts", False)]


def update_hooks(layers: Iterable[Any]) -> None:
    """Before a step: do not defer weights that have hooks by now."""
    for layer in layers:
        has_hooks = any(has_grad_hooks(layer._parameters.get(name)) for name in layer.defers)
        if has_hooks and getattr(layer, "float8", "none") != "none":
            raise ConfigError(
                f"float8={layer.float8!r}: a weight of {tuple(layer.weight.shape)} has hooks on its gradient, which "
                "does not pass through autograd; remove them, or use float8='none'"
            )
        if layer.has_hooks != has_hooks:
            layer.has_hooks = has_hooks


class _Linear(torch.autograd.Function):
    """x W^T + b, whose backward returns dx and db and puts (x, dy) into the store."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, transposed: bool, layer: nn.Module) -> Tensor:
        save(ctx, x, weight)
        # Under checkpointing a saved weight is a detached alias of the Parameter, whose .grad would be lost.
        ctx.parameter = layer._parameters["weight"]
        ctx.transposed = transposed
        return not_a_view(functional.linear(x, weight.t() if transposed else weight, bias))

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, Tensor | None, Tensor | None, None, None]:
        x, weight = saved(ctx)
        dx = db = None
        if ctx.needs_input_grad[0]:
            weight = weight.to(dy.dtype)
            dx = without_autocast(torch.matmul, dy, weight.t() if ctx.transposed else weight)
        if ctx.needs_input_grad[2]:
            db = flatten_rows(dy).sum(0)
        return dx, store_or_return(Product(ctx.parameter, x, dy, ctx.transposed), ctx, 1), db, None, None


class Deferred(nn.Module):
    """Base of the linear layers that leave their weight gradient to W."""

    weight: nn.Parameter
    bias: nn.Parameter | None
    slot: Tensor  # represents the weight inside compiled graphs
    defers: tuple[str, ...] = ("weight",)
    adds_bias: bool = True  # in a layer that is sharded over tp, one process adds the bias
    has_hooks: bool = False  # on the weight's gradient
    transposed: bool = False  # the weight is (in, out)
    float8: str = "none"  # how its products are computed in float8: "tensor" or "row"
    copies: dict[int, Float8] | None = None  # of the weight in float8, during a step; see `keep_copies`

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self.slot = create_slot(self)  # a copy has a weight of its own

    def needs_weight_gradient(self) -> bool:
        """Whether there is a weight gradient to defer; a weight computed in each F (a parametrization) has none.

        Products of complex numbers contain conjugates: those are left to autograd.
        """
        weight = self.weight
        needs_gradient = torch.is_grad_enabled() and weight.requires_grad and isinstance(weight, nn.Parameter)
        return needs_gradient and not self.has_hooks and not weight.is_complex() and not in_transform()

    def run_deferred(self, x: Tensor, transposed: bool = False) -> Tensor:
        """Forward whose backward leaves the weight gradient to W."""
        if torch.is_autocast_enabled(x.device.type) and x.dtype != torch.float64:
            x = x.to(torch.get_autocast_dtype(x.device.type))
        weight, bias = self.local_weight_and_bias()
        if not torch.compiler.is_compiling():
            return _Linear.apply(x, weight, bias, transposed, self)
        if x.requires_grad:
            return CompiledLinear.apply(x, weight, bias, self.slot, use_number(), transposed)
        # CompiledLinear would compute the input gradient, too, which is not needed here.
        return functional.linear(x, weight.t() if transposed else weight, bias)

    def local_weight_and_bias(self) -> tuple[Tensor, Tensor | None]:
        """This process's shards of weight and bias."""
        bias = self.bias if self.adds_bias else None
        return to_local(self.weight), None if bias is None else to_local(bias)


class DeferredLinear(Deferred, nn.Linear):
    """nn.Linear with its weight gradient left to W."""

    def forward(self, input: Tensor) -> Tensor:
        if isinstance(input, DTensor):
            return self._forward_dtensor(input)
        if self.float8 != "none":
            return run_float8(self, input)
        if self.needs_weight_gradient():
            return self.run_deferred(input)
        weight, bias = self.local_weight_and_bias()
        return functional.linear(input, weight, bias)

    def _forward_dtensor(self, input: Any) -> Tensor:
        """Forward of a layer that torch's tensor parallelism has sharded: on shards where these form one product."""
        weight: Any = self.weight
        placements = None
        if self.float8 != "none":
            raise EngineError("float8 cannot run layers that torch's tensor parallelism shards: use float8='none'")
        if self.needs_weight_gradient() and isinstance(weight, DTensor):
            placements = linear_placements(input, weight, self.bias is not None)
        if placements is None:
            return functional.linear(input, weight, self.bias)
        gradient, output = placements
        y = self.run_deferred(input.to_local(grad_placements=gradient))
        return from_local(y, weight.device_mesh, output)


class DeferredConv1D(Deferred):
    """transformers' Conv1D (a linear layer with its weight transposed) with its weight gradient left to W."""

    transposed = True

    def forward(self, x: Tensor) -> Tensor:
        if self.float8 != "none":
            return run_float8(self, x)
        if self.needs_weight_gradient():
            return self.run_deferred(x, transposed=True)
        return functional.linear(x, self.weight.t(), self.bias)


def _deferred_class(module: nn.Module) -> type[Deferred] | None:
    """The class that `defer` converts a module to, or None."""
    kind = type(module)
    if "forward" in module.__dict__ or "weight" not in module._parameters:  # a hook computes the weight in each F
        return None
    if has_grad_hooks(module._parameters["weight"]) or isinstance(module, Deferred):
        return None
    if kind is nn.Linear:
        return DeferredLinear
    if isinstance(module, nn.Linear) and kind.forward is nn.Linear.forward:
        return _deferred_subclass(kind)
    # compared by name, so that transformers need not be imported
    if (kind.__module__, kind.__name__) == ("transformers.pytorch_utils", "Conv1D"):
        return DeferredConv1D
    if (kind.__module__, kind.__name__) == ("transformers.models.falcon.modeling_falcon", "FalconLinear"):
        return _deferred_subclass(kind) if module.bias is None else None  # it rounds before it adds a bias
    return None


@functools.cache
def _deferred_subclass(base: type[nn.Linear]) -> type[Deferred]:
    """A deferred layer that is also a `base`: for models with subclasses of nn.Linear that compute the same."""
    return type(base.__name__, (DeferredLinear, base), {"__module__": base.__module__})
