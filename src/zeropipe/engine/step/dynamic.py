"""Dynamic W: a rank that would wait for a message runs weight gradients that it owes.

The Program stays the plan. Only the products of a W move, and only to an earlier time: between its I and its own place
in the row. What is left runs at that place, so there is no deadline to miss, and memory only falls.

Nothing that communicates moves. Receives are posted, and sends and collectives run, in the order of the Program. So
ranks may decide differently, also those that share a stage, and what cannot hang without this cannot hang with it.

A W does not pass a W or B that adds to the same weights. So every weight gets its shares in the order of the Program:
gradients are the same bit for bit, and stay equal on processes that hold copies of one weight.
"""

from __future__ import annotations

import time
from bisect import insort
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence

import torch

from zeropipe.core.action import COMPUTE, Action, Kind, Step, actions_of
from zeropipe.engine.stages.contract import StageInfo

PAUSE = 20e-6  # seconds between two looks at a device that is busy


def movable(row: Sequence[Step], stages: Mapping[int, StageInfo]) -> dict[Action, tuple[Action, ...]]:
    """For every F, B and I of a row: the Ws that may run before it although their place is later, in their order."""
    actions = [action for action in actions_of(row) if action.kind in COMPUTE]
    sharing = _sharing(stages)
    passed = dict.fromkeys(stages, -1)  # the place that no W of a stage moves before
    backward: dict[tuple[int, int], int] = {}  # the place of an I
    first: dict[Action, int] = {}  # the place of a W; where it has parts, of the first
    last: dict[Action, int] = {}
    opens: dict[int, list[Action]] = defaultdict(list)  # Ws that may run anywhere after this place
    for place, action in enumerate(actions):
        stage, kind, microbatch = action
        if kind is Kind.I:
            backward[stage, microbatch] = place
        if kind is Kind.W:
            last[action] = place
            if action not in first:
                first[action] = place
                earliest = max(backward[stage, microbatch], passed[stage])
                opens[earliest].append(action)
                passed.update({other: max(earliest, passed[other]) for other in sharing[stage]})
        elif kind is not Kind.F:
            # an I adds to weights that its own stage's W leaves alone, but they may be those of another stage's W
            passed.update({other: place for other in sharing[stage] if kind is Kind.B or other != stage})
    found: dict[Action, tuple[Action, ...]] = {}
    waiting: list[tuple[int, Action]] = []
    for place, action in enumerate(actions):
        if action.kind is not Kind.W:
            found[action] = tuple(owed for _, owed in waiting)
        elif last[action] == place:
            waiting.remove((first[action], action))
        for owed in opens[place]:
            insort(waiting, (first[owed], owed))
    return found


def _sharing(stages: Mapping[int, StageInfo]) -> dict[int, set[int]]:
    """For each stage, itself and those that hold one of its weights in the same tensor, as ties on one rank do."""
    held = {stage: {id(parameter) for parameter in info.module.parameters()} for stage, info in stages.items()}
    return {stage: {other for other in held if other == stage or held[stage] & held[other]} for stage in held}


class Gap:
    """The time until a message is here."""

    def __init__(self, device: torch.device) -> None:
        self._cuda = device.type == "cuda"
        self.arrived: Callable[[], bool] = _never

    def forget(self) -> None:
        """Hold on to nothing."""
        self.arrived = _never

    def over(self) -> bool:
        """Whether there is no time for another product: on a GPU this first waits until it has nothing else to do."""
        if not self._cuda:
            return self.arrived()
        idle = torch.cuda.Event()
        idle.record()
        while not self.arrived():
            if idle.query():
                return False
            time.sleep(PAUSE)
        return True


def _never() -> bool:
    return False
