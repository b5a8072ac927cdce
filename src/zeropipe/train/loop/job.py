"""`train(config)`: a whole run, on every rank of an initialised process group."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from math import isfinite
from pathlib import Path
from typing import Any

import torch.distributed as dist

from zeropipe.core.files import write_whole
from zeropipe.engine.engine import Engine
from zeropipe.engine.step.losses import CausalLMLoss
from zeropipe.errors import ConfigError
from zeropipe.train.config.tables import RunConfig
from zeropipe.train.config.write import to_toml
from zeropipe.train.data import open_data, open_evaluation
from zeropipe.train.data.cache import remove_unused
from zeropipe.train.loop.evaluation import evaluate
from zeropipe.train.loop.export import export
from zeropipe.train.loop.kept import Kept
from zeropipe.train.loop.metrics import Metrics, tell
from zeropipe.train.loop.optimizer import make_optimizer, set_groups
from zeropipe.train.loop.prepared import named, prepared
from zeropipe.train.loop.resume import resumed
from zeropipe.train.loop.setup import Place, deterministic, make_engine, place_of, require_packing
from zeropipe.train.loop.signals import Signals
from zeropipe.train.loop.sole import Sole
from zeropipe.train.loop.steps import Counts, Stepper, Taken
from zeropipe.train.loop.usage import Utilization, peak_memory
from zeropipe.train.report.recorder import Recorder


@dataclass(frozen=True)
class Outcome:
    """What a run gave, the same on every rank."""

    losses: tuple[float, ...]  # of the steps of this process
    steps: int  # done, with those before a resume
    tokens: int  # with a loss, that were trained on
    skipped: int  # steps that were left out: loss or gradients were not finite
    evaluation_loss: float | None  # the last one
    best: dict[str, float] | None  # step and loss of the best evaluation
    checkpoint: str
    export: str | None
    stopped_by: str  # the signal that ended the run before its last step
    seconds: float


def train(config: RunConfig, watch: Callable[[Taken], None] | None = None) -> Outcome:
    """Train as the file says; every rank of the process group calls this alike. `watch` is called after each step."""
    with Signals() as signals, deterministic(config.train.deterministic), Sole() as sole:
        place = place_of(config)
        prepared(config, named(), signals, sole)
        with make_engine(config, place) as engine:
            Path(config.train.output).mkdir(parents=True, exist_ok=True)
            return Run(config, engine, place, signals, watch).all()


class Run:
    """A run on one rank."""

    def __init__(
        self,
        config: RunConfig,
        engine: Engine,
        place: Place,
        signals: Signals,
        watch: Callable[[Taken], None] | None = None,
    ) -> None:
        self._config, self._engine, self._place, self._signals, self._watch = config, engine, place, signals, watch
        self._began, self._is_first = time.monotonic(), dist.get_rank() == 0
        self._utilization = Utilization(config, place.device)
        self._data: Any = open_data(config, pipeline=place.pipeline)
        self._held_out: Any = open_evaluation(config, pipeline=place.pipeline)
        require_packing(engine, self._data, self._held_out)
        self._optimizer = make_optimizer(config, engine, place.device)
        self._kept = Kept(config, engine, self._is_first, tell)
        self._kept.require_savable(self._optimizer)
        self._counts = self._resumed()
        self._num_steps = num_steps_of(config, self._data, self._counts.step)
        self._stepper = Stepper(config, engine, self._optimizer, self._data, place, self._counts, self._num_steps)
        self._recorder = Recorder(config, self._is_first, self._counts.step, tell)
        self._evaluation_loss: float | None = None
        self._saved_at = time.monotonic()
        self._stops = ""

    def _resumed(self) -> Counts:
        """Go on from a checkpoint, if there is one."""
        found = resumed(self._config, self._engine, self._optimizer, self._is_first)
        if found is None:
            return Counts()
        path, (step, extra) = found
        set_groups(self._optimizer, self._config.optimizer)
        self._data.load_state(extra["data"])
        self._kept.saved, self._kept.path = step, path
        return Counts.of(step or 0, extra)

    def all(self) -> Outcome:
        """All steps, and the end."""
        if self._is_first:
            write_whole(self._kept.folder.parent / "run.toml", to_toml(self._config))
            self._remove_leftovers()
        metrics = Metrics(self._config, self._num_steps, self._counts.step) if self._is_first else None
        try:
            self._agree()
            while self._counts.step < self._num_steps and not self._stops:
                self._next(metrics)
        finally:
            if metrics is not None:
                metrics.close()
        return self._ended()

    def _remove_leftovers(self) -> None:
        """Not when data is made, but now that a resume has taken it: what other settings made is not missed."""
        try:
            if line := remove_unused(self._config):
                tell(line)
        except (ConfigError, OSError) as error:
            tell(f"warning: {error}")

    def _next(self, metrics: Metrics | None) -> None:
        """A step and what is due after it."""
        taken = self._stepper.step()
        if self._watch is not None:
            self._watch(taken)
        self._stepper.require_sense()
        due, memory = self._agree()
        self._kept.look()
        if metrics is not None:
            metrics.step(self._values(taken, memory))
        if taken.timeline is not None:  # the report shows this step's loss, too
            self._recorder.add(taken.step, taken.timeline, taken.seconds)
        is_last = taken.step == self._num_steps or bool(self._stops)
        is_best = self._evaluated(metrics, is_last)
        every = self._config.checkpoint.every
        if due or is_best or is_last or (every is not None and taken.step % every == 0):
            self._save(is_best, is_last)

    def _agree(self) -> tuple[bool, int]:
        """Whether a checkpoint is due by the first rank's clock, and the most memory of a rank.

        One exchange per step: whoever got a signal tells it here, so that all ranks stop after the same step.
        """
        minutes = self._config.checkpoint.minutes
        due = minutes is not None and time.monotonic() - self._saved_at > 60 * minutes
        with self._engine.together("the end of the step") as team:
            words = team.fabric.exchange((self._signals.caught, due, peak_memory(self._place.device)))
        self._stops = self._stops or next((caught for caught, _, _ in words if caught), "")
        return words[0][1], max(memory for _, _, memory in words)

    def _stop_asked(self) -> bool:
        self._agree()
        return bool(self._stops)

    def _evaluated(self, metrics: Metrics | None, is_last: bool) -> bool:
        """Evaluate if it is time to; whether the model is better than ever."""
        table, counts = self._config.evaluation, self._counts
        if table is None or self._held_out is None or self._stops or not (is_last or counts.step % table.every == 0):
            return False
        loss = evaluate(self._engine, self._held_out, self._place.device, CausalLMLoss(), self._stop_asked)
        if loss is None:
            return False
        self._evaluation_loss = loss
        is_best = is_better(loss, counts.best)
        if is_best:
            counts.best = {"step": counts.step, "loss": loss}
        if metrics is not None:
            metrics.evaluation(counts.step, loss, is_best)
        return is_best and self._config.checkpoint.best

    def _save(self, is_best: bool, is_last: bool) -> None:
        state = self._counts.state(self._data.state())
        self._kept.save(self._counts.step, self._optimizer, state, best=is_best, last=is_last)
        self._saved_at = time.monotonic()

    def _ended(self) -> Outcome:
        """The last checkpoint is whole; the model goes to where transformers finds it."""
        counts, config = self._counts, self._config
        self._kept.settle(last=True)
        if self._kept.saved != counts.step:
            self._save(False, True)
        checkpoint = self._kept.path
        assert checkpoint is not None
        self._recorder.write()
        is_done = counts.step >= self._num_steps
        target = None
        if is_done and config.checkpoint.export:
            target = export(config, self._engine, checkpoint, self._is_first)
        if self._is_first and self._stops and not is_done:
            tell(f"stopped by a signal after step {counts.step} of {self._num_steps}, saved {checkpoint}")
        return Outcome(
            tuple(counts.losses), counts.step, counts.tokens, counts.skipped, self._evaluation_loss, counts.best,
            str(checkpoint), str(target) if target else None, "" if is_done else self._stops,
            time.monotonic() - self._began,
        )  # fmt: skip

    def _values(self, taken: Taken, memory: int) -> dict[str, Any]:
        """A step's line of metrics.jsonl."""
        speed = taken.num_tokens / taken.seconds
        values = {
            "step": taken.step, "loss": taken.loss, "grad_norm": taken.norm, "lr": taken.rate, "epoch": taken.epoch,
            "tokens": self._counts.tokens, "tokens_per_second": speed, "seconds": taken.seconds, "memory": memory,
            "skipped": self._counts.skipped, "samples": taken.samples,
        }  # fmt: skip
        used = self._utilization.of(taken.num_positions, taken.seconds)
        values |= {} if used is None else {"mfu": used}
        values |= {} if taken.timeline is None else {"bubble": taken.timeline.bubble}
        return values | ({"skipped_now": True} if taken.is_skipped else {})


def is_better(loss: float, best: Mapping[str, float] | None) -> bool:
    """Whether an evaluation is the best so far. One that is not a number is not, and holds up no later one."""
    return isfinite(loss) and not (best is not None and best["loss"] <= loss)


def num_steps_of(config: RunConfig, data: Any, done: int) -> int:
    """The steps of the whole run, of which some are done."""
    steps = config.train.steps
    if steps is not None and steps < done:
        raise ConfigError(
            f"train.steps={steps}: {done} are done already in train.output={config.train.output!r}: give more, or "
            "another train.output to begin anew"
        )
    if steps is not None:
        return steps
    return done + int(data.steps_left)
