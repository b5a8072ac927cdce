"""What a run tells: a line per step on the first rank's stderr, metrics.jsonl, TensorBoard, Weights & Biases."""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from zeropipe.core.files import write_whole
from zeropipe.core.units import size_text
from zeropipe.errors import MissingExtra, first_line
from zeropipe.train.config.tables import RunConfig

Writer = Callable[[Mapping[str, Any] | None], None]  # None: it is over


def tell(line: str) -> None:
    """A line for people; the first rank's only."""
    print(line, file=sys.stderr, flush=True)


class Metrics:
    """On the first rank. Every step is a line of metrics.jsonl, so is every evaluation."""

    def __init__(self, config: RunConfig, num_steps: int, start: int) -> None:
        self._every, self._num_steps, self._start, self._began = config.log.every, num_steps, start, time.monotonic()
        output = Path(config.train.output)
        output.mkdir(parents=True, exist_ok=True)
        path = output / "metrics.jsonl"
        forget_after(path, start)
        self._log = Log(path)
        self._others: dict[str, Writer] = {**_tensorboard(config, start), **_wandb(config)}

    def step(self, values: Mapping[str, Any]) -> None:
        """After a step."""
        self._write(values)
        step = values["step"]
        if step % self._every == 0 or step == self._num_steps or values.get("skipped_now"):
            tell(line_of(values, self._num_steps, self._left(step)))

    def evaluation(self, step: int, loss: float, is_best: bool) -> None:
        """After an evaluation."""
        self._write({"step": step, "evaluation_loss": loss})
        tell(f"step {step}/{self._num_steps}  evaluation loss {loss:.4f}{', the best so far' if is_best else ''}")

    def _write(self, values: Mapping[str, Any]) -> None:
        self._log.add(json.dumps(values) + "\n")
        self._tell_others(values)

    def _tell_others(self, values: Mapping[str, Any] | None) -> None:
        """They may fail in any way of their own, which is no reason to end a run."""
        for name, other in list(self._others.items()):
            try:
                other(values)
            except Exception as error:
                del self._others[name]
                tell(f"warning: {name} gets no more metrics: {type(error).__name__}: {first_line(error)}")

    def _left(self, step: int) -> float:
        done = step - self._start
        return (time.monotonic() - self._began) / done * (self._num_steps - step)

    def close(self) -> None:
        self._log.close()
        self._tell_others(None)


class Log:
    """A file that lines are added to. What a full disk does not take is kept, and written once there is room."""

    def __init__(self, path: Path) -> None:
        self._path, self._kept, self._is_told = path, b"", False
        self._file = path.open("ab", buffering=0)

    def add(self, line: str) -> None:
        """Write a line, and what is left of those before."""
        self._kept += line.encode()
        try:
            if os.fstat(self._file.fileno()).st_nlink == 0:
                self._begin_anew()
            while self._kept:
                self._kept = self._kept[self._file.write(self._kept) :]
            self._is_told = False
        except OSError as error:  # no reason to end a run
            if not self._is_told:
                tell(f"warning: cannot write {self._path}: {error.strerror or error}; training goes on")
            self._is_told = True

    def _begin_anew(self) -> None:
        """Somebody has removed the file, or its folder."""
        self._path.parent.mkdir(parents=True, exist_ok=True)
        gone, self._file = self._file, self._path.open("ab", buffering=0)
        gone.close()
        tell(f"warning: {self._path} was removed: it begins anew")

    def close(self) -> None:
        self._file.close()


def line_of(values: Mapping[str, Any], num_steps: int, left: float) -> str:
    """The progress line of a step."""
    words = [
        f"step {values['step']}/{num_steps}", f"loss {values['loss']:.4f}", f"norm {values['grad_norm']:.3g}",
        f"{values['tokens_per_second']:,.0f} tokens/s", f"{values['seconds']:.3g} s",
    ]  # fmt: skip
    if values.get("mfu") is not None:
        words.append(f"MFU {values['mfu']:.1%}")
    if values.get("bubble") is not None:
        words.append(f"bubble {values['bubble']:.1%}")
    words += [size_text(values["memory"], "B"), f"{clock(left)} left"]
    if values.get("skipped_now"):
        words.append("left out: not finite")
    return "  ".join(words)


def clock(seconds: float) -> str:
    """12:34, or 1:02:03.

    >>> clock(3723.4)
    '1:02:03'
    """
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{rest:02d}" if hours else f"{minutes}:{rest:02d}"


def forget_after(path: Path, step: int) -> None:
    """Drop the lines of steps that a run makes again, and a line that a killed process has left unfinished."""
    if not path.exists():
        return
    kept = []
    for line in path.read_text(encoding="utf-8", errors="replace").splitlines():
        with suppress(ValueError, KeyError, TypeError):
            if json.loads(line)["step"] <= step:
                kept.append(line)
    write_whole(path, "".join(f"{line}\n" for line in kept) if step else "")


def _numbers(values: Mapping[str, Any]) -> dict[str, float]:
    return {name: value for name, value in values.items() if isinstance(value, int | float) and name != "step"}


def _tensorboard(config: RunConfig, start: int) -> dict[str, Writer]:
    if not config.log.tensorboard:
        return {}
    try:
        from torch.utils.tensorboard import SummaryWriter
    except ImportError:
        raise MissingExtra("tensorboard", "tensorboard") from None
    # what an earlier process logged of steps that are made again is not shown
    writer = SummaryWriter(str(Path(config.train.output) / "tensorboard"), purge_step=start + 1)

    def log(values: Mapping[str, Any] | None) -> None:
        if values is None:
            writer.close()
            return
        for name, value in _numbers(values).items():
            writer.add_scalar(name, value, values["step"])

    return {"tensorboard": log}


def _wandb(config: RunConfig) -> dict[str, Writer]:
    if config.log.wandb is None:
        return {}
    try:
        import wandb
    except ImportError:
        raise MissingExtra("wandb", "wandb") from None
    settings: dict[str, Any] = {
        "project": config.log.wandb, "dir": config.train.output, "config": config.model_dump(mode="json"),
        "id": _run_id(Path(config.train.output)), "resume": "allow",
    }  # fmt: skip
    try:
        run = wandb.init(**settings)
    except Exception as error:  # no key, no network: training does not need either
        tell(f"warning: wandb works offline: {first_line(error)}")
        run = wandb.init(**settings, mode="offline")

    def log(values: Mapping[str, Any] | None) -> None:
        if values is None:
            run.finish()
        else:
            run.log(_numbers(values), step=values["step"])

    return {"wandb": log}


def _run_id(output: Path) -> str:
    """A resumed run goes on in its own curve."""
    from secrets import token_hex

    path = output / "wandb-id"
    if not path.exists():
        write_whole(path, token_hex(4) + "\n")
    return path.read_text().strip()
