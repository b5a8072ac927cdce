"""What ran, where that is not what the schedule says: a W that ran in pieces, some of them before its place."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

from zeropipe.core.action import W
from zeropipe.core.packed import PackedRows, kind_of
from zeropipe.core.schedule import Schedule

KINDS = "qdddd"  # of the columns of a Ran, as arrays


class Ran(NamedTuple):
    """One action as it ran, or a piece of a W."""

    code: int
    start: float
    end: float
    during: float  # memory
    after: float


def as_ran(schedule: Schedule, rows: Sequence[Sequence[Ran]]) -> tuple[Schedule, Sequence[Sequence[Ran]]]:
    """The schedule whose rows these are.

    Where Ws ran in different numbers of pieces, every W gets as many parts as the one with the most: those that it did
    not need take no time, right after its last piece.
    """
    packed = PackedRows.of([entry.code for entry in row] for row in rows)
    if packed == schedule.packed:
        return schedule, rows
    rows = [_joined(row) for row in rows]
    pieces = Counter(entry.code for row in rows for entry in row if kind_of(entry.code) == W)
    most = max(pieces.values())
    evened = [_evened(row, pieces, most) for row in rows]
    problem = replace(schedule.problem, num_weight_parts=most)
    packed = PackedRows.of([entry.code for entry in row] for row in evened)
    return replace(schedule, problem=problem, packed=packed), evened


def _joined(row: Sequence[Ran]) -> list[Ran]:
    """Pieces of a W that ran one after the other are one."""
    joined: list[Ran] = []
    for entry in row:
        if joined and kind_of(entry.code) == W and joined[-1].code == entry.code:
            before = joined.pop()
            entry = Ran(entry.code, before.start, entry.end, max(before.during, entry.during), entry.after)
        joined.append(entry)
    return joined


def _evened(row: Sequence[Ran], pieces: Counter[int], most: int) -> list[Ran]:
    left, evened = Counter(pieces), list[Ran]()
    for entry in row:
        evened.append(entry)
        if kind_of(entry.code) == W:
            left[entry.code] -= 1
            if not left[entry.code]:
                nothing = entry._replace(start=entry.end, during=entry.after)
                evened += [nothing] * (most - pieces[entry.code])
    return evened
