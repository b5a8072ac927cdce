"""A schedule run for real on a model with synthetic tokens, and what was measured. Every rank calls `measure`."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from zeropipe.core.schedule import Schedule
from zeropipe.core.timeline import Timeline
from zeropipe.engine.checkpointing import Checkpointing
from zeropipe.engine.engine import Engine
from zeropipe.engine.layers import check_counts, layer_counts
from zeropipe.engine.losses import CausalLMLoss
from zeropipe.engine.stages import hf_stages
from zeropipe.errors import ConfigError

TINY = ("tiny-qwen3", "tiny-llama")
TINY_LAYERS = 8
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float64": torch.float64}


@dataclass(frozen=True)
class Job:
    """What to run: a model directory or a built-in tiny one, and how many synthetic tokens through it."""

    model: str = "tiny-qwen3"
    steps: int = 3
    sequence: int = 128
    batch: int = 1  # sequences per microbatch
    num_layers: int = TINY_LAYERS  # of a built-in model
    layers: tuple[int, ...] | None = None  # per stage
    device: str = "cpu"
    dtype: str = "float32"
    compile: bool = False
    ac: str = "none"
    split: str = "store"
    seed: int = 0


@dataclass(frozen=True)
class Measured:
    """What a run gave: the timeline of the step with the median makespan, and all steps' losses and makespans."""

    timeline: Timeline
    losses: tuple[float, ...]
    makespans: tuple[float, ...]
    num_parameters: int


def check_job(job: Job) -> None:
    """ConfigError for wishes that cannot be met, before anything starts."""
    Checkpointing.parse(job.ac)
    if job.split == "autograd" and job.compile:
        raise ConfigError("--split autograd cannot run compiled blocks: use --split store, or leave --compile out")
    if job.device == "cuda" and not torch.cuda.is_available():
        raise ConfigError("--device cuda: torch sees no GPU here; use --device cpu")


def layers_of(job: Job) -> int:
    """How many layers the job's model has."""
    if job.model in TINY:
        return job.num_layers
    file = Path(job.model) / "config.json"
    if not file.is_file():
        raise ConfigError(f"model {job.model!r}: give a directory with a config.json, or one of {', '.join(TINY)}")
    data = json.loads(file.read_text())
    found = data.get("num_hidden_layers", data.get("text_config", {}).get("num_hidden_layers"))
    if not isinstance(found, int):
        raise ConfigError(f"{file} has no num_hidden_layers: only decoder models can be cut into stages")
    return found


def counts_of(job: Job, schedule: Schedule) -> tuple[int, ...]:
    """Layers per stage."""
    num_layers = layers_of(job)
    if job.layers is None:
        return layer_counts(num_layers, schedule.num_stages)
    return check_counts(job.layers, num_layers, schedule.num_stages)


def measure(schedule: Schedule, job: Job, say: Callable[[str], None] | None = None) -> Measured:
    """Run `job.steps` recorded steps after one that warms up. Every rank calls this and gets the same answer."""
    rank = dist.get_rank()
    tell = (say or _to_stderr) if rank == 0 else _nowhere
    device = _device(job.device)
    stages = hf_stages(
        _model(job), schedule, rank, layers=job.layers, dtype=DTYPES[job.dtype], device=device, seed=job.seed
    )
    with Engine(
        schedule, stages, device=device, record=True, compile=job.compile, ac=job.ac, split=job.split
    ) as engine:
        optimizer = torch.optim.AdamW(engine.parameters(), lr=1e-3)
        losses, timelines = [], []
        for step in range(job.steps + 1):
            result = engine.train_step(_tokens(job, schedule.num_microbatches, step, device), CausalLMLoss())
            optimizer.step()
            optimizer.zero_grad()
            timeline = engine.timeline()
            name = f"step {step}/{job.steps}" if step else "warm-up"
            tell(f"{schedule.name}: {name}, loss {result.loss:.4f}, {timeline.makespan:.3f} s")
            if step:
                losses.append(result.loss)
                timelines.append(timeline)
    middle = sorted(timelines, key=lambda t: t.makespan)[len(timelines) // 2]
    return Measured(middle, tuple(losses), tuple(t.makespan for t in timelines), _num_parameters(stages, schedule))


def measure_all(schedules: Sequence[Schedule], job: Job) -> list[Measured]:
    """`measure` one schedule after the other."""
    return [measure(schedule, job) for schedule in schedules]


def measure_under_torchrun(schedules: Sequence[Schedule], job: Job) -> list[Measured] | None:
    """`measure_all` on the processes torchrun started; None on all ranks but the first.

    NCCL where every rank has a GPU of its own, else gloo.
    """
    own_gpu = job.device == "cuda" and torch.cuda.device_count() >= int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    dist.init_process_group("nccl" if own_gpu else "gloo")
    try:
        results = measure_all(schedules, job)
        return results if dist.get_rank() == 0 else None
    finally:
        dist.destroy_process_group()


def _model(job: Job) -> Any:
    """The directory, or the config of a built-in model."""
    if job.model not in TINY:
        return job.model
    from transformers import LlamaConfig, Qwen3Config

    make = Qwen3Config if job.model == "tiny-qwen3" else LlamaConfig
    return make(
        hidden_size=256, intermediate_size=768, num_hidden_layers=job.num_layers, num_attention_heads=4,
        num_key_value_heads=2, head_dim=64, vocab_size=2048, max_position_embeddings=max(512, job.sequence),
        tie_word_embeddings=False,
    )  # fmt: skip


def _tokens(job: Job, num_microbatches: int, step: int, device: torch.device) -> list[dict[str, torch.Tensor]]:
    """The same synthetic microbatches on every rank."""
    generator = torch.Generator().manual_seed(job.seed + step)
    vocabulary = _vocabulary(job)
    made = []
    for _ in range(num_microbatches):
        tokens = torch.randint(0, vocabulary, (job.batch, job.sequence), generator=generator).to(device)
        made.append({"input_ids": tokens, "labels": tokens})
    return made


def _vocabulary(job: Job) -> int:
    if job.model in TINY:
        return 2048
    data = json.loads((Path(job.model) / "config.json").read_text())
    return int(data.get("vocab_size") or data["text_config"]["vocab_size"])


def _device(name: str) -> torch.device:
    if name == "cuda":  # ranks share GPUs where there are fewer
        return torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")) % torch.cuda.device_count())
    return torch.device(name)


def _num_parameters(stages: Any, schedule: Schedule) -> int:
    """Parameters of the whole model; a second copy of the stages does not count."""
    rank = dist.get_rank()
    own = sum(
        p.numel()
        for s, module in stages.items()
        if schedule.placement.copies[0][s] == rank
        for p in module.parameters()
    )
    parts: list[int] = [0] * dist.get_world_size()
    dist.all_gather_object(parts, own)
    return sum(parts)


def _to_stderr(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def _nowhere(text: str) -> None:
    pass
