"""The products a W is made of: dW += dy^T x, straight into the gradient."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional

from zeropipe.engine.backward.gradients import grad_dtype, gradient, local, peek, start
from zeropipe.engine.torch_private.autograd import without_autocast


@dataclass(slots=True, eq=False)  # not frozen: that takes as long as launching a kernel
class Product:
    """One deferred weight gradient: the input and output gradient of one use of one weight."""

    parameter: nn.Parameter
    x: Tensor
    dy: Tensor
    transposed: bool = False  # the weight is (in, out), as in GPT-2's Conv1D
    offsets: Tensor | None = None  # experts: rows up to offsets[e] belong to expert e or a lower one
    version: int = 0  # of what it keeps, when it was put into the store

    @property
    def is_stack(self) -> bool:
        """Of one weight for each expert; without offsets x and dy are stacks of as many matrices."""
        return self.parameter.dim() == 3

    @property
    def flops(self) -> int:
        """How much work it is, for cutting a W into even pieces."""
        return 2 * self.x.numel() * self.dy.shape[-1]

    def tensors(self) -> tuple[Tensor, ...]:
        return (self.x, self.dy) if self.offsets is None else (self.x, self.dy, self.offsets)

    def versions(self) -> int:
        """A number that grows with every write in place to what it keeps."""
        count = self.x._version + self.dy._version
        return count if self.offsets is None else count + self.offsets._version

    def replace(self, others: Mapping[int, Tensor]) -> None:
        """Keep other tensors instead of some, which are named by their id."""
        self.x, self.dy = others.get(id(self.x), self.x), others.get(id(self.dy), self.dy)
        self.offsets = others.get(id(self.offsets), self.offsets)

    def run(self) -> None:
        """Add this product to the parameter's gradient, without a temporary of its size where the device allows it."""
        without_autocast(self._add)

    def value(self) -> Tensor:
        """The product by itself, as autograd wants it."""
        return without_autocast(self._alone)

    def _alone(self) -> Tensor:
        left, right = self._sides()
        if not self.is_stack:
            return _mm(left.t(), right, self.parameter.dtype)
        gradient = torch.zeros_like(local(self.parameter))
        add_stacked(gradient, left, right, self.offsets)
        return gradient

    def _add(self) -> None:
        parameter, (left, right) = self.parameter, self._sides()
        if self.is_stack:
            add_stacked(local(gradient(parameter)), left, right, self.offsets)
        elif (sum_so_far := peek(parameter)) is None:
            start(parameter, _mm(left.t(), right, grad_dtype(parameter)))
        else:
            _addmm_(sum_so_far, left.t(), right)

    def _sides(self) -> tuple[Tensor, Tensor]:
        left, right = (self.x, self.dy) if self.transposed else (self.dy, self.x)
        if left.dim() != 2 and not self.is_stack:
            left, right = rows(left), rows(right)
        return left, right


def rows(tensor: Tensor) -> Tensor:
    """As a matrix, of vectors along the last dimension: also of vectors without entries."""
    return tensor.flatten(0, -2) if tensor.dim() > 1 else tensor[None]


def add_stacked(gradient: Tensor, left: Tensor, right: Tensor, offsets: Tensor | None) -> None:
    """A stack of experts: rows offsets[e-1]:offsets[e], or matrix e, make the gradient of expert e."""
    if offsets is None:
        _add_batches(gradient, left.transpose(1, 2), right)
        return
    if _has_grouped_kernel(left):
        gradient.add_(functional.grouped_mm(left.t(), right, offs=offsets))
        return
    start = 0
    for expert, end in enumerate(offsets.tolist()):
        if end > start:
            _addmm_(gradient[expert], left[start:end].t(), right[start:end])
        start = end


def stacked_product(x: Tensor, weights: Tensor, offsets: Tensor | None) -> Tensor:
    """Rows offsets[e-1]:offsets[e], or matrix e, of x times weights[e]."""
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
    """One kernel for all experts, which does not wait for the offsets to reach the host."""
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


def _add_batches(grad: Tensor, a: Tensor, b: Tensor) -> None:
    if grad.dtype == a.dtype:
        grad.baddbmm_(a, b)
    elif a.is_cuda and grad.dtype == torch.float32:
        grad.add_(torch.bmm(a, b, out_dtype=torch.float32))
    else:
        grad.baddbmm_(a.to(grad.dtype), b.to(grad.dtype))
