"""What is computed of a chunk of logits, in float32 at least: statistics of each row, and the gradient of its loss.

A chunk has rows of tokens and columns of the vocabulary: all of them, or those of this process where the head is
sharded over `tp`. Then a row's statistics are reduced over the processes, a few numbers for each token.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Any, NamedTuple

import torch
from torch import Tensor

from zeropipe.core.model.head import COMPILED_NUMBERS, PLAIN_NUMBERS
from zeropipe.engine.blocks.compiling import compile_function
from zeropipe.engine.head.logits import LogitsRule
from zeropipe.engine.mesh.tp_collectives import TPGroup, all_reduce, all_reduce_max
from zeropipe.engine.torch_private.compile import mark_dynamic_rows

Measure = Callable[[Tensor, Tensor, LogitsRule, bool], Tensor]
WriteGradient = Callable[[Tensor, Tensor, Tensor, Tensor, LogitsRule], None]


class RowStatistics(NamedTuple):
    """Of each row: the logarithm of the sum of exponentials, the label's logit, the entropy of the softmax."""

    logsumexp: Tensor
    label: Tensor
    entropy: Tensor | None


@dataclass(frozen=True)
class ChunkPasses:
    """The two passes over a chunk, compiled or not."""

    measure: Measure
    write_gradient: WriteGradient
    chunk_numbers: int  # in a chunk of logits on a GPU

    def statistics(
        self, products: Tensor, column: Tensor, rule: LogitsRule, group: TPGroup | None, entropy: bool
    ) -> RowStatistics:
        """The statistics of the rows of a chunk. `column` is that of each row's label, -1 if it is not here."""
        maximum, *sums = self.measure(products, column, rule, entropy)
        if group is not None:
            local, maximum = maximum, all_reduce_max(maximum, group)
            factor = (local - maximum).exp()
            sums = list(all_reduce(torch.stack([sums[0] * factor, sums[1], *(s * factor for s in sums[2:])]), group))
        logsumexp = maximum + sums[0].log()
        return RowStatistics(logsumexp, sums[1], logsumexp - sums[2] / sums[0] if entropy else None)


def measure(products: Tensor, column: Tensor, rule: LogitsRule, entropy: bool) -> Tensor:
    """The maximum of each row, the sum of exponentials below it, the label's logit, and the sum that entropy needs."""
    logits = rule.apply(widen(products))
    maximum = logits.amax(-1)
    exponentials = (logits - maximum[:, None]).exp()
    label = logits.gather(-1, column.clamp(min=0)[:, None])[:, 0]
    found = [maximum, exponentials.sum(-1), torch.where(column >= 0, label, 0)]
    if entropy:  # 0 * -inf has no value
        found.append(torch.where(exponentials > 0, exponentials * logits, 0).sum(-1))
    return torch.stack(found)


def write_gradient(products: Tensor, column: Tensor, logsumexp: Tensor, factor: Tensor, rule: LogitsRule) -> None:
    """Replace products by the gradient of `factor` times their row's loss."""
    logits = rule.apply(widen(products))
    gradient = (logits - logsumexp[:, None]).exp()
    is_label = torch.arange(logits.shape[-1], device=logits.device) == column[:, None]
    gradient = rule.backward((gradient - is_label.to(gradient.dtype)) * factor[:, None], logits)
    products.copy_(gradient)


def widen(tensor: Tensor) -> Tensor:
    """The tensor in float32 if it has 16 bits."""
    return tensor.float() if tensor.dtype in (torch.bfloat16, torch.float16) else tensor


PLAIN = ChunkPasses(measure, write_gradient, PLAIN_NUMBERS)


@cache
def compiled_passes(backend: Any = None) -> ChunkPasses:
    """The passes as one kernel each, for any number of rows. `backend` is for tests (default: inductor)."""
    fast_measure = compile_function(measure, "the loss of a head", backend)
    fast_gradient = compile_function(write_gradient, "the gradient of a head's loss", backend)

    def run_measure(products: Tensor, column: Tensor, rule: LogitsRule, entropy: bool) -> Tensor:
        mark_dynamic_rows(products, column)
        return fast_measure(products, column, rule, entropy)

    def run_gradient(products: Tensor, column: Tensor, logsumexp: Tensor, factor: Tensor, rule: LogitsRule) -> None:
        mark_dynamic_rows(products, column, logsumexp, factor)
        fast_gradient(products, column, logsumexp, factor, rule)

    return ChunkPasses(run_measure, run_gradient, COMPILED_NUMBERS)
