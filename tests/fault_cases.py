"""What the local ranks run in test_faults.py: things that go wrong on one rank."""

from __future__ import annotations

import contextlib
import os
import signal
import time
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from engine_helpers import Block, SquareLoss, blocks, microbatches, nccl_on_one_gpu, own, train
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from zeropipe.core.schedule import Schedule
from zeropipe.engine import Engine
from zeropipe.engine.comm.fabric import Fabric
from zeropipe.engine.comm.faults import Watchdog
from zeropipe.engine.run import launch
from zeropipe.engine.run.measure import measure
from zeropipe.errors import ConfigError, EngineError


class Faulty(nn.Module):
    """Does something bad in the forward or the backward of its `when`-th microbatch."""

    def __init__(self, seed: int, kind: str, when: int) -> None:
        super().__init__()
        self.block, self.kind, self.left = Block(seed), kind, when

    def forward(self, x: Tensor) -> Tensor:
        self.left -= 1
        if self.left >= 0:
            return self.block(x)
        if self.kind == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        if self.kind == "exit":
            os._exit(3)
        if self.kind == "raise":
            raise ValueError("the cat sat on the keyboard")
        y = self.block(x)
        if self.kind == "nan":
            return y * float("nan")
        if self.kind == "nan-back":
            y.register_hook(lambda gradient: gradient * float("inf"))
        elif self.kind == "raise-back":
            y.register_hook(self.refuse)
        return y

    def refuse(self, gradient: Tensor) -> None:
        raise ValueError("no way back")


def fail(schedule: Schedule, stage: int, kind: str, when: int, check_finite: bool = False, device: str = "cpu") -> Any:
    """Two good steps' worth of microbatches, with a fault on the way."""
    modules = blocks(schedule.num_stages)
    modules[stage] = Faulty(stage, kind, when)
    stages = {index: module.to(device) for index, module in own(modules, schedule).items()}
    engine = Engine(schedule, stages, check_finite=check_finite, timeout=60)
    try:
        for step in range(2):
            engine.train_step(microbatches(schedule.num_microbatches, seed=step), SquareLoss())
    except Exception as error:
        again = ""
        try:
            engine.train_step(microbatches(schedule.num_microbatches), SquareLoss())
        except Exception as second:
            again = str(second)
        return type(error).__name__, str(error), repr(error.__cause__), again
    return "no error"


def fail_over_nccl(schedule: Schedule, stage: int, kind: str, when: int) -> Any:
    """`fail` where ranks wait inside kernels."""
    nccl_on_one_gpu()
    return fail(schedule, stage, kind, when, device="cuda")


def fail_and_go_on(schedule: Schedule, stage: int) -> dict[str, float]:
    """An error in the middle of an I, then a new engine on the same ranks."""
    assert fail(schedule, stage, "raise-back", 1)[0] == "EngineError"
    return train(schedule, 2)


def fewer_microbatches(schedule: Schedule, culprit: int) -> None:
    """One rank passes one microbatch less."""
    number = schedule.num_microbatches - (dist.get_rank() == culprit)
    with Engine(schedule, own(blocks(schedule.num_stages), schedule)) as engine:
        engine.train_step(microbatches(number), SquareLoss())


def bad_setup(what: str, schedule: Schedule, other: Schedule) -> None:
    """An Engine that cannot be made."""
    rank = dist.get_rank()
    stages = own(blocks(schedule.num_stages), schedule)
    if what == "schedule" and rank == 2:
        schedule = other
    if what == "stages" and rank == 1:
        stages.popitem()
    if what == "blocks":
        if rank == 1:
            stages[1].blocks = [1]  # what the others do not have: no list of layers, and no modules
        for stage in stages.values():
            stage.blocks, stage.layers = getattr(stage, "blocks", []), range(0)
        Engine(schedule, stages, ac="full")
    if what == "option":
        Engine(schedule, stages, split="halves")
    if what == "tie" and rank == 3:
        stages[3].tied_pairs = (("weihgt", 0, "weight"),)
    if what == "wrapped" and rank == 0:
        stages[0] = nn.Sequential(
            DistributedDataParallel(Block(0), process_group=dist.new_group([0], use_local_synchronization=True))
        )
    Engine(schedule, stages)


