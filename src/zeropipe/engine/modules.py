"""Layers whose weight gradient waits for W: `defer` swaps them in, in any model, without touching its code."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from zeropipe.engine.products import Product
from zeropipe.engine.split import put


def defer(module: nn.Module) -> int:
    """Let every linear layer in `module` leave its weight gradient to W; returns how many there are.

    Layers are changed in place and keep their parameters and names. What is not a plain linear layer
    (norms, embeddings, convolutions, linear layers with a forward of their own) does its whole backward in I.
    """
    for child in module.modules():
        deferred = _deferred_class(child)
        if deferred is not None:
            child.__class__ = deferred
    return sum(isinstance(child, DeferredLinear | DeferredConv1D) for child in module.modules())


class _Linear(torch.autograd.Function):
    """x W^T + b, whose backward gives dx and db and puts (x, dy) into the store."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: nn.Parameter, bias: Tensor | None, transposed: bool) -> Tensor:
        ctx.save_for_backward(x, weight)
        # Under checkpointing saved_tensors returns a detached alias of the Parameter: its .grad would be lost.
        ctx.parameter = weight
        ctx.transposed = transposed
        return functional.linear(x, weight.t() if transposed else weight, bias)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, None, Tensor | None, None]:
        x, weight = ctx.saved_tensors
        dx = db = None
        if ctx.needs_input_grad[0]:
            weight = weight.to(dy.dtype)
            dx = dy @ (weight.t() if ctx.transposed else weight)
        if ctx.needs_input_grad[2]:
            db = dy.reshape(-1, dy.shape[-1]).sum(0)
        put(Product(ctx.parameter, x, dy, ctx.transposed))
        return dx, None, db, None


def deferred_linear(x: Tensor, weight: nn.Parameter, bias: Tensor | None, transposed: bool = False) -> Tensor:
    """A linear layer whose weight gradient is deferred."""
    if torch.is_autocast_enabled(x.device.type):
        x = x.to(torch.get_autocast_dtype(x.device.type))
    return _Linear.apply(x, weight, bias, transposed)


class DeferredLinear(nn.Linear):
    """nn.Linear with its weight gradient left to W."""

    def forward(self, input: Tensor) -> Tensor:
        if not (torch.is_grad_enabled() and self.weight.requires_grad):
            return super().forward(input)
        return deferred_linear(input, self.weight, self.bias)


class DeferredConv1D(nn.Module):
    """transformers' Conv1D (a linear layer with its weight transposed) with its weight gradient left to W."""

    weight: nn.Parameter
    bias: nn.Parameter

    def forward(self, x: Tensor) -> Tensor:
        if not (torch.is_grad_enabled() and self.weight.requires_grad):
            return functional.linear(x, self.weight.t(), self.bias)
        return deferred_linear(x, self.weight, self.bias, transposed=True)


def _deferred_class(module: nn.Module) -> type[nn.Module] | None:
    kind = type(module)
    if "forward" in module.__dict__:
        return None
    if kind is nn.Linear:
        return DeferredLinear
    # known by its name, so that transformers need not be imported
    if kind.__name__ == "Conv1D" and kind.__module__ == "transformers.pytorch_utils":
        return DeferredConv1D
    return None
