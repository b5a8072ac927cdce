"""What `zeropipe run` runs: schedules on a Hugging Face model with synthetic tokens."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

from zeropipe.core.mesh import DATA_DIMENSIONS, Mesh
from zeropipe.core.model.configs import BUILT_IN
from zeropipe.core.schedule import Schedule
from zeropipe.engine.comm.collective import on_all_ranks, require_same
from zeropipe.engine.comm.ranks import DEFAULT_TIMEOUT_S, Ranks, job_ranks
from zeropipe.engine.engine import Engine
from zeropipe.engine.mesh.parallelize import parallelize
from zeropipe.engine.run.measure import Measured, measure
from zeropipe.engine.run.prove import gradient_error
from zeropipe.engine.run.spec import Job, built_in, num_pipelines_of, vocabulary_of
from zeropipe.engine.run.torchrun import join_torchrun, number_given, ranks_here
from zeropipe.engine.stages.build import hf_model, hf_stages
from zeropipe.engine.step.losses import CausalLMLoss
from zeropipe.errors import ConfigError

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float64": torch.float64}


@dataclass(frozen=True)
class Outcome:
    """What a job gave for one schedule."""

    measured: Measured
    num_parameters: int
    gradient_error: float | None = None  # from the plain model's, if that was asked for


def run_job(schedule: Schedule, job: Job) -> Outcome:
    """Run one schedule; every rank calls this and gets the same answer. Progress goes to rank 0's stderr."""
    device = device_of(job.device)

    def tell(step: int, loss: float, seconds: float) -> None:
        name = f"step {step}/{job.steps}" if step else "warm-up"
        print(f"{schedule.name}: {name}, loss {loss:.4f}, {seconds:.3f} s", file=sys.stderr, flush=True)

    def tokens(step: int, pipeline: int) -> list[dict[str, torch.Tensor]]:
        return synthetic(job, schedule.num_microbatches, step * num_pipelines_of(job) + pipeline, device)

    with job_ranks(DEFAULT_TIMEOUT_S, "begun to run") as ranks:
        ranks.enter("comparing options")
        require_same(ranks, lambda: asdict(job), "options")
        mesh = mesh_of(job.mesh, device, ranks)
        place = dict(zip(mesh.mesh_dim_names, mesh.get_coordinate())) if mesh is not None else {"pp": ranks.rank}
        ranks.enter("building its stages", busy=True)
        built, numbers = on_all_ranks(
            ranks,
            lambda: _built(job, schedule, place, mesh, device),
            lambda made: made.num_parameters,
            names_rank=False,
        )
    stages = built.stages
    pipeline = 0
    for name in DATA_DIMENSIONS:
        pipeline = pipeline * dict(job.mesh).get(name, 1) + place.get(name, 0)
    options: dict[str, Any] = {
        "device": device, "mesh": mesh, "compile": job.compile, "ac": job.ac, "split": job.split,
        "dynamic_weights": job.dynamic_weights,
    }  # fmt: skip
    error = None
    if job.prove:
        plain = hf_model(_model(job), dtype=DTYPES[job.dtype], device=device, seed=job.seed)
        everybodys = [batch for number in range(num_pipelines_of(job)) for batch in tokens(0, number)]
        with Engine(schedule, stages, **options) as engine:
            error = gradient_error(engine, plain, tokens(0, pipeline), everybodys)
        del plain
    measured = measure(
        schedule, stages, lambda step: tokens(step, pipeline), CausalLMLoss(), steps=job.steps,
        tell=tell if dist.get_rank() == 0 else None, **options,
    )  # fmt: skip
    return Outcome(measured, sum(numbers), error)


class _Built(NamedTuple):
    stages: dict[int, Any]
    num_parameters: int  # that count here: in the end all parameters of the model count once


def _built(job: Job, schedule: Schedule, place: dict[str, int], mesh: Any, device: torch.device) -> _Built:
    rank = place.get("pp", 0)
    stages = hf_stages(
        _model(job), schedule, rank, layers=job.layers, dtype=DTYPES[job.dtype], device=device, seed=job.seed
    )
    own = [module for stage, module in stages.items() if schedule.placement.copies[0][stage] == rank]
    number = sum(parameter.numel() for module in own for parameter in module.parameters())
    is_first = not any(number for name, number in place.items() if name != "pp")
    return _Built(stages if mesh is None else parallelize(stages, mesh), number if is_first else 0)


_meshes: dict[tuple[Mesh, torch.device], Any] = {}  # made once, since their groups live as long as the process


def mesh_of(sizes: Mesh, device: torch.device, ranks: Ranks) -> Any:
    """The mesh of all processes."""
    if not sizes:
        return None

    def make() -> Any:
        if device.type == "cuda":  # else each process would want a GPU of its own
            torch.cuda.set_device(device)
            torch.zeros(1, device=device)
        return init_device_mesh(
            device.type, tuple(size for _, size in sizes), mesh_dim_names=tuple(name for name, _ in sizes)
        )

    if (sizes, device) not in _meshes:
        ranks.enter("making the mesh")
        _meshes[sizes, device] = ranks.call(make)
    return _meshes[sizes, device]


def run_all(schedules: Sequence[Schedule], job: Job) -> list[Outcome]:
    """`run_job` for one schedule after the other."""
    return [run_job(schedule, job) for schedule in schedules]


def resolve_device(name: str) -> str:
    """`auto` is a GPU if torch sees one, else the CPU. ConfigError for a GPU that is not there."""
    if name == "cuda" and not torch.cuda.is_available():
        raise ConfigError("--device cuda: torch sees no GPU here; use cpu or auto")
    return ("cuda" if torch.cuda.is_available() else "cpu") if name == "auto" else name


def backend_of(job: Job, ranks_here: int) -> str:
    """NCCL where every rank of this machine has a GPU of its own, else gloo."""
    return "nccl" if job.device == "cuda" and torch.cuda.device_count() >= ranks_here else "gloo"


def run_under_torchrun(schedules: Sequence[Schedule], job: Job) -> list[Outcome] | None:
    """`run_all` on the processes torchrun started; None on all ranks but the first."""
    join_torchrun(backend_of(job, ranks_here()))
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


def synthetic(job: Job, num_microbatches: int, step: int, device: torch.device) -> list[dict[str, torch.Tensor]]:
    """The same synthetic microbatches on every rank of a pipeline."""
    generator = torch.Generator().manual_seed(job.seed + step)
    vocabulary = vocabulary_of(job)
    made = []
    for _ in range(num_microbatches):
        tokens = torch.randint(0, vocabulary, (job.batch, job.sequence), generator=generator).to(device)
        made.append({"input_ids": tokens, "labels": tokens})
    return made


def device_of(name: str) -> torch.device:
    """This process's device; a GPU becomes the current one, with which torch's collectives of objects work."""
    if name == "cuda":  # ranks share GPUs where there are fewer
        device = torch.device("cuda", number_given("LOCAL_RANK") % torch.cuda.device_count())
        torch.cuda.set_device(device)
        return device
    return torch.device(name)
