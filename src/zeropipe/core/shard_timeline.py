"""When stages were gathered and reduced: beside the computations of a Timeline, on a lane of their own."""

from __future__ import annotations

from array import array
from collections.abc import Iterator, Sequence
from itertools import accumulate
from math import inf
from typing import NamedTuple

from zeropipe.core.action import REDUCE_GRAD, RESHARD, UNSHARD, Action, W
from zeropipe.core.jit import Arrays, Floats
from zeropipe.core.packed import PackedRows, decode, kind_of, stage_of
from zeropipe.core.schedule import Schedule


class Sharding(NamedTuple):
    """UNSHARD and REDUCE_GRAD of every rank, in the order of its Program: packed float64.

    `size` is the memory of the stage's whole weights, or of its whole gradients. They are gathered and reduced in
    `units` pieces.
    """

    packed: PackedRows
    start: bytes
    end: bytes
    size: bytes
    units: int

    def lane(self, rank: int) -> Iterator[tuple[Action, float, float]]:
        """What gathered and reduced on `rank`."""
        begin, stop = self.packed.offsets[rank : rank + 2]
        starts, ends = (memoryview(column).cast("d")[begin:stop] for column in (self.start, self.end))
        for code, start, end in zip(self.packed.row(rank), starts, ends, strict=True):
            yield decode(code), start, end

    def span(self, rank: int) -> tuple[float, float] | None:
        """From the first start to the last end of a rank; None if it has nothing."""
        begin, stop = self.packed.offsets[rank : rank + 2]
        if begin == stop:
            return None
        return min(memoryview(self.start).cast("d")[begin:stop]), max(memoryview(self.end).cast("d")[begin:stop])


def apart(
    xp: Arrays, num_actions: int, rows: PackedRows, sizes_of: Sequence[Sequence[float]], units: int, *columns: Floats
) -> tuple[tuple[Floats, ...], Sharding]:
    """Columns of `rows` (start and end first), as those of its computations, and its Sharding.

    `sizes_of` are the sizes of each stage's whole weights and whole gradients.
    """
    codes = xp.ints(rows.codes)
    sizes = xp.full_ints(len(rows.offsets) - 1)
    xp.call(count_kernel, codes, xp.list_ints(rows.offsets), sizes)
    offsets = tuple(accumulate((int(size) for size in sizes), initial=0))
    computed = tuple(xp.full_floats(num_actions) for _ in columns)
    moved_codes = xp.full_ints(offsets[-1])
    moved = tuple(xp.full_floats(offsets[-1]) for _ in columns)
    for column, mine, other in zip(columns, computed, moved, strict=True):
        xp.call(apart_kernel, codes, column, mine, other, moved_codes)
    packed = PackedRows(xp.int_bytes(moved_codes), offsets)
    sizes_there = array("d", (sizes_of[kind_of(code) == REDUCE_GRAD][stage_of(code)] for code in packed.view))
    times = (xp.float_bytes(moved[0]), xp.float_bytes(moved[1]))
    return computed, Sharding(packed, *times, sizes_there.tobytes(), units)


def count_kernel(codes, offsets, sizes):  # type: ignore[no-untyped-def]
    """How many UNSHARD and REDUCE_GRAD each rank has."""
    for rank in range(len(offsets) - 1):
        for at in range(offsets[rank], offsets[rank + 1]):
            if kind_of(codes[at]) > W and kind_of(codes[at]) != RESHARD:
                sizes[rank] += 1


def apart_kernel(codes, column, computed, moved, moved_codes):  # type: ignore[no-untyped-def]
    """Write what belongs to computations, and what to UNSHARD and REDUCE_GRAD, to columns of their own."""
    mine = 0
    other = 0
    for at in range(len(codes)):
        kind = kind_of(codes[at])
        if kind <= W:
            computed[mine] = column[at]
            mine += 1
        elif kind != RESHARD:
            moved[other] = column[at]
            moved_codes[other] = codes[at]
            other += 1


def gathers(xp: Arrays, schedule: Schedule, starts: bytes, sharding: Sharding | None) -> tuple[Floats, Floats]:
    """For each action when the UNSHARD began that was under way until it started, else its own start.

    And for each rank the last end of a REDUCE_GRAD.
    """
    start, packed, num_stages = xp.floats(starts), schedule.packed, schedule.num_stages
    reduced = xp.full_floats(schedule.num_ranks, -inf)
    if sharding is None:
        return start, reduced
    found = xp.full_floats(len(start))
    xp.call(
        gathers_kernel, xp.ints(packed.codes), xp.list_ints(packed.offsets), start,
        xp.ints(sharding.packed.codes), xp.list_ints(sharding.packed.offsets),
        xp.floats(sharding.start), xp.floats(sharding.end), xp.full_ints(num_stages, -1),
        xp.full_floats(num_stages), xp.full_floats(num_stages), found, reduced,
    )  # fmt: skip
    return found, reduced


def gathers_kernel(  # type: ignore[no-untyped-def]
    codes, offsets, start, lane, lane_offsets, lane_start, lane_end, owner, begun, done, found, reduced
):
    """Fill `found` and `reduced`. `begun` and `done` are the latest UNSHARD of a stage on the rank that owns it."""
    for rank in range(len(offsets) - 1):
        place = lane_offsets[rank]
        for at in range(offsets[rank], offsets[rank + 1]):
            while place < lane_offsets[rank + 1] and lane_start[place] <= start[at]:
                if kind_of(lane[place]) == UNSHARD:
                    stage = stage_of(lane[place])
                    owner[stage] = rank
                    begun[stage] = lane_start[place]
                    done[stage] = lane_end[place]
                place += 1
            stage = stage_of(codes[at])
            found[at] = start[at]
            if kind_of(codes[at]) != W and owner[stage] == rank and done[stage] >= start[at]:
                found[at] = begun[stage]
        for place in range(lane_offsets[rank], lane_offsets[rank + 1]):
            if kind_of(lane[place]) == REDUCE_GRAD:
                reduced[rank] = max(reduced[rank], lane_end[place])
