"""Dynamic W: a rank that would wait for a message runs pending weight gradients.

The Program stays the plan. Only the products of a W move, and only to an earlier time: between its I and its own
position in the row. The rest runs at that position, so there is no deadline to miss, and memory only falls.

Nothing that communicates moves. Receives are posted, and sends and collectives run, in the order of the Program. So
ranks may decide differently, also those that share a stage, and a Program that cannot hang without this cannot hang
with it.

A W does not pass a W or B that adds to the same weights. So every weight adds up its products in the order of the
Program: gradients are the same bit for bit, and stay equal on processes that hold copies of one weight.
"""

from __future__ import annotations

import time
from bisect import insort
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence

import torch

from zeropipe.core.action import COMPUTE, Action, Kind, Step, actions_of
from zeropipe.engine.stages.contract import StageInfo

POLL_S = 20e-6  # between two queries of a busy device


def find_movable(row: Sequence[Step], stages: Mapping[int, StageInfo]) -> dict[Action, tuple[Action, ...]]:
    """For every F, B and I of a row: the Ws at later positions that may run before it, in their order."""
    actions = [action for action in actions_of(row) if action.kind in COMPUTE]
    sharing = _find_sharing(stages)
    barrier = dict.fromkeys(stages, -1)  # the position that no W of a stage moves before
    backward: dict[tuple[int, int], int] = {}  # the position of an I
    first: dict[Action, int] = {}  # the position of a W, or of its first part
    last: dict[Action, int] = {}
    available: dict[int, list[Action]] = defaultdict(list)  # Ws that may run anywhere after this position
    for position, action in enumerate(actions):
        stage, kind, microbatch, *_ = action
        if kind is Kind.I:
            backward[stage, microbatch] = position
        if kind is Kind.W:
            last[action] = position
            if action not in first:
                first[action] = position
                earliest = max(backward[stage, microbatch], barrier[stage])
                available[earliest].append(action)
                barrier.update({other: max(earliest, barrier[other]) for other in sharing[stage]})
        elif kind is not Kind.F:
            # an I adds to weights that its own stage's W leaves alone, but they may be those of another stage's W
            barrier.update({other: position for other in sharing[stage] if kind is Kind.B or other != stage})
    found: dict[Action, tuple[Action, ...]] = {}
    pending: list[tuple[int, Action]] = []
    for position, action in enumerate(actions):
        if action.kind is not Kind.W:
            found[action] = tuple(weights for _, weights in pending)
        elif last[action] == position:
            pending.remove((first[action], action))
        for weights in available[position]:
            insort(pending, (first[weights], weights))
    return found


def _find_sharing(stages: Mapping[int, StageInfo]) -> dict[int, set[int]]:
    """For each stage, itself and the stages that hold one of its weights in the same tensor, as ties on one rank do."""
    held = {stage: {id(parameter) for parameter in info.module.parameters()} for stage, info in stages.items()}
    return {stage: {other for other in held if other == stage or held[stage] & held[other]} for stage in held}


class IdleTime:
    """The time until a message arrives."""

    def __init__(self, device: torch.device) -> None:
        self._is_cuda = device.type == "cuda"
        self.has_arrived: Callable[[], bool] = _never

    def clear(self) -> None:
        """Release the receiver."""
        self.has_arrived = _never

    def is_over(self) -> bool:
        """Whether there is no time for another product. On a GPU this first waits until the device is idle."""
        if not self._is_cuda:
            return self.has_arrived()
        idle = torch.cuda.Event()
        idle.record()
        while not self.has_arrived():
            if idle.query():
                return False
            time.sleep(POLL_S)
        return True


def _never() -> bool:
    return False
