"""Metrics of a run: progress lines on stderr, metrics.jsonl, TensorBoard, Weights & Biases; memory and MFU."""

from __future__ import annotations

import json
import os
import resource
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch

from zeropipe.core.files import write_whole
from zeropipe.core.model.operators import ENDS
from zeropipe.core.units import size_text
from zeropipe.engine.step.expert_load import ExpertLoad
from zeropipe.errors import MissingExtra, ZeropipeError, first_line
from zeropipe.estimating.counted import CountedModel
from zeropipe.estimating.gpus import GPUS
from zeropipe.estimating.model import ShapedModel
from zeropipe.estimating.operators import Sizes
from zeropipe.train.config.tables import RunConfig
from zeropipe.train.inputs import open_shapes

Values = Mapping[str, Any]
Backend = Callable[[Values | None], None]  # logs values; None closes it


def log(line: str) -> None:
    """Print a line to stderr. Only the first rank calls this."""
    print(line, file=sys.stderr, flush=True)


class MetricsLog:
    """Logs every step and every evaluation. Only the first rank has one."""

    def __init__(self, config: RunConfig, num_steps: int, start: int) -> None:
        self._every, self._num_steps, self._start = config.log.every, num_steps, start
        self._started_at = time.monotonic()
        output = Path(config.train.output)
        output.mkdir(parents=True, exist_ok=True)
        path = output / "metrics.jsonl"
        drop_lines_after(path, start)
        self._file = AppendFile(path)
        self._backends: dict[str, Backend] = {**_open_tensorboard(config, start), **_open_wandb(config)}

    def log_step(self, values: Values) -> None:
        self._write(values)
        step = values["step"]
        if step % self._every == 0 or step == self._num_steps or values.get("skipped_now"):
            elapsed = time.monotonic() - self._started_at
            left = elapsed / (step - self._start) * (self._num_steps - step)
            log(format_progress(values, self._num_steps, left))

    def log_evaluation(self, step: int, loss: float, is_best: bool) -> None:
        self._write({"step": step, "evaluation_loss": loss})
        log(f"step {step}/{self._num_steps}  evaluation loss {loss:.4f}{', the best so far' if is_best else ''}")

    def close(self) -> None:
        self._file.close()
        self._call_backends(None)

    def _write(self, values: Values) -> None:
        self._file.append(json.dumps(values) + "\n")
        self._call_backends(values)

    def _call_backends(self, values: Values | None) -> None:
        """Call all backends. One that fails is dropped, and the run continues."""
        for name, backend in list(self._backends.items()):
            try:
                backend(values)
            except Exception as error:  # of any type
                del self._backends[name]
                log(f"warning: no more metrics to {name}: {type(error).__name__}: {first_line(error)}")


class AppendFile:
    """A file that lines are appended to. Lines that a full disk refuses are kept and written later."""

    def __init__(self, path: Path) -> None:
        self._path, self._pending, self._has_warned = path, b"", False
        self._file = path.open("ab", buffering=0)

    def append(self, line: str) -> None:
        self._pending += line.encode()
        try:
            if os.fstat(self._file.fileno()).st_nlink == 0:
                self._reopen()
            while self._pending:
                self._pending = self._pending[self._file.write(self._pending) :]
            self._has_warned = False
        except OSError as error:
            if not self._has_warned:
                log(f"warning: cannot write {self._path}: {error.strerror or error}; training continues")
            self._has_warned = True

    def _reopen(self) -> None:
        """Begin a new file after the old one, or its folder, was deleted."""
        self._path.parent.mkdir(parents=True, exist_ok=True)
        old, self._file = self._file, self._path.open("ab", buffering=0)
        old.close()
        log(f"warning: {self._path} was deleted; a new file begins")

    def close(self) -> None:
        self._file.close()


