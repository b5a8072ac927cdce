"""What local ranks run in test_train.py and test_train_resume.py: training with something that happens in between."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist

from zeropipe.engine import Engine
from zeropipe.engine.checkpoint import pieces
from zeropipe.train.config.models import RunConfig
from zeropipe.train.loop import job
from zeropipe.train.loop.steps import Stepper


def train_signalled(config: RunConfig, rank: int, step: int, number: int) -> Any:
    """One rank gets a signal in the middle of a step (from 0)."""

    def then(stepper: Stepper) -> None:
        if dist.get_rank() == rank and stepper._counts.step == step:
            os.kill(os.getpid(), number)

    return _train_with(config, then)


def _train_with(config: RunConfig, before: Any) -> Any:
    """Train; `before` is called with the Stepper at the begin of every step."""
    real = Stepper.step

    def step(self: Stepper) -> Any:
        before(self)
        return real(self)

    with mock.patch.object(Stepper, "step", step):
        return job.train(config)


def train_killed(config: RunConfig, rank: int, step: int, where: str) -> Any:
    """One rank is killed: in a step (from 0), or while it writes the checkpoint after it."""

    def die(*args: Any, **options: Any) -> None:
        os.kill(os.getpid(), signal.SIGKILL)

    def before(stepper: Stepper) -> None:
        if dist.get_rank() == rank and stepper._counts.step == step:
            name = {"step": "_combine", "norm": "grad_norm"}.get(where)
            if name is None:
                pieces.write = die  # type: ignore[assignment]
            else:
                setattr(Engine, name, die)

    return _train_with(config, before)


def train_not_finite(config: RunConfig, rank: int, steps: tuple[int, ...]) -> Any:
    """In some steps (from 0) a gradient of one rank is infinite."""
    real, done = Engine.train_step, []

    def train_step(self: Engine, *args: Any) -> Any:
        result = real(self, *args)
        if dist.get_rank() == rank and len(done) in steps:
            next(p for p in self.parameters() if p.requires_grad).grad.view(-1)[0] = torch.inf
        done.append(result)
        return result

    with mock.patch.object(Engine, "train_step", train_step):
        return job.train(config)


def train_counting(config: RunConfig) -> list[tuple[int, int]]:
    """Open files and threads of this process at the begin of each step, while no checkpoint is being written."""
    seen = []

    def before(stepper: Stepper) -> None:
        if stepper._engine.saving is not None:
            stepper._engine.saving.wait()
        seen.append((len(list(Path("/proc/self/fd").iterdir())), len(list(Path("/proc/self/task").iterdir()))))

    _train_with(config, before)
    return seen
