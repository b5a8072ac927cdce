"""The parts of a sequence that the processes of `cp` have: a chunk near its head and one near its tail each.

A sequence is cut into 2 n chunks for n processes. Process r has chunk r and chunk 2 n - 1 - r: a token attends to all
tokens before it, so early chunks are cheap, late ones expensive, and each of these pairs has the same work.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor


class SequenceParts(NamedTuple):
    """How sequences are divided over `size` processes, of which this one is `rank`."""

    rank: int
    size: int

    def padded(self, length: int, multiple: int = 1) -> int:
        """The length that divides into equal chunks, and a part into `multiple` equal chunks."""
        step = 2 * self.size * multiple
        return -(-length // step) * step

    def chunks(self, length: int) -> tuple[range, range]:
        """The tokens of this process in sequences of a padded length."""
        step = length // (2 * self.size)
        return tuple(range(i * step, (i + 1) * step) for i in (self.rank, 2 * self.size - 1 - self.rank))  # type: ignore[return-value]

    def take(self, x: Tensor, dim: int) -> Tensor:
        """This process's part of tensors with all tokens along a dimension."""
        return torch.cat([x.narrow(dim, chunk.start, len(chunk)) for chunk in self.chunks(x.shape[dim])], dim)

    def join(self, parts: Sequence[Tensor], dim: int) -> Tensor:
        """All tokens, in order, of the parts of all processes."""
        halves = [part.chunk(2, dim) for part in parts]
        return torch.cat([*(head for head, _ in halves), *(tail for _, tail in reversed(halves))], dim)

    def cut(self, x: Tensor, dim: int) -> list[Tensor]:
        """The parts of all processes."""
        return [SequenceParts(rank, self.size).take(x, dim) for rank in range(self.size)]
