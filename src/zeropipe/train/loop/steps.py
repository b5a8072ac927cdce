"""A step: data, gradients, and weights that change unless something is not finite."""

from __future__ import annotations

import time
import zlib
from dataclasses import dataclass, field
from math import isfinite
from typing import Any

import torch

from zeropipe.core.timeline import Timeline
from zeropipe.core.units import count_text
from zeropipe.engine.engine import Engine
from zeropipe.engine.step.losses import CausalLMLoss
from zeropipe.errors import EngineError
from zeropipe.train.config.tables import RunConfig
from zeropipe.train.loop.evaluation import on
from zeropipe.train.loop.optimizer import set_rate
from zeropipe.train.loop.rate import factor
from zeropipe.train.loop.setup import Place


@dataclass(frozen=True)
class Taken:
    """What a step gave, the same on every rank."""

    step: int  # from 1
    loss: float
    norm: float
    rate: float
    is_skipped: bool
    num_tokens: int
    num_positions: int
    epoch: float
    samples: str  # a checksum of the numbers of its samples
    seconds: float
    timeline: Timeline | None


@dataclass
class Counts:
    """What a run has done so far: saved with its checkpoints."""

    step: int = 0
    tokens: int = 0
    skipped: int = 0
    skipped_in_a_row: int = 0
    best: dict[str, float] | None = None  # step and loss of the best evaluation
    losses: list[float] = field(default_factory=list)  # since the start of this process

    def state(self, data: dict[str, Any]) -> dict[str, Any]:
        """For a checkpoint."""
        return {
            "data": data, "tokens": self.tokens, "skipped": self.skipped, "skipped_in_a_row": self.skipped_in_a_row,
            "best": self.best,
        }  # fmt: skip

    @staticmethod
    def of(step: int, state: dict[str, Any]) -> Counts:
        """From a checkpoint."""
        return Counts(step, state["tokens"], state["skipped"], state["skipped_in_a_row"], state["best"])


class Stepper:
    """Takes the steps of a run."""

    def __init__(
        self, config: RunConfig, engine: Engine, optimizer: Any, data: Any, place: Place, counts: Counts, num_steps: int
    ) -> None:
        self._config, self._engine, self._optimizer, self._data = config, engine, optimizer, data
        self._place, self._counts, self._num_steps = place, counts, num_steps
        self._loss_fn = CausalLMLoss()
        self._first = counts.step

    def step(self) -> Taken:
        """The next one; EngineError after too many in a row that were not finite."""
        began, engine, counts, config = time.perf_counter(), self._engine, self._counts, self._config
        step = counts.step
        batch = self._data.next()
        rate = config.optimizer.lr * factor(config.rate, step, self._num_steps)
        set_rate(self._optimizer, rate)
        self._sow(step)
        engine.record = self._records(step)
        result = engine.train_step(on(self._place.device, batch.microbatches), self._loss_fn)
        clip = config.optimizer.clip
        norm = engine.clip_grad_norm(clip) if clip else engine.grad_norm()
        skipped = not (isfinite(result.loss) and isfinite(norm))  # every rank has the same two numbers
        if not skipped:
            self._optimizer.step()
        self._optimizer.zero_grad()
        seconds = time.perf_counter() - began  # bringing a timeline together is no part of the step
        timeline = engine.timeline() if engine.record else None
        counts.step, counts.tokens = step + 1, counts.tokens + batch.num_tokens
        counts.skipped += skipped
        counts.skipped_in_a_row = counts.skipped_in_a_row + 1 if skipped else 0
        counts.losses.append(result.loss)
        return Taken(
            step + 1, result.loss, norm, rate, skipped, batch.num_tokens, batch.num_positions, batch.epoch,
            f"{zlib.crc32(repr(tuple(batch.samples)).encode()):08x}", seconds, timeline,
        )  # fmt: skip

    def require_sense(self) -> None:
        """EngineError after too many steps in a row that were left out."""
        row, most = self._counts.skipped_in_a_row, self._config.train.max_skipped
        if row > most:
            raise EngineError(
                f"step {self._counts.step}: loss or gradients were not finite in {count_text(row, 'step')} in a row "
                f"(train.max_skipped={most}): lower optimizer.lr, or look at the data; the last checkpoint is good"
            )

    def _sow(self, step: int) -> None:
        """Dropout: other numbers on every rank and in every step, the same when the run is repeated or resumed."""
        place = f"{self._config.train.seed} {step} {self._place.pipeline} {self._place.rank}"
        torch.manual_seed(zlib.crc32(place.encode()))

    def _records(self, step: int) -> bool:
        """Every so often, and early on: the third step, when everything is warm."""
        every = self._config.train.record_every
        return bool(every) and ((step + 1) % every == 0 or step == self._first + 2)
