"""What the local ranks run in test_engine_life.py."""

from __future__ import annotations

import gc
import os
import time
import weakref
from typing import Any, NamedTuple

import torch
from engine_cases import Embedding
from engine_helpers import WIDTH, Block, SquareLoss, blocks, error_of, microbatches, own, plain_step, worst
from torch import Tensor, nn

from zeropipe.core.schedule import Schedule
from zeropipe.engine import Engine, main_gradients


class Open(NamedTuple):
    """How many files and threads a process has."""

    files: int
    threads: int

    def as_few_as(self, others: list[Open]) -> bool:
        """Whether none of the others had fewer."""
        return all(self.files <= other.files and self.threads <= other.threads for other in others)


def open_now() -> Open:
    return Open(len(os.listdir("/proc/self/fd")), len(os.listdir("/proc/self/task")))


def many_engines(schedule: Schedule, number: int) -> list[Open]:
    """Open files and threads after each of several engines, without help from the garbage collector."""
    seen: list[Open] = []
    stages = own(blocks(schedule.num_stages), schedule)
    gc.disable()
    try:
        for _ in range(number):
            with Engine(schedule, stages, dynamic_weights=True) as engine:
                engine.train_step(microbatches(schedule.num_microbatches), SquareLoss())
                engine.eval_step(microbatches(schedule.num_microbatches), SquareLoss())
            end = time.monotonic() + 20  # threads that end take a moment
            while not (found := open_now()).as_few_as(seen) and time.monotonic() < end:
                time.sleep(0.02)
            seen.append(found)
    finally:
        gc.enable()
    return seen


def gloo_threads(schedule: Schedule) -> tuple[int, list[int]]:
    """Threads of gloo that an engine adds to a rank, and how the kernel schedules those that there are then."""

    def loops() -> list[int]:
        return [int(one) for one in os.listdir("/proc/self/task") if "gloo_tcp" in comm(one)]

    def comm(thread: str) -> str:
        with open(f"/proc/self/task/{thread}/comm") as file:
            return file.read()

    before = loops()
    with Engine(schedule, own(blocks(schedule.num_stages), schedule)) as engine:
        engine.train_step(microbatches(schedule.num_microbatches), SquareLoss())
        now = loops()
        return len(set(now) - set(before)), [os.sched_getscheduler(thread) for thread in now]


def outputs_kept(schedule: Schedule) -> int:
    """Outputs of `forward` that somebody holds when the caller has dropped them."""
    with Engine(schedule, own(blocks(schedule.num_stages), schedule)) as engine:
        outputs = engine.forward(microbatches(schedule.num_microbatches))
        refs = [weakref.ref(output) for output in outputs if output is not None]
        del outputs
        return sum(ref() is not None for ref in refs)


class LateLoss:
    """A sum and a count that nobody knows before."""

    def __call__(self, output: Tensor, microbatch: dict[str, Any]) -> tuple[Tensor, int]:
        return (output.float() - microbatch["target"]).square().sum(), output.numel()


class Sometimes(nn.Module):
    """A block with a weight that only one microbatch of a step uses."""

    def __init__(self, block: nn.Module) -> None:
        super().__init__()
        self.block, self.weight = block, nn.Parameter(torch.ones(WIDTH, dtype=torch.float64))

    def forward(self, x: Tensor) -> Tensor:
        y = self.block(x)
        return y * self.weight if x.shape[1] == 7 else y


def bf16(schedule: Schedule, late: bool) -> float:
    """Two steps accumulated in float32 main gradients of a bf16 model; relative to the same in float32."""

    class Loss(LateLoss):
        def count(self, microbatch: dict[str, Any]) -> int:
            return microbatch["target"].numel()

    def make() -> list[nn.Module]:
        return [Sometimes(block).bfloat16() for block in blocks(schedule.num_stages)]

    exact, stages = [stage.float() for stage in make()], own(make(), schedule)
    for stage in stages.values():
        main_gradients(stage, torch.float32)
    with Engine(schedule, stages) as engine:
        for step in range(2):
            batches = [
                {k: v.float() for k, v in b.items()}
                for b in microbatches(schedule.num_microbatches, step, (7, 5, 2, 3))
            ]
            plain_step(nn.Sequential(*exact), batches, Loss())
            halves = [{**batch, "inputs": batch["inputs"].bfloat16()} for batch in batches]
            engine.train_step(halves, LateLoss() if late else Loss())
        squares = sum(float(p.grad.double().square().sum()) for stage in exact for p in stage.parameters())
        norm = abs(engine.grad_norm() / squares**0.5 - 1)
    assert all(p.grad.dtype == torch.float32 for stage in stages.values() for p in stage.parameters())
    return max(worst(stages, exact), norm)


