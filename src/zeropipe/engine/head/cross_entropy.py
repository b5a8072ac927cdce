"""The cross entropy of a linear head, in chunks of tokens: forward makes the gradients of the loss, too.

The gradient of a row's loss needs its own row of logits only, and that of anything computed from the losses is a row's
factor times it. So forward makes logits, losses and the gradient of the hidden states chunk by chunk; backward
multiplies by the factor. Weight gradients are made in one of two ways:

in F   of a stage whose backward is not split, if the factor is known: added chunk by chunk, so that no more than one
       chunk of logits is ever in memory
in W   the gradients of the logits are kept, in the dtype of the head, and are products like those of other layers
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from zeropipe.core.model.head import MIN_ROWS, chunk_rows
from zeropipe.engine.backward.products import Product
from zeropipe.engine.backward.store import store_or_run
from zeropipe.engine.head.logits import LogitsRule
from zeropipe.engine.head.passes import ChunkPasses, widen
from zeropipe.engine.mesh.tp_collectives import TPGroup
from zeropipe.engine.torch_private.autograd import without_autocast
from zeropipe.engine.torch_private.tensors import require_on_device
from zeropipe.errors import EngineError

CPU_CHUNK_NUMBERS = 2**22  # in a chunk of logits: about what the caches of a CPU hold
FACTOR_TOLERANCE = 1e-4  # between the factor that F knew and that of backward


@dataclass(frozen=True)
class HeadCall:
    """What one call of a head computes, besides tensors.

    `factor`: that of each loss in the step's loss, if it is known before backward. `in_forward`: F adds the weight
    gradients. `has_gradient`: false under no_grad. `parameters` are those of the terms.
    """

    rule: LogitsRule
    passes: ChunkPasses
    parameters: tuple[nn.Parameter, ...]
    group: TPGroup | None = None
    entropy: bool = False
    factor: float | None = None
    in_forward: bool = False
    has_gradient: bool = True


class ChunkedCrossEntropy(torch.autograd.Function):
    """The losses of rows of tokens, and their entropies: of logits that are sums of products and a bias.

    `labels` has each row's label, -1 for none. Terms are x_1, ..., x_n and then weight_1, ..., weight_n.
    """

    @staticmethod
    def forward(
        ctx: Any, call: HeadCall, labels: Tensor, bias: Tensor | None, *terms: Tensor
    ) -> tuple[Tensor, Tensor | None]:
        return without_autocast(_forward, ctx, call, labels, bias, terms)

    @staticmethod
    def backward(ctx: Any, dy: Tensor, _: Any) -> tuple[Any, ...]:
        return without_autocast(_backward, ctx, dy)


def _forward(
    ctx: Any, call: HeadCall, labels: Tensor, bias: Tensor | None, terms: tuple[Tensor, ...]
) -> tuple[Tensor, Tensor | None]:
    number = len(call.parameters)
    xs, weights = terms[:number], terms[number:]
    columns = weights[0].shape[0]
    column = _local_column(labels, columns, call.group)
    dtype = widen(xs[0].new_empty(0)).dtype
    losses = torch.empty(len(labels), dtype=dtype, device=labels.device)
    entropies = torch.empty_like(losses) if call.entropy else None
    factor = (labels >= 0).to(dtype) * (call.factor or 1.0)
    gradients = _Gradients(ctx, call, xs, bias)
    for rows in chunks(len(labels), columns, CPU_CHUNK_NUMBERS if labels.is_cpu else call.passes.chunk_numbers):
        products = _products([x[rows] for x in xs], weights, bias)
        found = call.passes.statistics(products, column[rows], call.rule, call.group, call.entropy)
        losses[rows] = torch.where(labels[rows] >= 0, found.logsumexp - found.label, 0)
        if entropies is not None:
            entropies[rows] = found.entropy
        if gradients.any:
            call.passes.write_gradient(products, column[rows], found.logsumexp, factor[rows], call.rule)
            gradients.add(rows, products, weights)
        del products  # else it is there beside the next chunk
    gradients.save(factor)
    if entropies is not None:
        ctx.mark_non_differentiable(entropies)
    return losses, entropies


def _local_column(labels: Tensor, columns: int, group: TPGroup | None) -> Tensor:
    """The column of each label among those of this process; -1 if it is not here."""
    size, first = (1, 0) if group is None else (group.size, columns * group.rank)
    require_on_device((labels < columns * size).all(), f"a label is outside of the vocabulary of {columns * size}")
    column = labels - first
    return torch.where((labels >= 0) & (column >= 0) & (column < columns), column, -1)


def chunks(rows: int, columns: int, numbers: int) -> Iterator[slice]:
    """Consecutive rows, in chunks of at most `numbers` logits, of equal size but the last one."""
    size = chunk_rows(rows, columns, numbers, MIN_ROWS)
    for start in range(0, rows, size):
        yield slice(start, min(start + size, rows))


def _products(xs: list[Tensor], weights: tuple[Tensor, ...], bias: Tensor | None) -> Tensor:
    """The products of a chunk: the sum of x W^T over the terms, and the bias."""
    first, *rest = ((x, weight.to(x.dtype)) for x, weight in zip(xs, weights))
    total = torch.nn.functional.linear(*first, None if bias is None else bias.to(xs[0].dtype))
    for x, weight in rest:
        total += torch.mm(x, weight.t()).to(total.dtype)
    return total


class _Gradients:
    """What forward makes of the gradients of logits, chunk by chunk, and saves for backward."""

    def __init__(self, ctx: Any, call: HeadCall, xs: tuple[Tensor, ...], bias: Tensor | None) -> None:
        self._ctx, self._call, self._xs = ctx, call, xs
        _, _, needs_bias, *needs = ctx.needs_input_grad
        self._dx = [torch.empty_like(x) if need and call.has_gradient else None for x, need in zip(xs, needs)]
        self._trained = [index for index, need in enumerate(needs[len(xs) :]) if need]
        self._db = bias.new_zeros(bias.shape, dtype=widen(bias[:0]).dtype) if needs_bias and bias is not None else None
        self._kept: list[tuple[slice, Tensor]] = []
        self.any = call.has_gradient and any(ctx.needs_input_grad)

    def add(self, rows: slice, gradient: Tensor, weights: tuple[Tensor, ...]) -> None:
        """Use the gradient of the logits of a chunk."""
        for dx, weight in zip(self._dx, weights):
            if dx is not None:
                torch.mm(gradient.to(dx.dtype), weight.to(dx.dtype), out=dx[rows])
        if not self._call.in_forward:
            if self._trained or self._db is not None:
                self._kept.append((rows, gradient))
            return
        if self._db is not None:
            self._db += gradient.sum(0, dtype=self._db.dtype)
        for index in self._trained:
            x = self._xs[index][rows]
            Product(self._call.parameters[index], x, gradient.to(x.dtype)).accumulate()

    def save(self, factor: Tensor) -> None:
        ctx = self._ctx
        ctx.save_for_backward(factor, *(self._xs if self._kept else ()))
        ctx.call, ctx.dx, ctx.db, ctx.kept, ctx.trained = self._call, self._dx, self._db, self._kept, self._trained


def _backward(ctx: Any, dy: Tensor) -> tuple[Any, ...]:
    factor, *xs = ctx.saved_tensors
    if ctx.dx is None:
        raise EngineError("the backward of a head ran twice: leave out retain_graph=True, or use fused_head=False")
    call, dxs, kept, ctx.dx, ctx.kept = ctx.call, ctx.dx, ctx.kept, None, []
    # what backward's factor is to that which forward multiplied by: 1 in nearly every step
    ratio = torch.where(factor == 0, 0, dy / torch.where(factor == 0, 1, factor))
    if call.in_forward:
        is_known = ((ratio - 1).abs() < FACTOR_TOLERANCE) | (factor == 0)
        require_on_device(is_known.all(), "the loss of a head was scaled after its weight gradients were made")
    for dx in dxs:
        if dx is not None:
            dx.mul_(ratio[:, None])
    db = ctx.db
    for rows, gradient in kept:
        if db is not None:
            db += ratio[rows].to(db.dtype) @ gradient.to(db.dtype)
        for index in ctx.trained:
            x = (xs[index][rows] * ratio[rows, None]).to(xs[index].dtype)
            store_or_run(Product(call.parameters[index], x, gradient.to(x.dtype)))
    return None, None, db, *dxs, *[None] * len(dxs)
