"""Warm-up, steady state and cool-down of a rank, and in which of them its sends block."""

from __future__ import annotations

from zeropipe.core.action import B, F, I
from zeropipe.core.jit import Arrays, Ints
from zeropipe.core.needs import Dependencies
from zeropipe.core.packed import kind_of


def free_sends(deps: Dependencies, blocking: bool, blocking_ends: bool) -> tuple[Ints, Ints]:
    """For each rank the first and the last of the actions whose sends do not block it.

    That is all of its actions, with `blocking` none, with `blocking_ends` those of its steady state.
    """
    xp: Arrays = deps.arrays
    begin, end = deps.offsets[:-1], deps.offsets[1:]
    if blocking:
        begin, end = end, begin
    first, last = xp.list_ints(begin), xp.list_ints(end)
    if blocking_ends:
        xp.call(steady_kernel, deps.codes, deps.offsets, first, last)
    return first, last


def steady_kernel(codes, offsets, first, last):  # type: ignore[no-untyped-def]
    """The steady state: from the last F before the first backward to the first backward after the last F."""
    for rank in range(len(offsets) - 1):
        first[rank] = offsets[rank + 1]
        last[rank] = offsets[rank] - 1
        forward = offsets[rank]
        behind = False  # a backward has followed the latest F
        for at in range(offsets[rank], offsets[rank + 1]):
            kind = kind_of(codes[at])
            if kind == F:
                forward = at
                behind = False
            elif kind in (B, I) and not behind:
                behind = True
                first[rank] = min(first[rank], forward)
                last[rank] = at
