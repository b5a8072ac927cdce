"""What `zeropipe run` runs: schedules on a Hugging Face model with synthetic tokens."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from zeropipe.core.schedule import Schedule
from zeropipe.engine.checkpointing import Checkpointing
from zeropipe.engine.layers import check_counts, layer_counts
from zeropipe.engine.losses import CausalLMLoss
from zeropipe.engine.measure import Measured, measure
from zeropipe.engine.stages import hf_stages
from zeropipe.errors import ConfigError

# Built-in models with random weights: layers, hidden, intermediate, heads, key/value heads, head size, vocabulary.
BUILT_IN = {
    "tiny-qwen3": (8, 256, 768, 4, 2, 64, 2048),
    "tiny-llama": (8, 256, 768, 4, 2, 64, 2048),
    "qwen3-0.6b": (28, 1024, 3072, 16, 8, 128, 151936),
    "qwen3-8b": (36, 4096, 12288, 32, 8, 128, 151936),
    "llama-8b": (32, 4096, 14336, 32, 8, 128, 128256),
}
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float64": torch.float64}


@dataclass(frozen=True)
class Job:
    """What to run: a model directory or a built-in one, and how many synthetic tokens through it."""

    model: str = "tiny-qwen3"
    steps: int = 3
    sequence: int = 128
    batch: int = 1  # sequences per microbatch
    num_layers: int | None = None  # of a built-in model, if not its own
    vocabulary: int | None = None  # likewise
    layers: tuple[int, ...] | None = None  # per stage
    device: str = "cpu"
    dtype: str = "float32"
    compile: bool = False
    ac: str = "none"
    split: str = "store"
    seed: int = 0


@dataclass(frozen=True)
class Outcome:
    """What a job gave for one schedule."""

    measured: Measured
    num_parameters: int


def check_job(job: Job) -> None:
    """ConfigError for wishes that cannot be met, before anything starts."""
    wish = Checkpointing.parse(job.ac)
    if job.split == "autograd" and (job.compile or wish.mode == "op"):
        raise ConfigError("--split autograd cannot run compiled blocks or --ac selective:op: use --split store")
    if job.device == "cuda" and not torch.cuda.is_available():
        raise ConfigError("--device cuda: torch sees no GPU here; use --device cpu")


def layers_of(job: Job) -> int:
    """How many layers the job's model has."""
    if job.model in BUILT_IN:
        return job.num_layers or BUILT_IN[job.model][0]
    if job.num_layers or job.vocabulary:
        raise ConfigError(f"model {job.model!r} has its own layers and vocabulary: only built-in models can be changed")
    file = Path(job.model) / "config.json"
    if not file.is_file():
        raise ConfigError(f"model {job.model!r}: give a directory with a config.json, or one of {', '.join(BUILT_IN)}")
    try:
        data = json.loads(file.read_text())
        found = data.get("num_hidden_layers", data.get("text_config", {}).get("num_hidden_layers"))
    except (ValueError, AttributeError):
        raise ConfigError(f"{file} is not a model's configuration: save one with save_pretrained") from None
    if not isinstance(found, int):
        raise ConfigError(f"{file} has no num_hidden_layers: only decoder models can be cut into stages")
    return found


def counts_of(job: Job, schedule: Schedule) -> tuple[int, ...]:
    """Layers per stage."""
    num_layers = layers_of(job)
    if job.layers is None:
        return layer_counts(num_layers, schedule.num_stages)
    return check_counts(job.layers, num_layers, schedule.num_stages)


def run_job(schedule: Schedule, job: Job) -> Outcome:
    """Run one schedule; every rank calls this and gets the same answer. Progress goes to rank 0's stderr."""
    rank = dist.get_rank()

    def tell(step: int, loss: float, seconds: float) -> None:
        name = f"step {step}/{job.steps}" if step else "warm-up"
        print(f"{schedule.name}: {name}, loss {loss:.4f}, {seconds:.3f} s", file=sys.stderr, flush=True)

    device = _device(job.device)
    stages = hf_stages(
        _model(job), schedule, rank, layers=job.layers, dtype=DTYPES[job.dtype], device=device, seed=job.seed
    )
    measured = measure(
        schedule, stages, lambda step: _tokens(job, schedule.num_microbatches, step, device), CausalLMLoss(),
        steps=job.steps, tell=tell if rank == 0 else None, device=device, compile=job.compile, ac=job.ac,
        split=job.split,
    )  # fmt: skip
    return Outcome(measured, _num_parameters(stages, schedule))


def run_all(schedules: Sequence[Schedule], job: Job) -> list[Outcome]:
    """`run_job` for one schedule after the other."""
    return [run_job(schedule, job) for schedule in schedules]


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
    from transformers import LlamaConfig, Qwen3Config

    _, hidden, intermediate, heads, kv_heads, head_size, _ = BUILT_IN[job.model]
    make = Qwen3Config if "qwen3" in job.model else LlamaConfig
    return make(
        hidden_size=hidden, intermediate_size=intermediate, num_hidden_layers=layers_of(job),
        num_attention_heads=heads, num_key_value_heads=kv_heads, head_dim=head_size, vocab_size=_vocabulary(job),
        max_position_embeddings=max(4096, job.sequence), tie_word_embeddings=False,
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
    if job.model in BUILT_IN:
        return job.vocabulary or BUILT_IN[job.model][-1]
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
