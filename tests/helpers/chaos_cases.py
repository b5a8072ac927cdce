"""What the local ranks run in test_chaos.py: training where one of them is struck at a random point."""

from __future__ import annotations

import random
import time
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from engine_helpers import Block, SquareLoss, microbatches
from fault_cases import strike
from torch import Tensor, nn

from zeropipe.core.schedule import Schedule
from zeropipe.engine import Engine
from zeropipe.engine.comm.communicator import Communicator


class Points:
    """Counts what this rank comes past; at one of them something happens to it."""

    def __init__(self, kind: str | None, when: int, seed: int) -> None:
        self._kind, self._left, self._random = kind, when, random.Random(seed)

    def __call__(self, *_: Any) -> None:
        self._left -= 1
        if self._left == 0 and self._kind is not None:
            strike(self._kind)
        if self._random.random() < 0.05:
            time.sleep(self._random.random() / 10)


class Struck(nn.Module):
    """A stage with points in its forward and its backward."""

    def __init__(self, seed: int, point: Points) -> None:
        super().__init__()
        self.block, self.point = Block(seed), point

    def forward(self, x: Tensor) -> Tensor:
        self.point()
        y = self.block(x)
        if y.requires_grad:
            y.register_hook(self.point)
        return y


def train(schedule: Schedule, seed: int, culprit: int, kind: str, when: int, timeout: float) -> str:
    """Calls of an Engine in a random order, the same on all ranks; the culprit is struck at its `when`-th point.

    All ranks are late now and then. "killed" and "stopped" come from outside; "delay" is no fault, and training ends.
    """
    rank, calls = dist.get_rank(), random.Random(seed)
    outside = kind in ("delay", "killed", "stopped") or rank != culprit
    point = Points(None if outside else kind, when, seed + rank)
    exchange = Communicator.exchange

    def past(self: Communicator, value: object) -> list[Any]:
        point()
        return exchange(self, value)

    stages = {stage: Struck(stage, point) for stage in schedule.placement.stages_of(rank)}
    number = schedule.num_microbatches
    with (
        mock.patch.object(Communicator, "exchange", past),
        Engine(schedule, stages, record=True, timeout=timeout) as engine,
    ):
        optimizer = torch.optim.SGD(engine.parameters(), lr=0.01)
        for step in range(3 if kind == "delay" else 10**6):
            engine.train_step(microbatches(number, seed=step), SquareLoss())
            for call in calls.sample(["norm", "step", "eval", "forward", "timeline"], 3):
                if call == "norm":
                    engine.clip_grad_norm(1.0)
                elif call == "step":
                    point()
                    optimizer.step()
                elif call == "eval":
                    engine.eval_step(microbatches(number, seed=step), SquareLoss())
                elif call == "forward":
                    engine.forward(microbatches(number, seed=step), broadcast=True)
                else:
                    engine.timeline()
            optimizer.zero_grad()
    return "done"
