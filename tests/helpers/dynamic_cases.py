"""What the local ranks run in test_dynamic.py: late ranks, and Ws that run while others wait for them."""

from __future__ import annotations

import itertools
import random
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from engine_helpers import Block, SquareLoss, microbatches, nccl_on_one_gpu
from torch import Tensor, nn

from zeropipe.core.action import Kind
from zeropipe.core.schedule import Schedule
from zeropipe.core.timeline import Timeline
from zeropipe.engine import Engine, module_stages
from zeropipe.engine.backward.splitters import StoreSplitter
from zeropipe.engine.comm.messages import Message
from zeropipe.engine.stages.contract import describe_stage
from zeropipe.engine.step.cell_runner import Cell, CellRunner
from zeropipe.engine.step.dynamic import find_movable
from zeropipe.engine.torch_private import comm as torch_comm

_cases = itertools.count()  # every rank runs the same ones


@contextmanager
def one_message_held(schedule: Schedule) -> Iterator[None]:
    """In the second step one message of the first pipeline leaves only after a rank of it has run a W before its place.

    So a W moves, however busy the machine is. In the first step shapes are new: nobody knows whether messages are here.
    """
    first = dist.get_rank() % (dist.get_world_size() // schedule.num_ranks) == 0
    held, steps, moved = waited_for(schedule) if first else None, itertools.count(), f"a W has moved: {next(_cases)}"
    store = dist.distributed_c10d._get_default_store()
    forward, backward, ahead = CellRunner.send_forward, CellRunner.send_backward, StoreSplitter.run_early

    def hold(message: Message) -> None:
        if message != held or next(steps) != 1:
            return
        end = time.monotonic() + 60
        while not store.check([moved]):
            assert time.monotonic() < end, f"no rank ran a W while it waited for {message}"
            time.sleep(0.001)

    def send_forward(self: CellRunner, cell: Cell, *args: Any) -> None:
        if self._train:
            hold(Message(True, cell.stage + 1, cell.microbatch))
        forward(self, cell, *args)

    def send_backward(self: CellRunner, cell: Cell, *args: Any) -> None:
        hold(Message(False, cell.stage - 1, cell.microbatch))
        backward(self, cell, *args)

    def ahead_and_tell(self: StoreSplitter, *args: Any) -> None:
        ahead(self, *args)
        if first:
            store.set(moved, "")

    with (
        mock.patch.multiple(CellRunner, send_forward=send_forward, send_backward=send_backward),
        mock.patch.object(StoreSplitter, "run_early", ahead_and_tell),
    ):
        yield


def waited_for(schedule: Schedule) -> Message:
    """The first message that a rank waits for while it owes a W."""
    for rank, row in enumerate(schedule.rows):
        stages = {stage: describe_stage(stage, nn.Linear(1, 1)) for stage in schedule.placement.stages_of(rank)}
        for action, owed in find_movable(row, stages).items():
            forward = action.kind is Kind.F
            before = action.stage + (-1 if forward else 1)
            comes = 0 <= before < schedule.num_stages
            if owed and comes and schedule.placement.rank_of(before, action.microbatch) != rank:
                return Message(forward, action.stage, action.microbatch)
    raise AssertionError(f"no rank of {schedule.name} waits while it owes a W")


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
        with (
            one_message_held(schedule) if dynamic else nullcontext(),
            Engine(schedule, stages, dynamic_weights=dynamic, record=True, **options) as engine,
        ):
            for step in range(steps):
                engine.train_step(microbatches(schedule.num_microbatches, seed=step), SquareLoss())
                moved |= engine.timeline().schedule != schedule
            gradients.append([parameter.grad for parameter in engine.parameters()])
    return all(map(torch.equal, *gradients)), moved


def both_orders_over_nccl(schedule: Schedule) -> tuple[bool, bool]:
    """`both_orders` with all ranks on one GPU, where a receive is a kernel."""
    nccl_on_one_gpu()
    return both_orders(schedule, {"device": "cuda"})


def timelines(schedule: Schedule) -> list[Timeline]:
    """Of both orders, each of a step in which a W moved if there is one: by chance that may be the first."""
    found = []
    for dynamic in (False, True):
        modules = [Block(stage) for stage in range(schedule.num_stages)]
        stages = module_stages(modules, schedule, dist.get_rank())
        with (
            one_message_held(schedule) if dynamic else nullcontext(),
            Engine(schedule, stages, dynamic_weights=dynamic, record=True) as engine,
        ):
            shown = []
            for step in range(2):
                engine.train_step(microbatches(schedule.num_microbatches, seed=step, lengths=(3,)), SquareLoss())
                shown.append(engine.timeline())
            found.append(next((one for one in shown if one.schedule != schedule), shown[-1]))
    return found


def on_a_mesh(train: Callable[..., dict[str, float]], schedule: Schedule, *args: Any) -> tuple[dict[str, float], int]:
    """A case of test_mesh.py where every process is late at its own times; and how often a W ran before its place."""
    turns, forward, ahead, moved = itertools.count(dist.get_rank()), CellRunner.forward, StoreSplitter.run_early, 0

    def late(self: CellRunner, cell: Cell) -> None:
        if next(turns) % 4 == 0:
            time.sleep(0.01)
        forward(self, cell)

    def counted(self: StoreSplitter, *args: Any) -> None:
        nonlocal moved
        moved += 1
        with mock.patch.multiple(torch_comm, start_reduce=alone, start_gather=alone, start_sum_scatter=alone):
            ahead(self, *args)

    def alone(*_: Any) -> Any:
        raise AssertionError("a W talks to nobody")

    with (
        mock.patch.object(CellRunner, "forward", late),
        mock.patch.object(StoreSplitter, "run_early", counted),
        one_message_held(schedule),
    ):
        return train(schedule, *args), moved
