"""Deferred products as opaque operators, so that a block compiles to one graph."""

from __future__ import annotations

import weakref
from typing import Any

import torch
from torch import Tensor, nn
from torch.fx import has_side_effect

from zeropipe.engine.backward.products import Product, add_grouped_mm, flatten_rows, grouped_mm
from zeropipe.engine.backward.store import store_or_run
from zeropipe.engine.torch_private.autograd import without_autocast
from zeropipe.engine.torch_private.compile import keep_inputs_from_reuse

# A layer is passed to its operator as a tensor with its index here: unlike a Python integer this is no compile-time
# constant, so all layers share one graph. The tensor is on the CPU, so reading it does not wait for a device.
_owners: list[tuple[weakref.ref[nn.Module], str]] = []


def create_slot(owner: nn.Module, name: str = "weight") -> Tensor:
    """A tensor that represents a layer's parameter inside compiled graphs."""
    _owners.append((weakref.ref(owner), name))
    return torch.tensor(len(_owners) - 1, device="cpu")


def find_owner(slot: Tensor) -> tuple[nn.Module, str]:
    """The layer that a slot was created for, and the name of its parameter."""
    owner, name = _owners[int(slot.item())]
    module = owner()
    assert module is not None, "a layer was freed before its backward ran"
    return module, name


def _parameter(slot: Tensor) -> nn.Parameter:
    module, name = find_owner(slot)
    return module._parameters[name]  # type: ignore[return-value]  # getattr is many times slower


_library = torch.library.Library("zeropipe", "DEF")
for schema in (
    "linear_i(Tensor dy, Tensor weight, Tensor x, Tensor slot, int use, bool transposed) -> Tensor",
    "grouped_linear(Tensor x, Tensor weight, Tensor offsets, bool transposed) -> Tensor",
    "grouped_outer(Tensor x, Tensor dy, Tensor offsets) -> Tensor",
    "grouped_linear_i(Tensor dy, Tensor weight, Tensor x, Tensor? offsets, Tensor slot, int use, bool transposed)"
    " -> Tensor",
):
    _library.define(schema, tags=(torch.Tag.flexible_layout,))
linear_i = torch.ops.zeropipe.linear_i.default
_grouped_op = torch.ops.zeropipe.grouped_linear.default
grouped_linear_i = torch.ops.zeropipe.grouped_linear_i.default
for op in (linear_i, grouped_linear_i):
    has_side_effect(op)  # it stores tensors for W also where its result is not used


@torch.library.impl(_library, "linear_i", "CompositeExplicitAutograd")
def _linear_i(dy: Tensor, weight: Tensor, x: Tensor, slot: Tensor, use: int, transposed: bool) -> Tensor:
    """The input gradient of a linear layer; also stores x and dy for W."""
    store_or_run(Product(_parameter(slot), x, dy, transposed))
    if weight.dtype != dy.dtype:
        weight = weight.to(dy.dtype)
    return without_autocast(torch.mm, dy, weight.t() if transposed else weight)


@torch.library.register_fake("zeropipe::linear_i", lib=_library)
def _(dy: Tensor, weight: Tensor, x: Tensor, slot: Tensor, use: int, transposed: bool) -> Tensor:
    keep_inputs_from_reuse(linear_i)  # here it also holds for models that users compile themselves
    return torch.empty_like(x, dtype=dy.dtype, memory_format=torch.contiguous_format)


class CompiledLinear(torch.autograd.Function):
    """x W^T + b in a compiled block: as in eager mode, but backward is an opaque operator."""

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
        db = flatten_rows(dy).sum(0) if ctx.needs_input_grad[2] else None
        dx = linear_i(flatten_rows(dy), weight, flatten_rows(x), slot, ctx.use, ctx.transposed)
        return dx.reshape(x.shape), None, db, None, None, None


@torch.library.impl(_library, "grouped_linear", "CompositeExplicitAutograd")
def _grouped_linear(x: Tensor, weight: Tensor, offsets: Tensor, transposed: bool) -> Tensor:
    return grouped_mm(x, weight if transposed else weight.transpose(1, 2), offsets)


@torch.library.register_fake("zeropipe::grouped_linear", lib=_library)
def _(x: Tensor, weight: Tensor, offsets: Tensor, transposed: bool) -> Tensor:
    return x.new_empty(x.shape[0], weight.shape[2 if transposed else 1])


@torch.library.impl(_library, "grouped_outer", "CompositeExplicitAutograd")
def _grouped_outer(x: Tensor, dy: Tensor, offsets: Tensor) -> Tensor:
    gradient = x.new_zeros(len(offsets), x.shape[1], dy.shape[1])
    add_grouped_mm(gradient, x, dy, offsets)
    return gradient


@torch.library.register_fake("zeropipe::grouped_outer", lib=_library)
def _(x: Tensor, dy: Tensor, offsets: Tensor) -> Tensor:
    return x.new_empty(len(offsets), x.shape[1], dy.shape[1])


grouped_outer = torch.ops.zeropipe.grouped_outer.default  # the sum of x^T dy over the rows of each expert


def grouped_linear(x: Tensor, weight: Tensor, offsets: Tensor | None, transposed: bool) -> Tensor:
    """Apply to each row of x the weight of its expert, which is cast to the dtype of x."""
    weight = weight.to(x.dtype)
    if offsets is not None:
        return _grouped_op(x, weight, offsets, transposed)
    return grouped_mm(x, weight if transposed else weight.transpose(1, 2), None)


@torch.library.impl(_library, "grouped_linear_i", "CompositeExplicitAutograd")
def _grouped_linear_i(
    dy: Tensor, weight: Tensor, x: Tensor, offsets: Tensor | None, slot: Tensor, use: int, transposed: bool
) -> Tensor:
    """The input gradient of `grouped_linear`; also stores x and dy for W."""
    store_or_run(Product(_parameter(slot), x, dy, transposed, offsets))
    return grouped_mm(dy, weight.transpose(1, 2) if transposed else weight, offsets)


@torch.library.register_fake("zeropipe::grouped_linear_i", lib=_library)
def _(
    dy: Tensor, weight: Tensor, x: Tensor, offsets: Tensor | None, slot: Tensor, use: int, transposed: bool
) -> Tensor:
    keep_inputs_from_reuse(grouped_linear_i)
    return x.new_empty(x.shape)


class CompiledGroupedLinear(torch.autograd.Function):
    """`grouped_linear` in a compiled block."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, offsets: Tensor | None, slot: Tensor, use: int, transposed: bool
    ) -> Tensor:
        ctx.save_for_backward(x, weight, offsets, slot)
        ctx.use, ctx.transposed = use, transposed
        return grouped_linear(x, weight, offsets, transposed)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, None, None, None, None, None]:
        x, weight, offsets, slot = ctx.saved_tensors
        weight = weight.to(dy.dtype)
        return grouped_linear_i(dy, weight, x, offsets, slot, ctx.use, ctx.transposed), None, None, None, None, None
