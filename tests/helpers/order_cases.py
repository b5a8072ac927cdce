"""What the local ranks run in test_mesh_orders.py: pipelines that share stages and do not do the same work."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any
from unittest import mock

from engine_helpers import SquareLoss, blocks, error_of, microbatches, plain_step
from mesh_cases import difference, mesh_of, whole
from torch import Tensor, nn

from zeropipe.core.schedule import Schedule
from zeropipe.engine import Engine, module_stages, parallelize
from zeropipe.errors import ConfigError, EngineError


def pipeline_of(mesh: Any) -> int:
    """The number of this process's pipeline."""
    number = 0
    for name in ("dp_replicate", "dp_shard"):
        if name in mesh.mesh_dim_names:
            number = number * mesh[name].size() + mesh[name].get_local_rank()
    return number


def rank_of(mesh: Any) -> int:
    """This process's place in its pipeline."""
    return mesh["pp"].get_local_rank() if "pp" in mesh.mesh_dim_names else 0


def train_unlike(
    schedule: Schedule, sizes: dict[str, int], options: dict[str, Any], counts: list[tuple[int, ...]]
) -> dict[str, float]:
    """A step for each of `counts`, numbers of microbatches of the pipelines, beside one process."""
    mesh, loss_fn = mesh_of(sizes), SquareLoss()
    number = 3 * schedule.num_stages  # three blocks of one size in each stage: a wrong order would swap them
    plain = blocks(number)
    model = nn.Sequential(*plain)
    stages: dict[int, Any] = parallelize(dict(module_stages(blocks(number), schedule, rank_of(mesh))), mesh)
    seen = {"loss": 0.0, "eval": 0.0, "grad": 0.0}
    with Engine(schedule, stages, mesh=mesh, **options) as engine:
        for step, some in enumerate(counts):
            data = [microbatches(count, 10 * step + pipeline) for pipeline, count in enumerate(some)]
            mine = data[pipeline_of(mesh)]
            wanted = plain_step(model, [batch for batches in data for batch in batches], loss_fn)
            for name, result in (("eval", engine.eval_step(mine, loss_fn)), ("loss", engine.train_step(mine, loss_fn))):
                seen[name] = max(seen[name], abs(result.loss - wanted) / abs(wanted))
            seen["grad"] = max(seen["grad"], difference(stages, plain, "grad"))
            for parameter in [*engine.parameters(), *model.parameters()]:
                parameter.grad = None
    return seen


class Branching(nn.Module):
    """A stage of four blocks. Which of them a microbatch goes through, and in which order, depends on its values."""

    def __init__(self, seed: int, way: str) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(blocks(4 * seed + 4)[4 * seed :])
        self.seed, self.way = seed, way

    def forward(self, x: Tensor) -> Tensor:
        yes = bool(x.detach()[0, 0, 0] > 0)
        for number in {
            "skips": (0, 3) if yes else (0, 1, 2, 3),
            "skips all": () if yes and self.seed == 1 else (0, 1, 2, 3),
            "either": (0, 1) if yes else (2, 3),
            "turns": (3, 1, 2, 0) if yes else (0, 1, 2, 3),
            "repeats": (0, 0, 0, 1, 2, 3) if yes else (0, 1, 1, 2, 3, 3),
            "loops": (0, 1, 2, 3, 0, 1, 2, 3),
            "never": (0, 3),
            "returns": (0, 1, 2, 3, 0) if yes else (0, 1, 2, 3),
        }[self.way]:
            x = x + 0.1 * self.blocks[number](x)
        return x


def train_branching(
    schedule: Schedule, sizes: dict[str, int], options: dict[str, Any], ways: tuple[str, ...]
) -> dict[str, dict[str, float] | str]:
    """Steps of stages that do not use all of their units, beside one process; or what the engine says."""
    return {way: _train_branching(schedule, sizes, options, way) for way in ways}


def _train_branching(
    schedule: Schedule, sizes: dict[str, int], options: dict[str, Any], way: str
) -> dict[str, float] | str:
    mesh, loss_fn = mesh_of(sizes), SquareLoss()
    plain = [Branching(stage, way) for stage in range(schedule.num_stages)]
    model = nn.Sequential(*plain)
    copies = [Branching(stage, way) for stage in range(schedule.num_stages)]
    stages = parallelize({stage: copies[stage] for stage in schedule.placement.stages_of(rank_of(mesh))}, mesh)
    seen = {"loss": 0.0, "eval": 0.0, "grad": 0.0}
    with Engine(schedule, stages, mesh=mesh, **options) as engine:
        for step in range(2):
            data = [microbatches(schedule.num_microbatches, 10 * step + pipeline) for pipeline in range(2)]
            mine = data[pipeline_of(mesh)]
            wanted = plain_step(model, [batch for batches in data for batch in batches], loss_fn)
            try:
                evaluated, result = engine.eval_step(mine, loss_fn), engine.train_step(mine, loss_fn)
            except EngineError as error:
                return str(error)
            seen["eval"] = max(seen["eval"], abs(evaluated.loss - wanted) / wanted)
            seen["loss"] = max(seen["loss"], abs(result.loss - wanted) / wanted)
            for stage, module in stages.items():
                for name, parameter in module.named_parameters():
                    error = error_of(whole(parameter.grad), plain[stage].get_parameter(name).grad)
                    seen["grad"] = max(seen["grad"], error)
            for parameter in [*engine.parameters(), *model.parameters()]:
                parameter.grad = None
    return seen


def unlike_orders(schedule: Schedule) -> tuple[list[str], float]:
    """What all ranks say where two that share a stage would not gather and reduce alike; how right the next step is."""
    mesh, loss_fn, said = mesh_of({"pp": 2, "dp_shard": 2}), SquareLoss(), []
    plain, mine = blocks(schedule.num_stages), pipeline_of(mesh)
    stages: dict[int, Any] = parallelize(dict(module_stages(blocks(2), schedule, rank_of(mesh))), mesh)
    data = [microbatches(number, number) for number in (1, 5)]
    with Engine(schedule, stages, mesh=mesh) as engine:
        weight = stages[0].blocks[0].up.weight
        weight.requires_grad_(mine == 0)
        keeping = mock.patch.object(engine._executors, "_policy", return_value="keep")
        for context in (nullcontext(), keeping):
            try:
                with context:
                    engine.train_step(data[mine], loss_fn)
            except ConfigError as error:
                said.append(str(error))
            weight.requires_grad_(True)
        engine.train_step(data[mine], loss_fn)
        plain_step(nn.Sequential(*plain), [batch for some in data for batch in some], loss_fn)
        return said, difference(stages, plain, "grad")
