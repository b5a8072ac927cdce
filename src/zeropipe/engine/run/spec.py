"""The request of `zeropipe run`, checked before anything starts; without torch, so that `--dry-run` is quick."""

from __future__ import annotations

import json
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from zeropipe.core.mesh import DATA_DIMENSIONS, Mesh, num_processes
from zeropipe.core.model.checkpointing import Checkpointing
from zeropipe.core.model.configs import find_built_in, suggest_model
from zeropipe.core.model.layers import layer_counts, read_num_layers, require_layer_counts
from zeropipe.core.schedule import Schedule
from zeropipe.core.timeline import Origin
from zeropipe.errors import ConfigError


@dataclass(frozen=True)
class Job:
    """A model directory or built-in model, the synthetic tokens to train it with, and options of the run."""

    model: str = "tiny-qwen3"
    steps: int = 3
    sequence: int = 128
    batch: int = 1  # sequences per microbatch
    num_layers: int | None = None  # overrides that of a built-in model
    vocabulary: int | None = None  # overrides that of a built-in model
    layers: tuple[int, ...] | None = None  # per stage; None: evenly, but for
    first_less: int = 0  # fewer on the first stage
    last_less: int = 0  # and on the last one
    device: str = "cpu"
    dtype: str = "float32"
    compile: bool | None = False  # None: on a GPU in 16 bits
    ac: str = "none"
    split: str = "store"
    dynamic_weights: bool = False
    overlap: str = "streams"
    mesh: Mesh = ()  # without one, processes are one pipeline
    verify: bool = False  # compare a step's gradients with those of the full model in one process
    seed: int = 0


def check_job(job: Job) -> None:
    """ConfigError for options that exclude each other."""
    Checkpointing.parse(job.ac)
    if job.dynamic_weights and job.split != "store":
        raise ConfigError(f"--dynamic-weights cannot run --split {job.split}: use --split store")


def compiles_by_default(device: str, dtype: str) -> bool:
    """Whether blocks are compiled where nothing else is said: on a GPU in 16 bits."""
    return device == "cuda" and dtype == "bfloat16"


def require_cores(num_ranks: int) -> None:
    """ConfigError for more local processes than this machine can run."""
    cores = os.cpu_count() or 1
    if num_ranks > max(64, 4 * cores):
        raise ConfigError(
            f"{num_ranks} ranks are too many processes for the {cores} cores here: must be at most "
            f"{max(64, 4 * cores)}; use torchrun on several machines"
        )


def num_ranks_of(job: Job, schedule: Schedule) -> int:
    """The number of processes that run a schedule."""
    return num_processes(job.mesh) if job.mesh else schedule.num_ranks


def num_pipelines_of(job: Job) -> int:
    """The number of pipelines, each with microbatches of its own."""
    return num_processes(tuple(entry for entry in job.mesh if entry[0] in DATA_DIMENSIONS))


def num_layers_of(job: Job) -> int:
    """The number of layers of the job's model."""
    known = find_built_in(job.model)
    if known is not None:
        return job.num_layers or int(known["num_hidden_layers"])
    if job.num_layers or job.vocabulary:
        raise ConfigError(
            f"model {job.model!r} has its own layers and vocabulary; num_layers and vocabulary are for built-in models"
        )
    file = Path(job.model) / "config.json"
    if not file.is_file():
        raise ConfigError(
            f"model {job.model!r}: must be a directory with a config.json or a built-in model; "
            f"{suggest_model(job.model)}"
        )
    try:
        data = json.loads(file.read_text())
        found = read_num_layers({**data, **data.get("text_config", {})})
    except (ValueError, AttributeError, TypeError):
        raise ConfigError(f"{file} is not a model's configuration; save one with save_pretrained") from None
    if not isinstance(found, int):
        raise ConfigError(f"{file} has no num_hidden_layers: only decoder models can be cut into stages")
    return found


def layers_per_stage_of(job: Job, schedule: Schedule) -> tuple[int, ...]:
    """Layers per stage."""
    num_layers = num_layers_of(job)
    if job.layers is None:
        return layer_counts(num_layers, schedule.num_stages, job.first_less, job.last_less)
    return require_layer_counts(job.layers, num_layers, schedule.num_stages)


def origin_of(job: Job, schedule: Schedule) -> Origin:
    """The setting that a recording of the job describes."""
    return Origin(
        layers_per_stage_of(job, schedule),
        job.ac,
        job.batch,
        job.sequence,
        job.dtype,
        dict(job.mesh).get("tp", 1),
        bool(job.compile),
    )


def built_in_config(job: Job) -> dict[str, Any]:
    """The config of a built-in model as a dict."""
    return {
        **(find_built_in(job.model) or {}),
        "num_hidden_layers": num_layers_of(job),
        "vocab_size": vocabulary_of(job),
        "max_position_embeddings": max(4096, job.sequence),
    }


def vocabulary_of(job: Job) -> int:
    """The size of the model's vocabulary."""
    known = find_built_in(job.model)
    if known is not None:
        return job.vocabulary or int(known["vocab_size"])
    data = json.loads((Path(job.model) / "config.json").read_text())
    return int(data.get("vocab_size") or data["text_config"]["vocab_size"])
