"""Run schedules on a Hugging Face model with synthetic tokens, for `zeropipe run`."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh

from zeropipe.core.mesh import DATA_DIMENSIONS, EXPERTS, Mesh
from zeropipe.core.model.configs import find_built_in
from zeropipe.core.schedule import Schedule
from zeropipe.engine.comm.collective import on_all_ranks, require_same
from zeropipe.engine.comm.ranks import DEFAULT_TIMEOUT_S, Ranks, job_ranks
from zeropipe.engine.engine import Engine
from zeropipe.engine.mesh.parallelize import parallelize
from zeropipe.engine.run.compare import compare_gradients
from zeropipe.engine.run.measure import Measured, measure
from zeropipe.engine.run.spec import Job, built_in_config, num_pipelines_of, vocabulary_of
from zeropipe.engine.run.torchrun import environment_int, join_torchrun, local_world_size
from zeropipe.engine.stages.build import hf_model, hf_stages
from zeropipe.engine.step.losses import CausalLMLoss
from zeropipe.errors import ConfigError

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float64": torch.float64}


@dataclass(frozen=True)
class Outcome:
    """The result of a job for one schedule."""

    measured: Measured
    num_parameters: int
    gradient_error: float | None = None  # of `compare_gradients`, if the job verifies


class _Built(NamedTuple):
    """The stages of this process."""

    stages: dict[int, Any]
    num_parameters: int  # counted here: over all processes, each parameter of the model counts once
    mesh: Any
    pipeline: int  # index of this process's pipeline


def run_job(schedule: Schedule, job: Job) -> Outcome:
    """Run one schedule; every rank calls this and gets the same result. Rank 0 prints progress to stderr."""
    device = select_device(job.device)
    built, num_parameters = _build(schedule, job, device)
    options: dict[str, Any] = {
        "device": device, "mesh": built.mesh, "compile": job.compile, "ac": job.ac, "split": job.split,
        "dynamic_weights": job.dynamic_weights, "overlap": job.overlap,
    }  # fmt: skip

    def microbatches(step: int, pipeline: int) -> list[dict[str, Tensor]]:
        index = step * num_pipelines_of(job) + pipeline
        return synthetic_microbatches(job, schedule.num_microbatches, index, device)

    def print_step(step: int, loss: float, seconds: float) -> None:
        name = f"step {step}/{job.steps}" if step else "warm-up"
        print(f"{schedule.name}: {name}, loss {loss:.4f}, {seconds:.3f} s", file=sys.stderr, flush=True)

    error = None
    if job.verify:
        model = hf_model(_model(job), dtype=DTYPES[job.dtype], device=device, seed=job.seed)
        all_microbatches = [batch for index in range(num_pipelines_of(job)) for batch in microbatches(0, index)]
        with Engine(schedule, built.stages, **options) as engine:
            error = compare_gradients(engine, model, microbatches(0, built.pipeline), all_microbatches)
        del model
    measured = measure(
        schedule, built.stages, lambda step: microbatches(step, built.pipeline), CausalLMLoss(), steps=job.steps,
        on_step=print_step if dist.get_rank() == 0 else None, **options,
    )  # fmt: skip
    return Outcome(measured, num_parameters, error)


def _build(schedule: Schedule, job: Job, device: torch.device) -> tuple[_Built, int]:
    """This process's stages, and the number of parameters of the model."""
    with job_ranks(DEFAULT_TIMEOUT_S, "begun to run") as ranks:
        ranks.enter("comparing options")
        require_same(ranks, lambda: asdict(job), "options")
        mesh = create_mesh(job.mesh, device, ranks)
        coordinate = dict(zip(mesh.mesh_dim_names, mesh.get_coordinate())) if mesh is not None else {"pp": ranks.rank}
        ranks.enter("building its stages", busy=True)
        built, counts = on_all_ranks(
            ranks,
            lambda: _build_stages(job, schedule, coordinate, mesh, device),
            lambda built: built.num_parameters,
            names_rank=False,
        )
    return built, sum(counts)


