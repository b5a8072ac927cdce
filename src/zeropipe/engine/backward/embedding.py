"""Embeddings whose gradient is added row by row: autograd fills a tensor of the weight's size for every microbatch.

The rows of a step are a few thousand, the weight has a hundred thousand: zeros, a cast to float32 and an addition of
the whole weight take longer than a layer. It is a product of W like those of linear layers.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.nn import functional

from zeropipe.engine.backward.gradients import ensure_grad, grad_dtype
from zeropipe.engine.backward.products import Product
from zeropipe.engine.backward.store import store_or_return
from zeropipe.engine.torch_private.autograd import has_grad_hooks, in_transform


@dataclass(slots=True, eq=False)
class EmbeddingProduct(Product):
    """The gradient of one use of an embedding: x are the token ids."""

    padding_idx: int | None = None

    @property
    def flops(self) -> int:
        return self.dy.numel()

    def _compute(self) -> Tensor:
        padding = -1 if self.padding_idx is None else self.padding_idx
        return torch.ops.aten.embedding_dense_backward(self.dy, self.x, len(self.parameter), padding, False)

    def _accumulate(self) -> None:
        gradient, ids = ensure_grad(self.parameter), self.x.flatten()
        rows = self.dy.flatten(0, -2).to(gradient.dtype)
        if self.padding_idx is not None:
            rows = rows.masked_fill((ids == self.padding_idx)[:, None], 0)
        gradient.index_put_((ids,), rows, accumulate=True)  # unlike index_add_ in one order, also on a GPU


class _Lookup(torch.autograd.Function):
    """An embedding whose backward puts (ids, dy) into the store."""

    @staticmethod
    def forward(ctx: Any, ids: Tensor, weight: Tensor, padding_idx: int | None, parameter: nn.Parameter) -> Tensor:
        ctx.save_for_backward(ids)
        ctx.parameter, ctx.padding_idx = parameter, padding_idx
        return functional.embedding(ids, weight, padding_idx)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[None, Tensor | None, None, None]:
        (ids,) = ctx.saved_tensors
        # a copy: the caller's ids may be those of other microbatches by the time of W
        product = EmbeddingProduct(ctx.parameter, ids.clone(), dy, padding_idx=ctx.padding_idx)
        return None, store_or_return(product, ctx, 1), None, None


class RowEmbedding(nn.Embedding):
    """nn.Embedding whose gradient is added row by row, left to W where the backward is split."""

    def forward(self, input: Tensor) -> Tensor:
        weight = self.weight
        if not _adds_rows(weight):
            return super().forward(input)
        return _Lookup.apply(input, weight, self.padding_idx, weight)


def _adds_rows(weight: Any) -> bool:
    """Whether a weight is trained and its gradient has 32 bits: rows of 16 bits would be rounded at each addition."""
    return (
        isinstance(weight, nn.Parameter) and not isinstance(weight, DTensor)
        and weight.requires_grad and torch.is_grad_enabled()
        and grad_dtype(weight) in (torch.float32, torch.float64) and not has_grad_hooks(weight)
        and not in_transform() and not torch.compiler.is_compiling()
    )  # fmt: skip


def defer_embeddings(module: nn.Module) -> None:
    """Let the embeddings in a module add their gradients row by row, in place."""
    for child in module.modules():
        if not isinstance(child, nn.Embedding) or isinstance(child, RowEmbedding) or "forward" in vars(child):
            continue
        if child.max_norm is None and not child.scale_grad_by_freq and not child.sparse:
            child.__class__ = _row_embedding_class(type(child))


@functools.cache
def _row_embedding_class(kind: type[nn.Embedding]) -> type[nn.Embedding]:
    """A class between a kind of embedding, which may scale its rows, and nn.Embedding."""
    if kind is nn.Embedding:
        return RowEmbedding
    return type(kind.__name__, (kind, RowEmbedding), {"__module__": kind.__module__})
