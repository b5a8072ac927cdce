"""The gathers and reductions of sharded stages in a Timeline, beside its computations."""

from __future__ import annotations

from array import array
from collections.abc import Iterator, Sequence
from math import inf
from typing import NamedTuple

from zeropipe.core.action import REDUCE_GRAD, UNSHARD, Action, W
from zeropipe.core.jit import Arrays, Floats, Ints
from zeropipe.core.packed import PackedRows, decode, kind_of, stage_of
from zeropipe.core.schedule import Schedule


class Sharding(NamedTuple):
    """UNSHARD and REDUCE_GRAD of every rank, in the order of its Program: packed float64.

    `size` is the memory of the stage's full weights, or of its full gradients. Each is gathered or reduced in `units`.
    """

    packed: PackedRows
    start: bytes
    end: bytes
    size: bytes
    units: int

    def events(self, rank: int) -> Iterator[tuple[Action, float, float]]:
        """(action, start, end) of each gather and reduction of `rank`."""
        for code, start, end in self.packed.entries(rank, self.start, self.end):
            yield decode(code), start, end

    def span(self, rank: int) -> tuple[float, float] | None:
        """The first start and the last end of a rank; None if it has no events."""
        begin, stop = self.packed.offsets[rank : rank + 2]
        if begin == stop:
            return None
        return min(memoryview(self.start).cast("d")[begin:stop]), max(memoryview(self.end).cast("d")[begin:stop])


def sharding_of(
    packed: PackedRows, start: bytes, end: bytes, sizes_of: Sequence[Sequence[float]], units: int
) -> Sharding:
    """The gathers and reductions of packed rows. `sizes_of`: of each stage's full weights and full gradients."""
    size_of = {code: sizes_of[kind_of(code) == REDUCE_GRAD][stage_of(code)] for code in set(packed.view)}
    sizes = array("d", map(size_of.__getitem__, packed.view))
    return Sharding(packed, start, end, sizes.tobytes(), units)


def find_gathers(xp: Arrays, schedule: Schedule, starts: bytes, sharding: Sharding) -> tuple[Floats, Floats]:
    """Two columns: for each action the start of the UNSHARD that it waited for, else its own start; for each rank the
    last end of a REDUCE_GRAD.

    An action waited for an UNSHARD of its stage that ended when it started, or later.
    """
    start, packed, num_stages = xp.floats(starts), schedule.packed, schedule.num_stages
    gather_start = xp.full_floats(len(start))
    reduced = xp.full_floats(schedule.num_ranks, -inf)
    xp.call(
        find_gathers_kernel, xp.ints(packed.codes), xp.list_ints(packed.offsets), start,
        xp.ints(sharding.packed.codes), xp.list_ints(sharding.packed.offsets),
        xp.floats(sharding.start), xp.floats(sharding.end), xp.full_ints(num_stages, -1),
        xp.full_floats(num_stages), xp.full_floats(num_stages), gather_start, reduced,
    )  # fmt: skip
    return gather_start, reduced


def find_gathers_kernel(
    codes: Ints, offsets: Ints, start: Floats, events: Ints, event_offsets: Ints, event_start: Floats, event_end:
    Floats, rank_of: Ints, latest_start: Floats, latest_end: Floats, gather_start: Floats, reduced: Floats,
) -> None:  # fmt: skip
    """Fill `gather_start` and `reduced`. `latest_start` and `latest_end` are of the latest UNSHARD of a stage."""
    for rank in range(len(offsets) - 1):
        event = event_offsets[rank]
        for at in range(offsets[rank], offsets[rank + 1]):
            while event < event_offsets[rank + 1] and event_start[event] <= start[at]:
                if kind_of(events[event]) == UNSHARD:
                    stage = stage_of(events[event])
                    rank_of[stage] = rank
                    latest_start[stage] = event_start[event]
                    latest_end[stage] = event_end[event]
                event += 1
            stage = stage_of(codes[at])
            gather_start[at] = start[at]
            if kind_of(codes[at]) != W and rank_of[stage] == rank and latest_end[stage] >= start[at]:
                gather_start[at] = latest_start[stage]
        for event in range(event_offsets[rank], event_offsets[rank + 1]):
            if kind_of(events[event]) == REDUCE_GRAD:
                reduced[rank] = max(reduced[rank], event_end[event])