def leave_early(schedule: Schedule) -> None:
    """An error of the training script on one rank, between two steps."""
    with Engine(schedule, own(blocks(schedule.num_stages), schedule), timeout=60) as engine:
        engine.train_step(microbatches(schedule.num_microbatches), SquareLoss())
        if dist.get_rank() == 1:
            raise OSError("no space left on device")
        engine.train_step(microbatches(schedule.num_microbatches), SquareLoss())


def what_a_failure_keeps(schedule: Schedule) -> tuple[bool, str]:
    """Whether tensors of a step that failed stay alive; and what a step without gradients says."""
    modules = blocks(schedule.num_stages)
    modules[1] = Faulty(1, "raise-back", 1)
    engine = Engine(schedule, own(modules, schedule), timeout=60)
    refused = ""
    try:
        with torch.no_grad():
            engine.train_step(microbatches(schedule.num_microbatches), SquareLoss())
    except ConfigError as error:
        refused = str(error)
    executor = engine._executor("train")
    with contextlib.suppress(EngineError):
        engine.train_step(microbatches(schedule.num_microbatches), SquareLoss())
    return bool(executor.cells), refused


def watched_by_the_next(culprit: int) -> str:
    """What ranks that wait for nothing learn of one that is killed: by their watchdogs alone."""
    fabric = Fabric(None, torch.device("cpu"), 60.0)
    watchdog = Watchdog(fabric, every=0.05)
    fabric.exchange(None)
    if dist.get_rank() == culprit:
        os.kill(os.getpid(), signal.SIGKILL)
    end = time.monotonic() + 20
    while not fabric.closed and time.monotonic() < end:
        time.sleep(0.02)
    watchdog.stop()
    return fabric.board.read(patience=0) or "nothing"


def closed_one_after_the_other() -> str | None:
    """What is on the board after ranks that listen to each other have closed, each at its own time."""
    fabric = Fabric(None, torch.device("cpu"), 60.0)
    fabric.nccl = True  # its own groups apart, everything is as on NCCL
    watchdog = Watchdog(fabric, every=0.05)
    fabric.exchange(None)
    time.sleep(0.2 * dist.get_rank())
    watchdog.stop()
    with mock.patch("torch.cuda.synchronize"):
        fabric.settle()
    time.sleep(0.2 * dist.get_rank())
    fabric.close()
    time.sleep(1.0)
    return fabric.board.read(patience=0)


def silent(schedule: Schedule) -> None:
    """Rank 1 sleeps in a stage far longer than the time-out."""

    class Sleepy(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            time.sleep(60)
            return x

    modules = blocks(schedule.num_stages)
    modules[1] = Sleepy()
    Engine(schedule, own(modules, schedule), timeout=2).train_step(
        microbatches(schedule.num_microbatches), SquareLoss()
    )


def wrong_output(schedule: Schedule) -> None:
    """A stage returns a dict."""

    class Dict(nn.Module):
        def forward(self, x: Tensor) -> Any:
            return {"hidden": x}

    modules = blocks(schedule.num_stages)
    modules[1] = Dict()
    Engine(schedule, own(modules, schedule)).train_step(microbatches(schedule.num_microbatches), SquareLoss())


def no_group() -> None:
    """An Engine without torch.distributed."""
    dist.destroy_process_group()
    Engine.__init__(object.__new__(Engine), None, {})  # type: ignore[arg-type]


def sleep_forever() -> None:
    """For the launcher's own time-out."""
    torch.ones(1)
    signal.pause()


def wrong_number_then_right(schedule: Schedule) -> bool:
    """A step with a microbatch too few on every rank, then a good one."""
    stages = own(blocks(schedule.num_stages), schedule)
    with Engine(schedule, stages) as engine:
        for step in (engine.train_step, engine.eval_step):
            try:
                step(microbatches(3), SquareLoss())
            except ConfigError:
                continue
            return False
        return engine.train_step(microbatches(4), SquareLoss()).count > 0


def compute_forever() -> None:
    """A rank that never looks at its connections."""
    while True:
        torch.ones(10).sum()


def beat_for(seconds: float) -> None:
    """A long job that says now and then that it gets on."""
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        launch.heartbeat()
        time.sleep(0.1)


def beats_of_a_run(schedule: Schedule, steps: int) -> int:
    """How often this rank says that it gets on while it measures."""
    stages = own(blocks(schedule.num_stages), schedule)
    with mock.patch.object(launch, "_line") as line:
        measure(schedule, stages, lambda step: microbatches(schedule.num_microbatches), SquareLoss(), steps=steps)
    return line.beat.call_count