def format_progress(values: Values, num_steps: int, left: float) -> str:
    """The progress line of a step. `left`: seconds until the end of the run."""
    parts = [
        f"step {values['step']}/{num_steps}", f"loss {values['loss']:.4f}", f"norm {values['grad_norm']:.3g}",
        f"{values['processed_tokens_per_second']:,.0f} tokens/s processed",
        f"{values['loss_tokens_per_second']:,.0f} with a loss", f"{values['seconds']:.3g} s",
    ]  # fmt: skip
    if values.get("mfu") is not None:
        parts.append(f"MFU {values['mfu']:.1%}")
    if values.get("idle_fraction") is not None:
        parts.append(f"idle {values['idle_fraction']:.1%}")
    reserved = values.get("reserved_memory")
    more = "" if reserved is None else f" ({size_text(reserved, 'B')} reserved)"
    parts += [size_text(values["memory"], "B") + more, f"{format_duration(left)} left"]
    if values.get("skipped_now"):
        parts.append("skipped: not finite")
    return "  ".join(parts)


def format_duration(seconds: float) -> str:
    """Minutes and seconds, or hours, minutes and seconds.

    >>> format_duration(3723.4)
    '1:02:03'
    """
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{rest:02d}" if hours else f"{minutes}:{rest:02d}"


def drop_lines_after(path: Path, step: int) -> None:
    """Delete the lines of metrics.jsonl after `step`, which a resumed run repeats, and an incomplete last line."""
    if not path.exists():
        return
    kept = []
    for line in path.read_text(encoding="utf-8", errors="replace").splitlines():
        with suppress(ValueError, KeyError, TypeError):
            if json.loads(line)["step"] <= step:
                kept.append(line)
    write_whole(path, "".join(f"{line}\n" for line in kept) if step else "")


def _select_numbers(values: Values) -> dict[str, float]:
    return {name: value for name, value in values.items() if isinstance(value, int | float) and name != "step"}


def _open_tensorboard(config: RunConfig, start: int) -> dict[str, Backend]:
    if not config.log.tensorboard:
        return {}
    try:
        from torch.utils.tensorboard import SummaryWriter
    except ImportError:
        raise MissingExtra("tensorboard", "tensorboard") from None
    # purge_step hides what an earlier process logged for steps that are repeated
    writer = SummaryWriter(str(Path(config.train.output) / "tensorboard"), purge_step=start + 1)

    def write(values: Values | None) -> None:
        if values is None:
            writer.close()
            return
        for name, value in _select_numbers(values).items():
            writer.add_scalar(name, value, values["step"])

    return {"tensorboard": write}


def _open_wandb(config: RunConfig) -> dict[str, Backend]:
    if config.log.wandb is None:
        return {}
    try:
        import wandb
    except ImportError:
        raise MissingExtra("wandb", "wandb") from None
    settings: dict[str, Any] = {
        "project": config.log.wandb, "dir": config.train.output, "config": config.model_dump(mode="json"),
        "id": _load_wandb_id(Path(config.train.output)), "resume": "allow",
    }  # fmt: skip
    try:
        run = wandb.init(**settings)
    except Exception as error:  # no key or no network: neither is needed for training
        log(f"warning: wandb is offline: {first_line(error)}")
        run = wandb.init(**settings, mode="offline")

    def write(values: Values | None) -> None:
        if values is None:
            run.finish()
        else:
            run.log(_select_numbers(values), step=values["step"])

    return {"wandb": write}


def _load_wandb_id(output: Path) -> str:
    """The id of the run, so that a resumed run continues its own curve."""
    from secrets import token_hex

    path = output / "wandb-id"
    if not path.exists():
        write_whole(path, token_hex(4) + "\n")
    return path.read_text().strip()


class Memory(NamedTuple):
    """Peaks in bytes: of allocated GPU memory, or of this process; of what torch's allocator holds on the GPU."""

    allocated: int
    reserved: int | None

    @staticmethod
    def largest(peaks: Sequence[Memory]) -> Memory:
        """The largest ones of several processes."""
        reserved = [peak.reserved for peak in peaks if peak.reserved is not None]
        return Memory(max(peak.allocated for peak in peaks), max(reserved, default=None))

    def values(self) -> dict[str, int]:
        """For a line of metrics.jsonl."""
        return {"memory": self.allocated} | ({} if self.reserved is None else {"reserved_memory": self.reserved})


