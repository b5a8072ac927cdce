"""The products a W consists of: dW += dy^T x, added directly to the gradient."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor, nn
from torch.nn import functional

from zeropipe.engine.backward.gradients import ensure_grad, grad_dtype, local_grad, set_local_grad, to_local
from zeropipe.engine.torch_private.autograd import without_autocast
from zeropipe.engine.torch_private.tensors import version


@dataclass(slots=True, eq=False)  # not frozen: that takes as long as launching a kernel
class Product:
    """One deferred weight gradient: the input and the output gradient of one use of one weight."""

    parameter: nn.Parameter
    x: Tensor
    dy: Tensor
    transposed: bool = False  # the weight is (in, out), as in GPT-2's Conv1D
    offsets: Tensor | None = None  # experts: rows offsets[e-1]:offsets[e] belong to expert e
    version: int = 0  # `current_version` when the product was stored

    has_own_tensors: ClassVar[bool] = False  # whether x and dy were created for products, so that nobody writes to them

    @property
    def is_stack(self) -> bool:
        """Whether there is one weight for each expert; without offsets, x and dy are then batches of matrices."""
        return self.parameter.dim() == 3

    @property
    def flops(self) -> int:
        return 2 * self.x.numel() * self.dy.shape[-1]

    def tensors(self) -> tuple[Tensor, ...]:
        """The tensors that are kept until W."""
        return (self.x, self.dy) if self.offsets is None else (self.x, self.dy, self.offsets)

    def current_version(self) -> int:
        """A number that grows with every in-place write to one of the tensors."""
        total = version(self.x) + version(self.dy)
        return total if self.offsets is None else total + version(self.offsets)

    def replace(self, replacements: Mapping[int, Tensor]) -> None:
        """Replace tensors by others, which are given by the id of the old one."""
        self.x, self.dy = replacements.get(id(self.x), self.x), replacements.get(id(self.dy), self.dy)
        self.offsets = replacements.get(id(self.offsets), self.offsets)

    def accumulate(self) -> None:
        """Add the product to the parameter's gradient, without a temporary of its size where the device allows it."""
        without_autocast(self._accumulate)

    def compute(self) -> Tensor:
        """Return the product, as autograd expects it."""
        return without_autocast(self._compute)

    def _compute(self) -> Tensor:
        left, right = self._operands()
        if not self.is_stack:
            return _mm(left.t(), right, self.parameter.dtype)
        gradient = torch.zeros_like(to_local(self.parameter))
        add_grouped_mm(gradient, left, right, self.offsets)
        return gradient

    def _accumulate(self) -> None:
        parameter, (left, right) = self.parameter, self._operands()
        if self.is_stack:
            add_grouped_mm(to_local(ensure_grad(parameter)), left, right, self.offsets)
        elif (gradient := local_grad(parameter)) is None:
            set_local_grad(parameter, _mm(left.t(), right, grad_dtype(parameter)))
        else:
            _addmm_(gradient, left.t(), right)

    def _operands(self) -> tuple[Tensor, Tensor]:
        left, right = (self.x, self.dy) if self.transposed else (self.dy, self.x)
        if left.dim() != 2 and not self.is_stack:
            left, right = flatten_rows(left), flatten_rows(right)
        return left, right


def flatten_rows(tensor: Tensor) -> Tensor:
    """The vectors along the last dimension as rows of a matrix; works for an empty last dimension, too."""
    return tensor.flatten(0, -2) if tensor.dim() > 1 else tensor[None]


def add_grouped_mm(gradient: Tensor, left: Tensor, right: Tensor, offsets: Tensor | None) -> None:
    """Add left^T right of each expert e (rows offsets[e-1]:offsets[e], or matrix e of a batch) to gradient[e]."""
    if offsets is None:
        _baddbmm_(gradient, left.transpose(1, 2), right)
        return
    if _has_grouped_kernel(left):
        gradient.add_(functional.grouped_mm(left.t(), right, offs=offsets))
        return
    start = 0
    for expert, end in enumerate(offsets.tolist()):
        if end > start:
            _addmm_(gradient[expert], left[start:end].t(), right[start:end])
        start = end


def grouped_mm(x: Tensor, weights: Tensor, offsets: Tensor | None) -> Tensor:
    """Multiply rows offsets[e-1]:offsets[e] of x, or matrix e of a batch, by weights[e]."""
    if offsets is None:
        return torch.bmm(x, weights)
    if _has_grouped_kernel(x):
        return functional.grouped_mm(x, weights, offs=offsets)
    out, start = x.new_zeros(x.shape[0], weights.shape[-1]), 0
    for expert, end in enumerate(offsets.tolist()):
        torch.mm(x[start:end], weights[expert], out=out[start:end])
        start = end
    return out


def _has_grouped_kernel(x: Tensor) -> bool:
    """Whether torch has one kernel for all experts, which does not copy the offsets to the host."""
    return x.is_cuda and x.dtype == torch.bfloat16


def _mm(a: Tensor, b: Tensor, dtype: torch.dtype) -> Tensor:
    if dtype == a.dtype:
        return torch.mm(a, b)
    if a.is_cuda and dtype == torch.float32:
        return torch.mm(a, b, out_dtype=dtype)
    return torch.mm(a.to(dtype), b.to(dtype))


def _addmm_(grad: Tensor, a: Tensor, b: Tensor) -> None:
    if grad.dtype == a.dtype:
        grad.addmm_(a, b)
    elif a.is_cuda and grad.dtype == torch.float32:
        torch.addmm(grad, a, b, out_dtype=torch.float32, out=grad)
    else:
        grad.addmm_(a.to(grad.dtype), b.to(grad.dtype))


def _baddbmm_(grad: Tensor, a: Tensor, b: Tensor) -> None:
    if grad.dtype == a.dtype:
        grad.baddbmm_(a, b)
    elif a.is_cuda and grad.dtype == torch.float32:
        grad.add_(torch.bmm(a, b, out_dtype=torch.float32))
    else:
        grad.baddbmm_(a.to(grad.dtype), b.to(grad.dtype))
