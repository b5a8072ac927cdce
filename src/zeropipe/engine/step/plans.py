"""What follows from a Program alone: its edges, and its forward half."""

from __future__ import annotations

from zeropipe.core.action import Action, Kind, actions_of
from zeropipe.core.lower import lower
from zeropipe.core.schedule import Program, Schedule


def edges_of(program: Program) -> set[tuple[int, int]]:
    """The directed pairs of ranks that some message uses."""
    placement, edges = program.schedule.placement, set()
    for rank, row in enumerate(program.rows):
        for action in actions_of(row):
            if action.kind in (Kind.SEND_F, Kind.SEND_B):
                edges.add((rank, placement.peer_of(action)))
    return edges


def forward_only(schedule: Schedule) -> Program:
    """The schedule's forwards in its own order: it runs whatever the placement."""
    rows: list[list[Action]] = [
        [action for action in actions_of(row) if action.kind is Kind.F] for row in schedule.rows
    ]
    return lower(Schedule.of(schedule.problem, schedule.placement, rows, schedule.name))
