"""Training steps and evaluation. A step whose loss or gradients are not finite leaves the weights unchanged."""

from __future__ import annotations

import time
import zlib
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from math import inf, isfinite
from typing import Any

import torch
from torch import Tensor

from zeropipe.core.timeline import Timeline
from zeropipe.core.units import count_text
from zeropipe.engine.backward.gradients import clip_factor
from zeropipe.engine.engine import Engine
from zeropipe.engine.masters import MasterWeights
from zeropipe.engine.step.expert_load import ExpertLoad, ExpertLoads
from zeropipe.engine.step.losses import CausalLMLoss
from zeropipe.errors import EngineError
from zeropipe.train.config.tables import RunConfig
from zeropipe.train.loop.optimizer import rate_factor, set_rate
from zeropipe.train.loop.setup import RankPosition


@dataclass(frozen=True)
class StepRecord:
    """The results of a step, equal on all ranks."""

    step: int  # from 1
    loss: float
    norm: float
    rate: float
    is_skipped: bool
    num_tokens: int  # with a loss
    num_processed: int  # all tokens, without padding
    lengths: tuple[int, ...]  # of samples and padding
    epoch: float
    samples: str  # checksum of the indices of its samples
    seconds: float
    timeline: Timeline | None
    loads: dict[str, ExpertLoad]  # of experts, by layer


@dataclass
class Progress:
    """Totals of a run so far, which checkpoints save."""

    step: int = 0
    tokens: int = 0
    skipped: int = 0
    skipped_in_a_row: int = 0
    best: dict[str, float] | None = None  # step and loss of the best evaluation
    losses: list[float] = field(default_factory=list)  # since the start of this process

    def state(self, data: dict[str, Any]) -> dict[str, Any]:
        """The state for a checkpoint. `data` is that of the training data."""
        return {
            "data": data, "tokens": self.tokens, "skipped": self.skipped, "skipped_in_a_row": self.skipped_in_a_row,
            "best": self.best,
        }  # fmt: skip

    @staticmethod
    def from_state(step: int, state: dict[str, Any]) -> Progress:
        """The progress that a checkpoint saved."""
        return Progress(step, state["tokens"], state["skipped"], state["skipped_in_a_row"], state["best"])


class Stepper:
    """Runs the training steps of a run."""

    def __init__(
        self, config: RunConfig, engine: Engine, optimizer: Any, data: Any, position: RankPosition, progress: Progress,
        num_steps: int,
    ) -> None:  # fmt: skip
        self._config, self._engine, self._optimizer, self._data = config, engine, optimizer, data
        self._position, self._progress, self._num_steps = position, progress, num_steps
        self._loss_fn = CausalLMLoss()
        self._loads = ExpertLoads(engine, config.experts.balance_rate)
        self._first = progress.step

    def step(self) -> StepRecord:
        """Run the next step."""
        started_at = time.perf_counter()
        engine, progress, config, step = self._engine, self._progress, self._config, self._progress.step
        batch = self._data.next()
        rate = config.optimizer.lr * rate_factor(config.rate, step, self._num_steps)
        set_rate(self._optimizer, rate)
        self._seed_dropout(step)
        engine.record = self._is_recorded(step)
        self._loads.reset()
        result = engine.train_step(_move_to(self._position.device, batch.microbatches), self._loss_fn)
        clip = config.optimizer.clip
        optimizer_clips = isinstance(self._optimizer, MasterWeights)
        norm = engine.clip_grad_norm(clip) if clip and not optimizer_clips else engine.grad_norm()
        is_skipped = not (isfinite(result.loss) and isfinite(norm))  # the same on all ranks, as both numbers are
        loads = self._loads.take()
        if not is_skipped:
            if optimizer_clips:
                self._optimizer.step(clip_factor(norm, clip or inf))
            else:
                self._optimizer.step()
            self._loads.balance(loads)
        self._optimizer.zero_grad()
        seconds = time.perf_counter() - started_at  # gathering the timeline is not part of the step
        timeline = engine.timeline() if engine.record else None
        progress.step, progress.tokens = step + 1, progress.tokens + batch.num_tokens
        progress.skipped += is_skipped
        progress.skipped_in_a_row = progress.skipped_in_a_row + 1 if is_skipped else 0
        progress.losses.append(result.loss)
        return StepRecord(
            step + 1, result.loss, norm, rate, is_skipped, batch.num_tokens, batch.num_processed,
            batch.lengths, batch.epoch,
            f"{zlib.crc32(repr(tuple(batch.samples)).encode()):08x}", seconds, timeline, loads,
        )  # fmt: skip

    def require_finite(self) -> None:
        """Raise EngineError after too many consecutive skipped steps."""
        number, limit = self._progress.skipped_in_a_row, self._config.train.max_skipped
        if number > limit:
            raise EngineError(
                f"step {self._progress.step}: loss or gradients were not finite in {count_text(number, 'step')} in a "
                f"row (train.max_skipped={limit}); use a lower optimizer.lr, or check the data; the last checkpoint is "
                "good"
            )

    def _seed_dropout(self, step: int) -> None:
        """Seed dropout for each rank and step, so that a repeated or resumed run draws the same numbers."""
        key = f"{self._config.train.seed} {step} {self._position.pipeline} {self._position.rank}"
        torch.manual_seed(zlib.crc32(key.encode()))

    def _is_recorded(self, step: int) -> bool:
        """Whether to record the timeline: of every `record_every` steps, and of the third, after the warm-up."""
        every = self._config.train.record_every
        return bool(every) and ((step + 1) % every == 0 or step == self._first + 2)


def evaluate(
    engine: Engine, batches: Iterable[Any], device: torch.device, loss_fn: CausalLMLoss, stops: Callable[[], bool]
) -> float | None:
    """The mean loss over all tokens of held-out data; None if the run stops. All ranks call this."""
    total = count = 0.0
    for batch in batches:
        result = engine.eval_step(_move_to(device, batch.microbatches), loss_fn)
        total, count = total + result.loss * result.count, count + result.count
        if stops():
            return None
    return total / (count or 1.0)


def _move_to(device: torch.device, microbatches: Iterable[dict[str, Tensor]]) -> list[dict[str, Tensor]]:
    """Microbatches on a device."""
    if device.type == "cpu":
        return list(microbatches)
    return [{name: tensor.to(device, non_blocking=True) for name, tensor in one.items()} for one in microbatches]
