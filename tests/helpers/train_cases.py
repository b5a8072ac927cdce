"""Functions that local ranks run in the tests of `zeropipe train`: training in which something is made to happen."""

from __future__ import annotations

import errno
import itertools
import os
import signal
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist

import zeropipe as zp
from zeropipe.engine import Engine
from zeropipe.engine.blocks import compiling as blocks
from zeropipe.engine.checkpoint import catalog, writer
from zeropipe.engine.run.job import run_job
from zeropipe.engine.run.spec import Job
from zeropipe.errors import ConfigError
from zeropipe.train import compiling
from zeropipe.train.config.tables import RunConfig
from zeropipe.train.loop import checkpoints, setup, trainer
from zeropipe.train.loop import export as exporting
from zeropipe.train.loop.steps import Stepper


def train_signalled(config: RunConfig, rank: int, step: int, number: int) -> Any:
    """One rank gets a signal in the middle of a step (from 0)."""

    def then(stepper: Stepper) -> None:
        if dist.get_rank() == rank and stepper._progress.step == step:
            os.kill(os.getpid(), number)

    return _train_with(config, then)


def _train_with(config: RunConfig, before: Any) -> Any:
    """Train; `before` is called with the Stepper at the begin of every step."""
    real = Stepper.step

    def step(self: Stepper) -> Any:
        before(self)
        return real(self)

    with mock.patch.object(Stepper, "step", step):
        return trainer.train(config)


def train_killed(config: RunConfig, rank: int, step: int, where: str) -> Any:
    """One rank is killed: in a step (from 0), or while it writes the checkpoint after it."""

    def die(*args: Any, **options: Any) -> None:
        os.kill(os.getpid(), signal.SIGKILL)

    def before(stepper: Stepper) -> None:
        if dist.get_rank() == rank and stepper._progress.step == step:
            name = {"step": "_combine", "norm": "grad_norm"}.get(where)
            if name is None:
                writer.write_shards = die  # type: ignore[assignment]
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
        return trainer.train(config)


def train_unlike(config: RunConfig) -> list[str]:
    """What ranks say to models, training files and options of `zeropipe run` that are not the same on all of them."""
    said = []
    other = mock.patch.object(setup, "COMPARED_BYTES", 9 + dist.get_rank())  # as if the files ended otherwise
    before = config
    if dist.get_rank() == 1:
        config = config.model_copy(update={"optimizer": config.optimizer.model_copy(update={"lr": 7.0})})
    schedule = zp.build("1f1b", ranks=2, microbatches=2)
    for call in (
        lambda: other(trainer.train)(before),
        lambda: trainer.train(config),
        lambda: run_job(schedule, Job(seed=dist.get_rank())),
    ):
        try:
            call()
        except ConfigError as error:
            said.append(str(error))
    return said


def train_counting(config: RunConfig) -> list[tuple[int, int]]:
    """Open files and threads of this process at the begin of each step, while no checkpoint is being written."""
    seen = []

    def before(stepper: Stepper) -> None:
        if stepper._engine.saving is not None:
            stepper._engine.saving.wait()
        seen.append((len(list(Path("/proc/self/fd").iterdir())), len(list(Path("/proc/self/task").iterdir()))))

    _train_with(config, before)
    return seen


def train_without_room(config: RunConfig, rank: int, steps: tuple[int, ...]) -> Any:
    """One rank meets a full disk while it writes the checkpoints after some steps; what the first rank tells."""
    real = writer.write_shards

    def write(folder: Path, plan: Any, state: Any, progress: Any) -> Any:
        written = real(folder, plan, state, progress)
        if dist.get_rank() == rank and any(folder.parent.name == f"step-{step:06d}" for step in steps):
            (file,) = folder.glob(f"__{rank}_*")
            os.truncate(file, 100)
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return written

    with mock.patch.object(writer, "write_shards", write):
        return train_logged(config)


def train_without_export(config: RunConfig) -> Any:
    """The disk is full when the model is exported."""
    with mock.patch.object(exporting, "convert", side_effect=OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))):
        return trainer.train(config)


def train_on_read_only(config: RunConfig, step: int) -> Any:
    """The folder of the checkpoint after a step cannot be made, and the next one's name not be written down."""
    real_make, real_write = Path.mkdir, checkpoints.write_pointer

    def make(path: Path, *args: Any, **options: Any) -> None:
        if path.name == f"step-{step:06d}":
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))
        real_make(path, *args, **options)

    def write_pointer(folder: Path, name: str, checkpoint: str) -> None:
        if checkpoint == f"step-{step + 1:06d}":
            raise ConfigError(f"cannot write {folder / name}: Permission denied")
        real_write(folder, name, checkpoint)

    with mock.patch.object(Path, "mkdir", make), mock.patch.object(checkpoints, "write_pointer", write_pointer):
        return train_logged(config)


def train_by_clock(config: RunConfig, seconds: tuple[float, ...]) -> Any:
    """Every look at a rank's clock finds it further on, by so many seconds."""
    clock = itertools.count(0.0, seconds[dist.get_rank()])
    with mock.patch.object(trainer, "time", SimpleNamespace(monotonic=lambda: next(clock))):
        return trainer.train(config)


def train_logged(config: RunConfig) -> tuple[Any, list[str]]:
    """The outcome, and the lines that the first rank logged."""
    lines: list[str] = []
    with mock.patch.object(trainer, "log", lines.append), mock.patch.object(checkpoints, "log", lines.append):
        return trainer.train(config), lines


def train_as_on_a_gpu(config: RunConfig) -> tuple[Any, list[str]]:
    """`engine.compile = "auto"` compiles here as on a GPU in 16 bits, by a compiler that takes less time."""
    with (
        mock.patch.object(compiling, "compiles_by_default", return_value=True),
        mock.patch.object(blocks, "inductor_backend", return_value="aot_eager"),
    ):
        return train_logged(config)


def train_with_a_tensor_twice(config: RunConfig) -> Any:
    """Every stage says that it has a tensor of one name, as if no rule said whose it is."""
    real = catalog.list_stage_tensors

    def own(stage: Any) -> list[Any]:
        return [*real(stage), catalog.StageTensor(stage.number, "model.stored", torch.zeros(2))]

    with mock.patch.object(catalog, "list_stage_tensors", own):
        return train_logged(config)


def train_with_strange_state(config: RunConfig) -> Any:
    """From its first step on the optimizer keeps what no checkpoint can hold."""
    real = torch.optim.AdamW.step

    def step(self: Any, *args: Any, **options: Any) -> Any:
        result = real(self, *args, **options)
        for state in self.state.values():
            state["strange"] = object()
        return result

    with mock.patch.object(torch.optim.AdamW, "step", step):
        return train_logged(config)
