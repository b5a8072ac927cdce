"""The columns of a timeline as the viewer reads them: small integers that repeat, which deflate compresses well.

Times are in ticks, as the gap to the previous box and the duration; microbatches and dependencies are differences.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

from zeropipe.core import explain
from zeropipe.core.action import F
from zeropipe.core.jit import Floats, Ints, arrays
from zeropipe.core.packed import is_joined, kind_of, microbatch_of, stage_of
from zeropipe.core.schedule import Schedule
from zeropipe.core.timeline import Timeline
from zeropipe.viz.lanes import LOOKS, Move

WHOLE, UPPER, LOWER = 0, 1, 2  # an Overlap is a box in two halves: forward above, backward below
CHECKPOINTED = 1 << 6  # in a head
LARGEST_FLOAT = 3.4028234663852886e38  # of four bytes
_TYPECODES = {"i4": "i", "u2": "H", "u1": "B", "f4": "f"}  # type of the viewer -> of array.array


class Column(NamedTuple):
    """Packed values of one type: "i4", "u2", "u1" or "f4"."""

    type: str
    length: int
    data: bytes


class BoxColumns(NamedTuple):
    """The columns that every timeline has, one entry per box."""

    gap: Ints
    duration: Ints
    microbatch: Ints
    remote: Ints
    own: Ints
    waited: Ints
    stage: Ints
    head: Ints  # the kind, and above its four bits the half, and above its two bits whether it is a checkpointed F


def build_columns(timeline: Timeline, tick: float, moves: Sequence[Move]) -> dict[str, Column]:
    """All columns by their names, those with wider values first: the viewer reads each one in place.

    `moves` are those of all lanes.
    """
    size = timeline.schedule.num_actions
    xp, why = arrays(size), explain.find_reasons(timeline)
    box = BoxColumns(*(xp.full_ints(size) for _ in BoxColumns._fields))
    xp.call(
        columns_kernel, xp.ints(timeline.schedule.packed.codes), xp.floats(timeline.start), xp.floats(timeline.end),
        xp.list_ints(why.remote), xp.list_ints(why.own), xp.list_ints(why.waited), timeline.first_start, tick, box,
    )  # fmt: skip

    for at in find_checkpointed(timeline.schedule):
        box.head[at] |= CHECKPOINTED

    def of_boxes(name: str, kind: str = "i4") -> Column:
        return Column(kind, size, xp.small_bytes(getattr(box, name), _TYPECODES[kind]))

    columns = {name: of_boxes(name) for name in ("gap", "duration", "microbatch", "remote", "own", "waited")}
    columns["path"] = _column("i4", explain.critical_indices(timeline))
    actions = [move.action for move in moves]
    if moves:
        columns["laneStart"] = _column("i4", (round(move.start / tick) for move in moves))
        columns["laneEnd"] = _column("i4", (round(move.end / tick) for move in moves))
        columns["laneMicrobatch"] = _column("i4", (action.microbatch for action in actions))
    for name, levels in zip(("during", "after"), timeline.memory or ()):
        values = xp.list_floats(xp.floats(levels))
        xp.call(limit_kernel, values)
        columns[name] = Column("f4", size, xp.small_bytes(values, "f"))
    columns["stage"] = of_boxes("stage", "u2")
    if moves:
        columns["laneStage"] = _column("u2", (action.stage for action in actions))
        columns["laneLook"] = _column("u1", (LOOKS.index(move.look) for move in moves))
    columns["head"] = of_boxes("head", "u1")
    return columns


def find_checkpointed(schedule: Schedule) -> list[int]:
    """The boxes of checkpointed F."""
    if not schedule.checkpointed:
        return []
    codes = enumerate(schedule.packed.view)
    marks = schedule.checkpointed
    return [at for at, code in codes if kind_of(code) == F and (stage_of(code), microbatch_of(code)) in marks]


def _column(kind: str, values: Iterable[Any]) -> Column:
    listed = list(values)
    return Column(kind, len(listed), arrays(0).small_bytes(listed, _TYPECODES[kind]))


def columns_kernel(
    codes: Ints, start: Floats, end: Floats, remote: Ints, own: Ints, waited: Ints, first_start: float, tick: float,
    box: BoxColumns,
) -> None:  # fmt: skip
    """Fill the columns of all boxes; 0 stands for no dependency, since no box depends on itself."""
    previous_end = 0
    previous_microbatch = 0
    was_joined = 0
    for at in range(len(codes)):
        code = codes[at]
        begin = round((start[at] - first_start) / tick)
        finish = round((end[at] - first_start) / tick)
        box.gap[at] = begin - previous_end
        box.duration[at] = finish - begin
        box.microbatch[at] = microbatch_of(code) - previous_microbatch
        box.remote[at] = at - remote[at] if remote[at] >= 0 else 0
        box.own[at] = at - own[at] if own[at] >= 0 else 0
        box.waited[at] = at - waited[at] if waited[at] >= 0 else 0
        box.stage[at] = stage_of(code)
        box.head[at] = kind_of(code) | (is_joined(code) * UPPER + was_joined * LOWER) << 4
        previous_end = finish
        previous_microbatch = microbatch_of(code)
        was_joined = is_joined(code)


def limit_kernel(values: Floats) -> None:
    """Four bytes are precise enough for a curve; larger values become the largest."""
    for at in range(len(values)):
        values[at] = min(LARGEST_FLOAT, max(-LARGEST_FLOAT, values[at]))
