"""Linear layers that compute F, I and W in float8.

With "tensor", a matrix has one power of two; x and weights are E4M3 and output gradients E5M2, whose range is larger.
F converts x and I converts dy, and W uses both again. With "row", each vector that a product sums over has a power of
its own, and everything is E4M3; the vectors of W are others than those of F and I, so x and dy are converted twice.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.fx import has_side_effect

from zeropipe.engine.backward.gradients import grad_dtype, local_grad, set_local_grad
from zeropipe.engine.backward.ops import find_owner
from zeropipe.engine.backward.products import Product, flatten_rows
from zeropipe.engine.backward.store import store_or_return, store_or_run
from zeropipe.engine.torch_private import float8 as torch_float8
from zeropipe.engine.torch_private.autograd import in_transform, save, saved, without_autocast
from zeropipe.engine.torch_private.compile import align_result, keep_inputs_from_reuse, use_number
from zeropipe.engine.torch_private.float8 import E4M3, E5M2, Float8
from zeropipe.engine.torch_private.tensors import version
from zeropipe.errors import EngineError


@dataclass(slots=True, eq=False)
class Float8Product(Product):
    """The weight gradient of one use of one weight: x and dy are float8 numbers, `powers` their powers of two."""

    powers: tuple[Tensor, ...] = ()
    dtype: torch.dtype = torch.float32  # of the product
    fast: bool = False

    has_own_tensors = True

    def tensors(self) -> tuple[Tensor, ...]:
        return (self.x, self.dy, *self.powers)

    def current_version(self) -> int:
        return sum(map(version, self.tensors()))

    def replace(self, replacements: Any) -> None:
        self.x, self.dy, *powers = (replacements.get(id(tensor), tensor) for tensor in self.tensors())
        self.powers = tuple(powers)

    def _compute(self) -> Tensor:
        return self._multiply().to(self.parameter.dtype)

    def _accumulate(self) -> None:
        if (gradient := local_grad(self.parameter)) is None:
            set_local_grad(self.parameter, self._multiply().to(grad_dtype(self.parameter)))
        else:
            gradient.add_(self._multiply())

    def _multiply(self) -> Tensor:
        operands = [
            Float8(torch_float8.transpose(data), power.t())
            for data, power in ((self.x, self.powers[0]), (self.dy, self.powers[1]))
        ]
        left, right = operands if self.transposed else operands[::-1]
        return torch_float8.multiply(left, right, self.dtype, fast=self.fast)


def run_float8(layer: Any, x: Tensor) -> Tensor:
    """Forward of a linear layer with float8 products."""
    if in_transform():
        raise EngineError("a layer with float8 cannot run inside torch.func (vmap, grad, ...): use float8='none'")
    if torch.is_autocast_enabled(x.device.type):
        x = x.to(torch.get_autocast_dtype(x.device.type))
    weight, bias = layer.local_weight_and_bias()
    rows = flatten_rows(x)
    if torch.compiler.is_compiling():
        y = _CompiledLinear.apply(
            rows, weight, layer.slot, use_number(), layer.transposed, layer.float8, weight.requires_grad
        )
    else:
        y = _Linear.apply(rows, weight, layer)
    y = y.view(*x.shape[:-1], y.shape[-1])
    return y if bias is None else y + bias.to(y.dtype)


class _Linear(torch.autograd.Function):
    """x W^T, whose backward returns dx and puts (x, dy) in float8 into the store."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, layer: Any) -> Tensor:
        mode = layer.float8
        data, power = _convert_rows(x, E4M3, mode)
        kept = _convert_for_weights(x, Float8(data, power), E4M3, mode) if ctx.needs_input_grad[1] else ()
        save(ctx, weight, *kept)
        ctx.parameter, ctx.layer, ctx.dtype, ctx.mode = layer._parameters["weight"], layer, x.dtype, mode
        return float8_linear(data, power, weight, layer.slot, True, layer.transposed, x.dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, Tensor | None, None]:
        weight, *kept = saved(ctx)
        layer, dx, dw = ctx.layer, None, None
        converted = _convert_rows(dy, _gradient_dtype(ctx.mode), ctx.mode)
        if ctx.needs_input_grad[0]:
            dx = float8_linear(*converted, weight, layer.slot, False, layer.transposed, ctx.dtype)
        if kept:
            kept_dy = _convert_for_weights(dy, converted, _gradient_dtype(ctx.mode), ctx.mode)
            product = _create_product(ctx.parameter, Float8(*kept), kept_dy, layer.transposed, ctx.dtype, ctx.mode)
            dw = store_or_return(product, ctx, 1)
        return dx, dw, None


