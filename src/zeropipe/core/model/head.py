"""The fused head of a last stage: what the engine and its predictions must agree on.

Logits are made in chunks of tokens, and F computes the gradients of the hidden states, too. The gradients of the head's
weights are added in F, or the gradients of the logits are kept for W.
"""

from __future__ import annotations

from collections.abc import Iterable

from zeropipe.core.action import Kind
from zeropipe.core.packed import is_joined, kind_of
from zeropipe.core.schedule import Schedule

MIN_ROWS = 16  # tokens of a chunk
# numbers of a chunk on a GPU, 883 and 2,208 tokens of a vocabulary of 152,000: uncompiled passes have float32 copies
PLAIN_NUMBERS, COMPILED_NUMBERS = 2**27, 5 * 2**26


def chunk_rows(rows: int, columns: int, numbers: int, min_rows: int = MIN_ROWS) -> int:
    """The rows of a chunk of at most `numbers` logits; all chunks but the last one are equal."""
    most = max(numbers // max(columns, 1), min_rows)
    return max(-(-rows // max(-(-rows // most), 1)), 1)


def row_adds_in_forward(codes: Iterable[int]) -> bool:
    """Whether F of a last stage in this row adds the weight gradients of its head.

    Not where a W of the row runs later, nor where an F runs beside a B, which may add to the same tied weight.
    """
    return not any(is_joined(code) or kind_of(code) == Kind.I for code in codes)


def adds_in_forward(schedule: Schedule) -> bool:
    """The same of the ranks with the last stage."""
    ranks = {table[-1] for table in schedule.placement.copies}
    return all(row_adds_in_forward(schedule.packed.row(rank)) for rank in ranks)
