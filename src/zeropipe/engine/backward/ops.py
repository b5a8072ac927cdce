"""Deferred products as opaque operators, so that a block is compiled whole."""

from __future__ import annotations

import weakref
from typing import Any

import torch
from torch import Tensor, nn
from torch.fx import has_side_effect

from zeropipe.engine.backward.products import Product, rows, stacked_product
from zeropipe.engine.backward.store import put
from zeropipe.engine.torch_private.autograd import without_autocast
from zeropipe.engine.torch_private.compile import keep_inputs_from_reuse

# A layer is handed to its operator as a tensor that holds its number here: unlike a Python number this is no
# compile-time constant, so all layers share one graph. It lives on the CPU, so reading it waits for no device.
_owners: list[tuple[weakref.ref[nn.Module], str]] = []


def new_slot(owner: nn.Module, name: str = "weight") -> Tensor:
    """A tensor that stands for a layer's parameter inside compiled graphs."""
    _owners.append((weakref.ref(owner), name))
    return torch.tensor(len(_owners) - 1, device="cpu")


def _parameter(slot: Tensor) -> nn.Parameter:
    owner, name = _owners[int(slot.item())]
    module = owner()
    assert module is not None, "a layer is gone before its backward ran"
    return module._parameters[name]  # type: ignore[return-value]  # getattr takes many times as long


_library = torch.library.Library("zeropipe", "DEF")
_library.define(
    "linear_i(Tensor dy, Tensor weight, Tensor x, Tensor slot, int use, bool transposed) -> Tensor",
    tags=(torch.Tag.flexible_layout,),
)
_library.define(
    "grouped(Tensor x, Tensor weight, Tensor offsets, bool transposed) -> Tensor", tags=(torch.Tag.flexible_layout,)
)
_library.define(
    "stacked_i(Tensor dy, Tensor weight, Tensor x, Tensor? offsets, Tensor slot, int use, bool transposed) -> Tensor",
    tags=(torch.Tag.flexible_layout,),
)
linear_i = torch.ops.zeropipe.linear_i.default
grouped = torch.ops.zeropipe.grouped.default
stacked_i = torch.ops.zeropipe.stacked_i.default
for op in (linear_i, stacked_i):
    has_side_effect(op)  # what it keeps for W is wanted also where the gradient it returns is not


@torch.library.impl(_library, "linear_i", "CompositeExplicitAutograd")
def _linear_i(dy: Tensor, weight: Tensor, x: Tensor, slot: Tensor, use: int, transposed: bool) -> Tensor:
    """The input gradient of a linear layer; keeps x and dy for W on the side."""
    put(Product(_parameter(slot), x, dy, transposed))
    if weight.dtype != dy.dtype:
        weight = weight.to(dy.dtype)
    return without_autocast(torch.mm, dy, weight.t() if transposed else weight)


@torch.library.register_fake("zeropipe::linear_i", lib=_library)
def _(dy: Tensor, weight: Tensor, x: Tensor, slot: Tensor, use: int, transposed: bool) -> Tensor:
    keep_inputs_from_reuse(linear_i)  # whoever compiles, with whatever options
    return torch.empty_like(x, dtype=dy.dtype, memory_format=torch.contiguous_format)


class SlottedLinear(torch.autograd.Function):
    """x W^T + b in a compiled block: as in eager mode, but backward is an operator the compiler cannot look into."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, slot: Tensor, use: int, transposed: bool
    ) -> Tensor:
        ctx.save_for_backward(x, weight, slot)
        ctx.use, ctx.transposed = use, transposed
        return torch.nn.functional.linear(x, weight.t() if transposed else weight, bias)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, None, Tensor | None, None, None, None]:
        x, weight, slot = ctx.saved_tensors
        db = rows(dy).sum(0) if ctx.needs_input_grad[2] else None
        dx = linear_i(rows(dy), weight, rows(x), slot, ctx.use, ctx.transposed)
        return dx.reshape(x.shape), None, db, None, None, None


@torch.library.impl(_library, "grouped", "CompositeExplicitAutograd")
def _grouped(x: Tensor, weight: Tensor, offsets: Tensor, transposed: bool) -> Tensor:
    return stacked_product(x, weight if transposed else weight.transpose(1, 2), offsets)


@torch.library.register_fake("zeropipe::grouped", lib=_library)
def _(x: Tensor, weight: Tensor, offsets: Tensor, transposed: bool) -> Tensor:
    return x.new_empty(x.shape[0], weight.shape[2 if transposed else 1])


def stacked(x: Tensor, weight: Tensor, offsets: Tensor | None, transposed: bool) -> Tensor:
    """Rows of x through their expert's weight, which is cast to the dtype of x."""
    weight = weight.to(x.dtype)
    if offsets is not None:
        return grouped(x, weight, offsets, transposed)
    return stacked_product(x, weight if transposed else weight.transpose(1, 2), None)


@torch.library.impl(_library, "stacked_i", "CompositeExplicitAutograd")
def _stacked_i(
    dy: Tensor, weight: Tensor, x: Tensor, offsets: Tensor | None, slot: Tensor, use: int, transposed: bool
) -> Tensor:
    """The input gradient of `stacked`; keeps x and dy for W on the side."""
    put(Product(_parameter(slot), x, dy, transposed, offsets))
    return stacked_product(dy, weight.transpose(1, 2) if transposed else weight, offsets)


@torch.library.register_fake("zeropipe::stacked_i", lib=_library)
def _(
    dy: Tensor, weight: Tensor, x: Tensor, offsets: Tensor | None, slot: Tensor, use: int, transposed: bool
) -> Tensor:
    keep_inputs_from_reuse(stacked_i)
    return x.new_empty(x.shape)


class SlottedStack(torch.autograd.Function):
    """`stacked` in a compiled block."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, offsets: Tensor | None, slot: Tensor, use: int, transposed: bool
    ) -> Tensor:
        ctx.save_for_backward(x, weight, offsets, slot)
        ctx.use, ctx.transposed = use, transposed
        return stacked(x, weight, offsets, transposed)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, None, None, None, None, None]:
        x, weight, offsets, slot = ctx.saved_tensors
        weight = weight.to(dy.dtype)
        return stacked_i(dy, weight, x, offsets, slot, ctx.use, ctx.transposed), None, None, None, None, None
