"""What follows from a Schedule alone: its edges, and its forward half."""

from __future__ import annotations

from itertools import pairwise

from zeropipe.core.action import Action, Kind, actions_of
from zeropipe.core.lower import lower
from zeropipe.core.placement import Placement
from zeropipe.core.schedule import Program, Schedule


def edges_of(placement: Placement) -> set[tuple[int, int]]:
    """The directed pairs of ranks between which messages go, whatever the number of microbatches."""
    neighbours = {pair for table in placement.copies for pair in pairwise(table) if pair[0] != pair[1]}
    return neighbours | {(b, a) for a, b in neighbours}


def forward_only(schedule: Schedule) -> Program:
    """The schedule's forwards in its own order: it runs whatever the placement."""
    rows: list[list[Action]] = [
        [action for action in actions_of(row) if action.kind is Kind.F] for row in schedule.rows
    ]
    return lower(Schedule.of(schedule.problem, schedule.placement, rows, schedule.name))
