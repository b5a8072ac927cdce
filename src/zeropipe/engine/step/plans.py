"""What follows from a Schedule or a row of its Program alone."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

from zeropipe.core.action import COMPUTE, Action, Kind, Overlap, Step, actions_of
from zeropipe.core.lower import lower
from zeropipe.core.placement import Placement
from zeropipe.core.schedule import Program, Schedule


def edges_of(placement: Placement) -> set[tuple[int, int]]:
    """The directed pairs of ranks between which messages go, whatever the number of microbatches."""
    neighbours = {pair for table in placement.copies for pair in pairwise(table) if pair[0] != pair[1]}
    return neighbours | {(b, a) for a, b in neighbours}


def forwards(schedule: Schedule) -> Schedule:
    """The schedule's forwards in its own order."""
    rows: list[list[Action]] = [
        [action for action in actions_of(row) if action.kind is Kind.F] for row in schedule.rows
    ]
    return Schedule.of(schedule.problem, schedule.placement, rows, schedule.name)


def forward_only(schedule: Schedule, shards: str | None = None) -> Program:
    """The Program of the schedule's forwards: it runs whatever the placement. `shards` as in `lower`."""
    return lower(forwards(schedule), shards)


def reduced_within(row: Sequence[Step]) -> set[int]:
    """The places of those B and W right behind which their stage is reduced, so that it can begin before they end."""
    found, last = set(), None
    for at, step in enumerate(row):
        if isinstance(step, Overlap):
            last = None
        elif step.kind in COMPUTE:
            last = (at, step.stage) if step.kind in (Kind.B, Kind.W) else None
        elif step.kind is Kind.REDUCE_GRAD:
            if last is not None and last[1] == step.stage:
                found.add(last[0])
            last = None  # what is reduced first comes first: every process reduces stages in the order of its row
    return found