class _CompiledLinear(torch.autograd.Function):
    """x W^T in a compiled block: conversions are part of its graph, products are opaque operators."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, slot: Tensor, use: int, transposed: bool, mode: str, is_trained: bool
    ) -> Tensor:
        data, power = _convert_rows(x, E4M3, mode)
        kept = _convert_for_weights(x, Float8(data, power), E4M3, mode) if is_trained else ()
        ctx.save_for_backward(weight, slot, *kept)
        ctx.use, ctx.transposed, ctx.mode, ctx.dtype, ctx.is_trained = use, transposed, mode, x.dtype, is_trained
        return float8_linear(data, power, weight, slot, True, transposed, x.dtype)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, None, None, None, None, None, None]:
        weight, slot, *kept = ctx.saved_tensors
        converted = _convert_rows(dy, _gradient_dtype(ctx.mode), ctx.mode)
        if ctx.is_trained:
            kept_dy = _convert_for_weights(dy, converted, _gradient_dtype(ctx.mode), ctx.mode)
            dx = float8_linear_i(
                *converted, weight, slot, ctx.use, ctx.transposed, ctx.dtype, kept[0], kept[1], kept_dy[0], kept_dy[1]
            )
        else:
            dx = float8_linear(*converted, weight, slot, False, ctx.transposed, ctx.dtype)
        return dx, None, None, None, None, None, None


def _gradient_dtype(mode: str) -> torch.dtype:
    return E5M2 if mode == "tensor" else E4M3


def _convert_rows(x: Tensor, dtype: torch.dtype, mode: str) -> Float8:
    """The operand of F or I, whose products sum over rows of x."""
    return torch_float8.quantize(x, dtype, None if mode == "tensor" else 1)


def _convert_for_weights(x: Tensor, converted: Float8, dtype: torch.dtype, mode: str) -> Float8:
    """The operand of W, whose products sum over columns of x."""
    return converted if mode == "tensor" else torch_float8.quantize(x, dtype, 0)


def _create_product(
    parameter: nn.Parameter, x: Float8, dy: Float8, transposed: bool, dtype: torch.dtype, mode: str
) -> Float8Product:
    return Float8Product(
        parameter, x.data, dy.data, transposed, powers=(x.power, dy.power), dtype=dtype, fast=mode == "row"
    )


_library = torch.library.Library("zeropipe", "FRAGMENT")
for schema in (
    "float8_linear(Tensor x, Tensor power, Tensor weight, Tensor slot, bool forward, bool transposed, ScalarType dtype)"
    " -> Tensor",
    "float8_linear_i(Tensor dy, Tensor power, Tensor weight, Tensor slot, int use, bool transposed, ScalarType dtype,"
    " Tensor w_x, Tensor w_x_power, Tensor w_dy, Tensor w_dy_power) -> Tensor",
):
    _library.define(schema, tags=(torch.Tag.flexible_layout,))
float8_linear = torch.ops.zeropipe.float8_linear.default
float8_linear_i = torch.ops.zeropipe.float8_linear_i.default
has_side_effect(float8_linear_i)  # it stores tensors for W also where its result is not used


@torch.library.impl(_library, "float8_linear", "CompositeExplicitAutograd")
def _float8_linear(
    x: Tensor, power: Tensor, weight: Tensor, slot: Tensor, forward: bool, transposed: bool, dtype: torch.dtype
) -> Tensor:
    """The output of a linear layer, or its input gradient, of an operand in float8."""
    return without_autocast(_multiply, Float8(x, power), weight, find_owner(slot)[0], forward, transposed, dtype)


@torch.library.impl(_library, "float8_linear_i", "CompositeExplicitAutograd")
def _float8_linear_i(
    dy: Tensor, power: Tensor, weight: Tensor, slot: Tensor, use: int, transposed: bool, dtype: torch.dtype,
    w_x: Tensor, w_x_power: Tensor, w_dy: Tensor, w_dy_power: Tensor,
) -> Tensor:  # fmt: skip
    """The input gradient of a linear layer; also stores the operands of W."""
    layer, name = find_owner(slot)
    parameter: Any = layer._parameters[name]
    x, gradient = Float8(w_x, w_x_power), Float8(w_dy, w_dy_power)
    store_or_run(_create_product(parameter, x, gradient, transposed, dtype, layer.float8))
    return without_autocast(_multiply, Float8(dy, power), weight, layer, False, transposed, dtype)


@torch.library.register_fake("zeropipe::float8_linear", lib=_library)
def _(
    x: Tensor, power: Tensor, weight: Tensor, slot: Tensor, forward: bool, transposed: bool, dtype: torch.dtype
) -> Tensor:
    align_result(float8_linear)
    torch_float8.count_flops(float8_linear)
    return x.new_empty(x.shape[0], weight.shape[0 if forward != transposed else 1], dtype=dtype)


@torch.library.register_fake("zeropipe::float8_linear_i", lib=_library)
def _(dy: Tensor, power: Tensor, weight: Tensor, slot: Tensor, use: int, transposed: bool, dtype: torch.dtype,
      *kept: Tensor) -> Tensor:  # fmt: skip
    keep_inputs_from_reuse(float8_linear_i)
    return dy.new_empty(dy.shape[0], weight.shape[0 if transposed else 1], dtype=dtype)


def _multiply(x: Float8, weight: Tensor, layer: Any, forward: bool, transposed: bool, dtype: torch.dtype) -> Tensor:
    operand = _weight_operand(weight, layer, 1 if forward != transposed else 0)
    x = Float8(x.data.contiguous(), x.power)
    return torch_float8.multiply(x, operand, dtype, fast=forward or layer.float8 == "row")


def _weight_operand(weight: Tensor, layer: Any, dim: int) -> Float8:
    """The weight for products that sum over its dimension `dim`, which becomes the second one.

    During a step the engine keeps it for the next microbatches.
    """
    if layer.copies is None:
        return _convert_weight(weight.detach(), layer.float8, dim)
    if dim not in layer.copies:
        layer.copies[dim] = _convert_weight(weight.detach(), layer.float8, dim)
    found: Float8 = layer.copies[dim]
    return found


def _convert_weight(weight: Tensor, mode: str, dim: int) -> Float8:
    data, power = torch_float8.quantize(weight, E4M3, None if mode == "tensor" else dim)
    return Float8(data, power) if dim == 1 else Float8(torch_float8.transpose(data), power.t())