def inner_tie(schedule: Schedule, stage: int, other: int) -> dict[str, float]:
    """A weight that two stages in the middle share."""
    start = torch.randn(WIDTH, WIDTH, generator=torch.Generator().manual_seed(5), dtype=torch.float64)

    def make() -> list[nn.Module]:
        weight, modules = nn.Parameter(start.clone()), blocks(schedule.num_stages)
        modules[stage], modules[other] = Embedding(weight, True, other), Embedding(weight, False, stage)
        return modules

    plain, stages, batches = make(), own(make(), schedule), microbatches(schedule.num_microbatches)
    plain_step(nn.Sequential(*plain), batches, SquareLoss())
    with Engine(schedule, stages) as engine:
        engine.train_step(batches, SquareLoss())
        norm = float(torch.nn.utils.get_total_norm([p.grad for p in nn.Sequential(*plain).parameters()]))
        return {"grad": worst(stages, plain), "norm": abs(engine.grad_norm() - norm) / norm}


def frozen_tie(schedule: Schedule) -> bool:
    """Whether a frozen tied weight is left without a gradient, as an optimizer with weight decay needs it."""
    last = schedule.num_stages - 1
    weight = nn.Parameter(torch.eye(WIDTH, dtype=torch.float64), requires_grad=False)
    modules = [
        Embedding(weight, True, last),
        *blocks(last + 1)[1:-1],
        Embedding(nn.Parameter(weight.data, False), False, 0),
    ]
    stages = own(modules, schedule)
    with Engine(schedule, stages) as engine:
        engine.train_step(microbatches(schedule.num_microbatches), SquareLoss())
    return all((p.grad is None) == (not p.requires_grad) for stage in stages.values() for p in stage.parameters())


class CountingLoss:
    """Its `count` is a number of its own, and no method."""

    def __init__(self) -> None:
        self.count = 0

    def __call__(self, output: Tensor, microbatch: dict[str, Any]) -> tuple[Tensor, int]:
        self.count += 1
        return SquareLoss()(output, microbatch)


def thaw_all(schedule: Schedule) -> float:
    """Whole stages that are frozen and learn later; a loss may count its calls."""
    plain, stages = blocks(schedule.num_stages), own(blocks(schedule.num_stages), schedule)
    batches = microbatches(schedule.num_microbatches)
    plain_step(nn.Sequential(*plain), batches, SquareLoss())
    loss_fn = CountingLoss()
    with Engine(schedule, stages) as engine:
        for frozen in (True, False):
            for number, stage in stages.items():
                stage.zero_grad()
                stage.requires_grad_(number > 0 or not frozen)
            engine.train_step(batches, loss_fn)
    return worst(stages, plain)


def thaw(schedule: Schedule) -> float:
    """Weights that are frozen when the engine is made and learn later."""
    plain, stages = blocks(schedule.num_stages), own(blocks(schedule.num_stages), schedule)
    for stage in stages.values():
        stage.up.requires_grad_(False)
    batches = microbatches(schedule.num_microbatches)
    plain_step(nn.Sequential(*plain), batches, SquareLoss())
    with Engine(schedule, stages) as engine:
        engine.train_step(batches, SquareLoss())
        for stage in stages.values():
            assert isinstance(stage, Block)
            assert stage.up.weight.grad is None
            stage.zero_grad()
            stage.up.requires_grad_(True)
        engine.train_step(batches, SquareLoss())
    return max(
        error_of(p.grad, dict(plain[s].named_parameters())[name].grad)
        for s, stage in stages.items()
        for name, p in stage.named_parameters()
    )


def one_step_of_adamw() -> float:
    """A parameter of 1 after a step."""
    parameter = torch.nn.Parameter(torch.ones(1))
    parameter.grad = torch.ones(1)
    torch.optim.AdamW([parameter]).step()
    return float(parameter)
