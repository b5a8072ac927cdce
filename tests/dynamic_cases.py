"""What the local ranks run in test_dynamic.py: late ranks, and Ws that run while others wait for them."""

from __future__ import annotations

import itertools
import random
import time
from collections.abc import Callable
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from engine_helpers import Block, SquareLoss, microbatches, nccl_on_one_gpu
from torch import Tensor, nn

from zeropipe.core.schedule import Schedule
from zeropipe.core.timeline import Timeline
from zeropipe.engine import Engine, module_stages, torch_private
from zeropipe.engine.backward.splitters import StoreSplitter
from zeropipe.engine.step.cells import Cell
from zeropipe.engine.step.passes import Passes


class Late(nn.Module):
    """A block whose forward or backward sometimes takes longer."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        self.block, self._random = Block(seed), random.Random(seed)

    def forward(self, x: Tensor) -> Tensor:
        self._sleep()
        y = self.block(x)
        if y.requires_grad:
            y.register_hook(self._sleep)
        return y

    def _sleep(self, *_: Any) -> None:
        if self._random.random() < 0.3:
            time.sleep(0.02)


def both_orders(schedule: Schedule, options: dict[str, Any], steps: int = 2) -> tuple[bool, bool]:
    """Whether both orders give the same gradients on this rank, bit for bit; and whether a W moved in any step."""
    gradients, moved = [], False
    changes = options.keys() & {"compile", "ac"}
    for dynamic in (False, True):
        make = Block if changes else Late  # a compiled block has no random numbers
        modules = [make(stage).to(options.get("device", "cpu")) for stage in range(schedule.num_stages)]
        stages = module_stages(modules, schedule, dist.get_rank())
        if changes:
            for stage in stages.values():
                stage.register_forward_pre_hook(lambda *_: time.sleep(random.random() / 100))
        with Engine(schedule, stages, dynamic_weights=dynamic, record=True, **options) as engine:
            for step in range(steps):  # the shapes of the first are new: nobody knows whether its messages are here
                engine.train_step(microbatches(schedule.num_microbatches, seed=step), SquareLoss())
                moved |= engine.timeline().schedule != schedule
            gradients.append([parameter.grad for parameter in engine.parameters()])
    return all(map(torch.equal, *gradients)), moved


def both_orders_over_nccl(schedule: Schedule) -> tuple[bool, bool]:
    """`both_orders` with all ranks on one GPU, where a receive is a kernel."""
    nccl_on_one_gpu()
    return both_orders(schedule, {"device": "cuda"})


def timelines(schedule: Schedule) -> list[Timeline]:
    """Of both orders, where rank 0 is late now and then."""
    found = []
    for dynamic in (False, True):
        modules = [(Block if stage else Late)(stage) for stage in range(schedule.num_stages)]
        stages = module_stages(modules, schedule, dist.get_rank())
        with Engine(schedule, stages, dynamic_weights=dynamic, record=True) as engine:
            for step in range(2):
                engine.train_step(microbatches(schedule.num_microbatches, seed=step, lengths=(3,)), SquareLoss())
            found.append(engine.timeline())
    return found


def on_a_mesh(train: Callable[..., dict[str, float]], *args: Any) -> tuple[dict[str, float], int]:
    """A case of test_mesh.py where every process is late at its own times; and how often a W ran before its place."""
    turns, forward, ahead, moved = itertools.count(dist.get_rank()), Passes.forward, StoreSplitter.ahead, 0

    def late(self: Passes, cell: Cell) -> None:
        if next(turns) % 4 == 0:  # for longer than a busy machine keeps the others from coming to wait for this
            time.sleep(0.1)
        forward(self, cell)

    def counted(self: StoreSplitter, *args: Any) -> None:
        nonlocal moved
        moved += 1
        with mock.patch.multiple(torch_private, reduced=alone, gathered=alone, sum_scattered=alone):
            ahead(self, *args)

    def alone(*_: Any) -> Any:
        raise AssertionError("a W talks to nobody")

    with mock.patch.object(Passes, "forward", late), mock.patch.object(StoreSplitter, "ahead", counted):
        return train(*args), moved