def peak_memory(device: torch.device) -> Memory:
    """The peaks of this process so far."""
    if device.type == "cuda":
        return Memory(torch.cuda.max_memory_allocated(device), torch.cuda.max_memory_reserved(device))
    return Memory(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024, None)


def summarize_loads(loads: Mapping[str, ExpertLoad]) -> dict[str, Any]:
    """The load of experts for a line of metrics.jsonl: of every layer, and of the worst and the mean layer."""
    if not loads:
        return {}
    layers = {
        name: {"max_over_mean": load.max_over_mean, "busiest": load.busiest, "entropy": load.entropy}
        for name, load in loads.items()
    }
    return {
        "expert_max_over_mean": max(load.max_over_mean for load in loads.values()),
        "expert_busiest": max(load.busiest for load in loads.values()),
        "expert_entropy": sum(load.entropy for load in loads.values()) / len(loads),
        "experts": layers,
    }


class Utilization:
    """Model FLOPs utilization (MFU): the FLOPs of F, I and W over the peak FLOPs of the GPUs.

    With an adapter the model is frozen, so its weights have no W. The adapter's own FLOPs are not counted.
    """

    def __init__(self, config: RunConfig, device: torch.device) -> None:
        self._ideal: IdealTimes | None = None
        self._num_gpus = config.mesh.num_processes
        if device.type == "cuda":
            self._ideal = _ideal_times(config, torch.cuda.get_device_name(device))
            local = int(os.environ.get("LOCAL_WORLD_SIZE", config.mesh.num_processes))
            self._num_gpus //= max(1, local // torch.cuda.device_count())  # processes may share GPUs

    def compute(self, lengths: Sequence[int], seconds: float) -> float | None:
        """The MFU of a step with samples of these lengths; None if the model's FLOPs or the GPU's peak are not known.

        Packed samples attend within themselves, so they need fewer FLOPs than a row of one sample.
        """
        return None if self._ideal is None else self._ideal.of(lengths) / seconds / self._num_gpus


@dataclass(frozen=True)
class IdealTimes:
    """Seconds that a GPU needs at its peak for a token of a sample, by the sample's length.

    They grow by the same number with each token, and slower above a window: in between they are interpolated.
    """

    lengths: tuple[int, ...]
    seconds: tuple[float, ...]

    def of(self, lengths: Sequence[int]) -> float:
        """The seconds of some samples."""
        return float(np.interp(lengths, self.lengths, self.seconds) @ np.asarray(lengths))


def _ideal_times(config: RunConfig, device_name: str) -> IdealTimes | None:
    words = device_name.lower().replace("-", " ").split()
    gpu = max((gpu for gpu in GPUS if set(gpu.split("-")) <= set(words)), key=len, default=None)
    if gpu is None or config.model.dtype == "float64":
        return None
    lengths = sorted({max(1, config.data.sequence // part) for part in (1, 4, 16)})
    try:
        shapes, is_frozen = open_shapes(config), config.lora is not None
        flops = [count_flops(shapes, length, is_frozen=is_frozen) / length for length in lengths]
    except ZeropipeError:
        return None
    peak = GPUS[gpu].peak_of(config.model.dtype)
    return IdealTimes(tuple(lengths), tuple(each / peak for each in flops))


def count_flops(model: ShapedModel | CountedModel, sequence: int, *, is_frozen: bool) -> float:
    """The FLOPs of F, I and W of one sequence. A frozen model has no gradients of weights.

    Every product is computed once in F, and backward once for each of its two factors: activations and weights, or two
    activations (attention).
    """
    kinds = model.layer_operators(Sizes(sequence, sequence, element=2, tp=1))
    total = 0.0
    for op in (op for kind in (*ENDS, *model.layers) for op in kinds[kind]):
        has_weight_gradient = not (is_frozen and op.parameters)
        total += (op.flops if op.useful is None else op.useful) * (3 if has_weight_gradient else 2)
    return total
