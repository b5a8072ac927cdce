"""What `zeropipe run` runs: schedules on a Hugging Face model with synthetic tokens."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from zeropipe.core.schedule import Schedule
from zeropipe.engine.run.measure import Measured, measure
from zeropipe.engine.run.spec import BUILT_IN, Job, built_in, vocabulary_of
from zeropipe.engine.stages.build import hf_stages
from zeropipe.engine.step.losses import CausalLMLoss
from zeropipe.errors import ConfigError

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float64": torch.float64}


@dataclass(frozen=True)
class Outcome:
    """What a job gave for one schedule."""

    measured: Measured
    num_parameters: int


def run_job(schedule: Schedule, job: Job) -> Outcome:
    """Run one schedule; every rank calls this and gets the same answer. Progress goes to rank 0's stderr."""
    rank = dist.get_rank()

    def tell(step: int, loss: float, seconds: float) -> None:
        name = f"step {step}/{job.steps}" if step else "warm-up"
        print(f"{schedule.name}: {name}, loss {loss:.4f}, {seconds:.3f} s", file=sys.stderr, flush=True)

    device = device_of(job.device)
    stages = hf_stages(
        _model(job), schedule, rank, layers=job.layers, dtype=DTYPES[job.dtype], device=device, seed=job.seed
    )
    measured = measure(
        schedule, stages, lambda step: _tokens(job, schedule.num_microbatches, step, device), CausalLMLoss(),
        steps=job.steps, tell=tell if rank == 0 else None, device=device, compile=job.compile, ac=job.ac,
        split=job.split, dynamic_weights=job.dynamic_weights,
    )  # fmt: skip
    return Outcome(measured, _num_parameters(stages, schedule))


def run_all(schedules: Sequence[Schedule], job: Job) -> list[Outcome]:
    """`run_job` for one schedule after the other."""
    return [run_job(schedule, job) for schedule in schedules]


def check_device(job: Job) -> None:
    """ConfigError for a GPU that is not there."""
    if job.device == "cuda" and not torch.cuda.is_available():
        raise ConfigError("--device cuda: torch sees no GPU here; use --device cpu")


def backend_of(job: Job, ranks_here: int) -> str:
    """NCCL where every rank of this machine has a GPU of its own, else gloo."""
    return "nccl" if job.device == "cuda" and torch.cuda.device_count() >= ranks_here else "gloo"


def run_under_torchrun(schedules: Sequence[Schedule], job: Job) -> list[Outcome] | None:
    """`run_all` on the processes torchrun started; None on all ranks but the first."""
    dist.init_process_group(backend_of(job, int(os.environ.get("LOCAL_WORLD_SIZE", "1"))))
    try:
        results = run_all(schedules, job)
        return results if dist.get_rank() == 0 else None
    finally:
        dist.destroy_process_group()


def _model(job: Job) -> Any:
    """The directory, or the config of a built-in model."""
    if job.model not in BUILT_IN:
        return job.model
    from transformers import AutoConfig

    return AutoConfig.for_model(**built_in(job))


def _tokens(job: Job, num_microbatches: int, step: int, device: torch.device) -> list[dict[str, torch.Tensor]]:
    """The same synthetic microbatches on every rank."""
    generator = torch.Generator().manual_seed(job.seed + step)
    vocabulary = vocabulary_of(job)
    made = []
    for _ in range(num_microbatches):
        tokens = torch.randint(0, vocabulary, (job.batch, job.sequence), generator=generator).to(device)
        made.append({"input_ids": tokens, "labels": tokens})
    return made


def device_of(name: str) -> torch.device:
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
