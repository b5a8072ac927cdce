"""The thin lane below a rank's boxes: weights that are gathered, gradients that are reduced, copies to the host."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import NamedTuple

from zeropipe.core.action import Action, Kind
from zeropipe.core.timeline import Timeline
from zeropipe.viz.colors import OFFLOADING, SHARDING

MARKS = {"unshard": "u", "reduce": "r", "offload": "o", "reload": "l"}  # in a terminal without colours
THIN = "▔"


class Move(NamedTuple):
    """A gather, a reduction or a copy in the lane. Times count from the first start of the timeline."""

    name: str  # "0UNSHARD"
    look: str  # one of MARKS
    start: float
    end: float
    action: Action  # the first one, of merged ones


LOOKS = tuple(MARKS)
_LOOKS = {Kind.UNSHARD: "unshard", Kind.REDUCE_GRAD: "reduce", Kind.OFFLOAD: "offload", Kind.RELOAD: "reload"}


def has_lane(timeline: Timeline) -> bool:
    """Whether the ranks of a timeline have a lane."""
    return timeline.sharding is not None or timeline.offloading is not None


def looks_of(timelines: Iterable[Timeline]) -> list[str]:
    """The looks that lanes of these timelines may have, in the order of a legend."""
    listed = list(timelines)
    sharding = [*SHARDING] if any(one.sharding for one in listed) else []
    return [*sharding, *(OFFLOADING if any(one.offloading for one in listed) else ())]


def lane(timeline: Timeline, rank: int) -> Iterator[Move]:
    """The gathers and reductions of a rank, and its copies."""
    zero = timeline.first_start
    for _, action, start, end in (*timeline.sharding_spans(rank), *timeline.offloading_spans(rank)):
        yield Move(str(action), _LOOKS[action.kind], start - zero, end - zero, action)


def tracks(timeline: Timeline, rank: int) -> list[list[Move]]:
    """The lane of a rank by what runs at the same time, each by start: sharding, copies to the host, copies from it."""
    moves = sorted(lane(timeline, rank), key=lambda move: move.start)
    looks = [*(SHARDING,) * bool(timeline.sharding), *((look,) for look in OFFLOADING if timeline.offloading)]
    return [[move for move in moves if move.look in among] for among in looks]


def merged(moves: Iterable[Move], least: float) -> list[Move]:
    """Merge neighbours of one look that are less than `least` apart: they could not be distinguished."""
    found: list[Move] = []
    for move in moves:
        if found and found[-1].look == move.look and move.end - found[-1].start < least:
            found[-1] = found[-1]._replace(name=f"{found[-1].name.partition(' ')[0]} ...", end=move.end)
        else:
            found.append(move)
    return found


def cells(timeline: Timeline, rank: int, columns: int, step: float) -> list[str | None]:
    """The look that has most of each cell of a line in a terminal; None for an empty cell."""
    shares = {look: [0.0] * columns for look in MARKS}
    for move in lane(timeline, rank):
        first, last = (min(columns - 1, max(0, int(time / step))) for time in (move.start, move.end))
        for column in range(first, last + 1):
            inside = min(move.end, (column + 1) * step) - max(move.start, column * step)
            shares[move.look][column] += max(0.0, inside)
    tops = [max(MARKS, key=lambda look: shares[look][column]) for column in range(columns)]
    return [look if shares[look][column] > 0 else None for column, look in enumerate(tops)]
