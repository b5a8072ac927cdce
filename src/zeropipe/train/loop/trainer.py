"""`train(config)`: a run, on every rank of an initialized process group."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from math import isfinite
from pathlib import Path
from typing import Any

import torch.distributed as dist

from zeropipe.core.files import write_whole
from zeropipe.engine.comm.ranks import job_ranks
from zeropipe.engine.engine import Engine
from zeropipe.engine.step.losses import CausalLMLoss
from zeropipe.errors import ConfigError
from zeropipe.train.compiling import explain_uncompiled, settle_compile
from zeropipe.train.config.tables import RunConfig
from zeropipe.train.config.write import to_toml
from zeropipe.train.data.cache import remove_unused
from zeropipe.train.data.loader import TrainingData, open_data, open_evaluation
from zeropipe.train.loop.checkpoints import CheckpointFolder, dump_fields, resume
from zeropipe.train.loop.data_barrier import prepare_data
from zeropipe.train.loop.export import export
from zeropipe.train.loop.metrics import Memory, MetricsLog, Utilization, log, peak_memory, summarize_loads
from zeropipe.train.loop.optimizer import make_optimizer, reset_groups
from zeropipe.train.loop.output_lock import OutputLock
from zeropipe.train.loop.setup import (
    RankPosition,
    build_stages,
    find_position,
    make_engine,
    require_packing,
    use_deterministic,
)
from zeropipe.train.loop.signals import StopSignals
from zeropipe.train.loop.steps import Progress, Stepper, StepRecord, evaluate
from zeropipe.train.report.recorder import Recorder


@dataclass(frozen=True)
class Outcome:
    """The results of a run, equal on all ranks."""

    losses: tuple[float, ...]  # of the steps of this process
    steps: int  # done, with those before a resume
    tokens: int  # with a loss, that were trained on
    skipped: int  # steps whose loss or gradients were not finite
    evaluation_loss: float | None  # the last one
    best: dict[str, float] | None  # step and loss of the best evaluation
    checkpoint: str
    export: str | None
    stopped_by: str  # the signal that ended the run before its last step
    seconds: float


def train(config: RunConfig, observe: Callable[[StepRecord], None] | None = None) -> Outcome:
    """Train as the file describes; all ranks of the process group call this. `observe` is called after each step."""
    with StopSignals() as signals, use_deterministic(config.train.deterministic), OutputLock() as lock:
        with job_ranks(config.engine.timeout, "begun to train") as ranks:
            position = find_position(config, ranks)
            prepare_data(config, ranks, signals, lock)
            stages = build_stages(config, position, ranks)
        with make_engine(config, position, stages) as engine:
            Path(config.train.output).mkdir(parents=True, exist_ok=True)
            return Trainer(config, engine, position, signals, observe).run()


class Trainer:
    """A run on one rank."""

    def __init__(
        self,
        config: RunConfig,
        engine: Engine,
        position: RankPosition,
        signals: StopSignals,
        observe: Callable[[StepRecord], None] | None = None,
    ) -> None:
        self._file = config
        self._config = config = settle_compile(config, engine.options.compile)
        self._engine, self._position = engine, position
        self._signals, self._observe = signals, observe
        self._started_at, self._is_first = time.monotonic(), dist.get_rank() == 0
        self._utilization = Utilization(config, position.device)
        self._data = open_data(config, pipeline=position.pipeline)
        self._evaluation_data = open_evaluation(config, pipeline=position.pipeline)
        require_packing(config, engine, self._data, self._evaluation_data)
        self._optimizer = make_optimizer(config, engine, position.device)
        self._checkpoints = CheckpointFolder(config, engine, self._is_first)
        self._checkpoints.require_savable(self._optimizer)
        self._progress = self._resume()
        self._first_step = self._progress.step + 1
        self._num_steps = count_steps(config, self._data, self._progress.step)
        self._stepper = Stepper(config, engine, self._optimizer, self._data, position, self._progress, self._num_steps)
        self._recorder = Recorder(config, self._is_first, self._progress.step, log)
        self._evaluation_loss: float | None = None
        self._saved_at = time.monotonic()
        self._stopped_by = ""

    def _resume(self) -> Progress:
        found = resume(self._config, self._engine, self._optimizer, self._is_first)
        if found is None:
            return Progress()
        path, (step, extra) = found
        reset_groups(self._optimizer, self._config.optimizer)
        self._data.load_state(extra["data"])
        self._checkpoints.step, self._checkpoints.path = step, path
        return Progress.from_state(step or 0, extra)

    def run(self) -> Outcome:
        """Run all steps, then save and export."""
        is_finished = 0 < self._num_steps == self._progress.step  # run.toml stays that of the steps that were run
        if self._is_first and not is_finished:
            write_whole(Path(self._config.train.output) / "run.toml", to_toml(self._file))
            self._remove_unused_data()
            if reason := explain_uncompiled(self._file, self._position.device.type):
                log(reason)
        metrics = MetricsLog(self._config, self._num_steps, self._progress.step) if self._is_first else None
        try:
            self._synchronize()
            while self._progress.step < self._num_steps and not self._stopped_by:
                self._run_step(metrics)
        finally:
            if metrics is not None:
                metrics.close()
        return self._finish()

    def _remove_unused_data(self) -> None:
        try:
            if line := remove_unused(self._config):
                log(line)
        except (ConfigError, OSError) as error:
            log(f"warning: {error}")

    def _run_step(self, metrics: MetricsLog | None) -> None:
        """Run a step, and log, record, evaluate and save as is due after it."""
        record = self._stepper.step()
        if self._observe is not None:
            self._observe(record)
        self._stepper.require_finite()
        is_due, memory = self._synchronize()
        self._checkpoints.poll()
        if metrics is not None:
            metrics.log_step(self._metrics_of(record, memory))
            if self._engine.options.compile and record.step == self._first_step:
                log(describe_first_step(record))
        if record.timeline is not None:  # after the metrics, so that the report has the loss of this step
            self._recorder.add(record.step, record.timeline, record.seconds)
        is_last = record.step == self._num_steps or bool(self._stopped_by)
        is_best = self._evaluate(metrics, is_last)
        every = self._config.checkpoint.every
        if is_due or is_best or is_last or (every is not None and record.step % every == 0):
            self._save(is_best, is_last)

    def _synchronize(self) -> tuple[bool, Memory]:
        """Whether a checkpoint is due by the first rank's clock, and the largest peaks of memory of a rank.

        Ranks also exchange the signals that they received, so that all of them stop after the same step.
        """
        minutes = self._config.checkpoint.minutes
        is_due = minutes is not None and time.monotonic() - self._saved_at > 60 * minutes
        with self._engine.together("the end of the step") as team:
            status = team.comm.exchange((self._signals.received, is_due, peak_memory(self._position.device)))
        self._stopped_by = self._stopped_by or next((received for received, _, _ in status if received), "")
        return status[0][1], Memory.largest([memory for _, _, memory in status])

    def _should_stop(self) -> bool:
        self._synchronize()
        return bool(self._stopped_by)

    def _evaluate(self, metrics: MetricsLog | None, is_last: bool) -> bool:
        """Evaluate if it is due. Returns whether to keep the checkpoint as the best one."""
        table, progress, data = self._config.evaluation, self._progress, self._evaluation_data
        if table is None or data is None or self._stopped_by or not (is_last or progress.step % table.every == 0):
            return False
        loss = evaluate(self._engine, data, self._position.device, CausalLMLoss(), self._should_stop)
        if loss is None:
            return False
        self._evaluation_loss = loss
        is_best = is_better(loss, progress.best)
        if is_best:
            progress.best = {"step": progress.step, "loss": loss}
        if metrics is not None:
            metrics.log_evaluation(progress.step, loss, is_best)
        return is_best and self._config.checkpoint.best

    def _save(self, is_best: bool, is_last: bool) -> None:
        state = self._progress.state(self._data.state()) | {"run": dump_fields(self._config)}
        self._checkpoints.save(self._progress.step, self._optimizer, state, is_best=is_best, is_last=is_last)
        self._saved_at = time.monotonic()

    def _finish(self) -> Outcome:
        """Complete the last checkpoint, export the model, and return the outcome."""
        progress, config = self._progress, self._config
        self._checkpoints.finish(is_last=True)
        if self._checkpoints.step != progress.step:
            self._save(False, True)
        checkpoint = self._checkpoints.path
        assert checkpoint is not None
        self._recorder.write()
        is_done = progress.step >= self._num_steps
        exported = None
        if is_done and config.checkpoint.export:
            exported = export(config, self._engine, checkpoint, self._is_first)
        if self._is_first and self._stopped_by and not is_done:
            log(f"stopped by a signal after step {progress.step} of {self._num_steps}, saved {checkpoint}")
        return Outcome(
            tuple(progress.losses), progress.step, progress.tokens, progress.skipped, self._evaluation_loss,
            progress.best, str(checkpoint), str(exported) if exported else None, "" if is_done else self._stopped_by,
            time.monotonic() - self._started_at,
        )  # fmt: skip

    def _metrics_of(self, record: StepRecord, memory: Memory) -> dict[str, Any]:
        """The line of metrics.jsonl for a step."""
        values = {
            "step": record.step, "loss": record.loss, "grad_norm": record.norm, "lr": record.rate,
            "epoch": record.epoch, "tokens": self._progress.tokens,
            "processed_tokens_per_second": record.num_processed / record.seconds,
            "loss_tokens_per_second": record.num_tokens / record.seconds,
            "tokens_per_second": record.num_tokens / record.seconds,  # the older name of the line before
            "seconds": record.seconds, **memory.values(),
            "skipped": self._progress.skipped, "samples": record.samples,
        }  # fmt: skip
        mfu = self._utilization.compute(record.lengths, record.seconds)
        values |= {} if mfu is None else {"mfu": mfu}
        if record.timeline is not None:
            values |= {"idle_fraction": record.timeline.idle_fraction, "bubble": record.timeline.bubble}
        values |= summarize_loads(record.loads)
        return values | ({"skipped_now": True} if record.is_skipped else {})


def describe_first_step(record: StepRecord) -> str:
    """The line of the first step of a process that compiles blocks."""
    return f"step {record.step} took {record.seconds:.3g} s with the compilation of blocks (engine.compile)"


def is_better(loss: float, best: Mapping[str, float] | None) -> bool:
    """Whether an evaluation is the best so far. NaN never is, and a NaN in `best` is always improved."""
    return isfinite(loss) and not (best is not None and best["loss"] <= loss)


def count_steps(config: RunConfig, data: TrainingData, done: int) -> int:
    """The number of steps of the run, of which `done` are done."""
    steps = config.train.steps
    if steps is None:
        if data.steps_left is None:
            raise ConfigError("train.steps is missing; set train.steps or train.epochs")
        return done + data.steps_left
    if steps < done:
        raise ConfigError(
            f"train.steps={steps}: {done} are done already in train.output={config.train.output!r}; use more, or "
            "another train.output for a new run"
        )
    return steps