def _build_stages(
    job: Job, schedule: Schedule, coordinate: Mapping[str, int], mesh: Any, device: torch.device
) -> _Built:
    rank = coordinate.get("pp", 0)
    stages = hf_stages(
        _model(job), schedule, rank, layers=job.layers, dtype=DTYPES[job.dtype], device=device, seed=job.seed
    )
    first_copies = [module for stage, module in stages.items() if schedule.placement.copies[0][stage] == rank]
    count = sum(parameter.numel() for module in first_copies for parameter in module.parameters())
    is_first = not any(index for name, index in coordinate.items() if name != "pp")
    pipeline = 0
    for name in DATA_DIMENSIONS:
        pipeline = pipeline * dict(job.mesh).get(name, 1) + coordinate.get(name, 0)
    if mesh is not None:
        stages = parallelize(stages, mesh, ep=dict(job.mesh).get(EXPERTS, 1))
    return _Built(stages, count if is_first else 0, mesh, pipeline)


_meshes: dict[tuple[Mesh, torch.device], Any] = {}  # created once: their groups exist as long as the process


def create_mesh(sizes: Mesh, device: torch.device, ranks: Ranks) -> Any:
    """The device mesh of all processes; None without sizes. It has no ep, which parallelize() adds."""
    sizes = tuple(entry for entry in sizes if entry[0] != EXPERTS)
    if not sizes:
        return None

    def create() -> Any:
        if device.type == "cuda":  # else torch would select a GPU by the rank
            torch.cuda.set_device(device)
            torch.zeros(1, device=device)
        return init_device_mesh(
            device.type, tuple(size for _, size in sizes), mesh_dim_names=tuple(name for name, _ in sizes)
        )

    if (sizes, device) not in _meshes:
        ranks.enter("making the mesh")
        _meshes[sizes, device] = ranks.call(create)
    return _meshes[sizes, device]


def run_all(schedules: Sequence[Schedule], job: Job) -> list[Outcome]:
    """`run_job` for one schedule after the other."""
    return [run_job(schedule, job) for schedule in schedules]


def resolve_device(name: str) -> str:
    """`auto` is a GPU if torch finds one, else the CPU. ConfigError for a GPU that does not exist."""
    if name == "cuda" and not torch.cuda.is_available():
        raise ConfigError("--device cuda: torch sees no GPU here; use cpu or auto")
    return ("cuda" if torch.cuda.is_available() else "cpu") if name == "auto" else name


def choose_backend(job: Job, num_local_ranks: int) -> str:
    """NCCL where every rank of this machine has a GPU of its own, else gloo."""
    return "nccl" if job.device == "cuda" and torch.cuda.device_count() >= num_local_ranks else "gloo"


def run_under_torchrun(schedules: Sequence[Schedule], job: Job) -> list[Outcome] | None:
    """`run_all` on the processes torchrun started; None on all ranks but the first."""
    join_torchrun(choose_backend(job, local_world_size()))
    try:
        results = run_all(schedules, job)
        return results if dist.get_rank() == 0 else None
    finally:
        dist.destroy_process_group()


def _model(job: Job) -> Any:
    """The directory, or the config of a built-in model."""
    if find_built_in(job.model) is None:
        return job.model
    from transformers import AutoConfig

    return AutoConfig.for_model(**built_in_config(job))


def synthetic_microbatches(
    job: Job, num_microbatches: int, index: int, device: torch.device
) -> list[dict[str, Tensor]]:
    """Random tokens, the same on every rank for the same `index`."""
    generator = torch.Generator().manual_seed(job.seed + index)
    vocabulary = vocabulary_of(job)
    microbatches = []
    for _ in range(num_microbatches):
        tokens = torch.randint(0, vocabulary, (job.batch, job.sequence), generator=generator).to(device)
        microbatches.append({"input_ids": tokens, "labels": tokens})
    return microbatches


def select_device(name: str) -> torch.device:
    """This process's device; a GPU becomes the current one, which torch's collectives of objects use."""
    if name == "cuda":  # ranks share GPUs where there are fewer
        device = torch.device("cuda", environment_int("LOCAL_RANK") % torch.cuda.device_count())
        torch.cuda.set_device(device)
        return device
    return torch.device(name)
