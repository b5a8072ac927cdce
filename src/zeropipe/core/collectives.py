"""The collectives of a rank with sharded stages: which unit of which stage is gathered or reduced, in which order.

Processes that share a stage must call the same collectives in the same order: a collective is paired with what its
peers call next, not with what it means. So the order follows from a row of the Program alone, never from the data.

A unit is a part of a stage that is gathered and reduced by itself. Units are numbered in the order of a backward pass;
the outermost, which holds all others, has the last number.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from zeropipe.core.action import Kind, Step, actions_of

AT_ONCE = 2  # units that are gathered at a time, where weights are gathered for every microbatch
_READS_WEIGHTS = (Kind.F, Kind.B, Kind.I)


class Collective(NamedTuple):
    """One all-gather (UNSHARD) or reduce-scatter (REDUCE_GRAD)."""

    kind: Kind
    stage: int
    unit: int

    def __str__(self) -> str:
        return f"{'gather' if self.kind is Kind.UNSHARD else 'reduce'} unit {self.unit} of stage {self.stage}"


def gather_order(num_units: int, backward: bool) -> list[int]:
    """The units of a stage in the order a pass needs them.

    The outermost comes first: it has the embedding, the head, or nothing.
    """
    inner = range(num_units - 1)
    return [num_units - 1, *(inner if backward else reversed(inner))]


def gathers_for_backward(row: Sequence[Step], at: int, regather: bool) -> bool:
    """Whether the UNSHARD at `at` gathers in the order of a backward pass.

    Weights that are kept for the step are gathered for a forward pass, also on a rank that has no work for their stage:
    its peers may have some.
    """
    stage = actions_of(row[at : at + 1])[0].stage
    uses = (action.kind for action in actions_of(row[at:]) if action.stage == stage and action.kind in _READS_WEIGHTS)
    return regather and next(uses, Kind.F) is not Kind.F


def collectives(row: Sequence[Step], num_units: Mapping[int, int], regather: bool) -> list[Collective]:
    """What a rank gathers and reduces in a step. `num_units`: of each of its stages that is sharded.

    With `regather` an UNSHARD gathers the first units; the others follow within the action that it is for.
    """
    found: list[Collective] = []
    begun: dict[int, list[int]] = {}  # the units still to be gathered of stages for which there was an UNSHARD

    def gather(stage: int, units: Sequence[int]) -> None:
        found.extend(Collective(Kind.UNSHARD, stage, unit) for unit in units)

    for at, step in enumerate(row):
        for stage, kind, *_ in actions_of([step]):
            if stage not in num_units:  # it is whole on every rank
                continue
            if kind is Kind.UNSHARD:
                order = gather_order(num_units[stage], gathers_for_backward(row, at, regather))
                first = AT_ONCE if regather else len(order)
                gather(stage, order[:first])
                begun[stage] = order[first:]
            elif kind in _READS_WEIGHTS and regather:
                # two actions of an Overlap may share an UNSHARD: the second gathers all units again
                rest = begun.pop(stage, None)
                gather(stage, gather_order(num_units[stage], kind is not Kind.F) if rest is None else rest)
            elif kind is Kind.REDUCE_GRAD:
                found.extend(Collective(kind, stage, unit) for unit in range(num_units[stage]))
    return found
