"""What the local ranks run in test_mesh_orders.py: pipelines that share stages and do not do the same work."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any
from unittest import mock

import torch
from engine_helpers import WIDTH, SquareLoss, blocks, error_of, hf_plain_step, microbatches, plain_step
from mesh_cases import difference, hf_difference, mesh_of, whole
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

from zeropipe.core.schedule import Schedule
from zeropipe.engine import (
    CausalLMLoss,
    Engine,
    hf_model,
    hf_stages,
    load_checkpoint,
    module_stages,
    parallelize,
    save_checkpoint,
)
from zeropipe.errors import ConfigError, EngineError
from zeropipe.schedules.registry import build
from zeropipe.train.config.tables import RunConfig
from zeropipe.train.loop.optimizer import make_optimizer, reset_groups


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
    seen = {"loss": 0.0, "eval": 0.0, "grad": 0.0, "weight": 0.0}
    given = dict(reversed(stages.items())) if pipeline_of(mesh) else stages  # in whatever order
    with Engine(schedule, given, mesh=mesh, **options) as engine:
        for name, weight in engine.named_weights():
            seen["weight"] = max(seen["weight"], error_of(weight, model.get_parameter(name).detach()))
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


class Odd(nn.Module):
    """A block in float64 with a scalar and with a router in float32, as some models keep theirs."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        (self.block,) = blocks(seed + 1)[seed:]
        generator = torch.Generator().manual_seed(seed)
        self.gain = nn.Parameter(torch.tensor(0.5 + seed / 10, dtype=torch.float64))
        self.router = nn.Linear(WIDTH, WIDTH, dtype=torch.float32)
        self.offset = nn.Parameter(torch.tensor(0.1), requires_grad=False)
        with torch.no_grad():
            for parameter in self.router.parameters():
                parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.3)

    def forward(self, x: Tensor) -> Tensor:
        shares = self.router(x.float()).sigmoid().double()
        return x + self.gain * shares * self.block(x) + self.offset


def train_odd(schedule: Schedule, sizes: dict[str, int], options: dict[str, Any], folder: str) -> dict[str, Any]:
    """Two steps of AdamW of stages with parameters that cannot be sharded, saved and loaded between them."""
    mesh, loss_fn = mesh_of(sizes), SquareLoss()
    number = 2 * schedule.num_stages
    plain = [Odd(seed) for seed in range(number)]
    model = nn.Sequential(*plain)
    theirs = torch.optim.AdamW(model.parameters(), lr=0.01, foreach=False)
    seen = {"loss": 0.0, "norm": 0.0, "float64": 0.0, "float32": 0.0}
    kinds = set()
    for step in range(2):
        copies = [Odd(seed) for seed in range(number)]
        stages: dict[int, Any] = parallelize(dict(module_stages(copies, schedule, rank_of(mesh))), mesh)
        data = [microbatches(4 + pipeline, 10 * step + pipeline) for pipeline in range(mesh.size() // len_pp(mesh))]
        with Engine(schedule, stages, mesh=mesh, **options) as engine:
            ours = torch.optim.AdamW(engine.parameters(), lr=0.01, foreach=False)
            if step:
                load_checkpoint(folder, engine, ours)
            wanted = plain_step(model, [batch for some in data for batch in some], loss_fn)
            result = engine.train_step(data[pipeline_of(mesh)], loss_fn)
            norm = float(torch.nn.utils.get_total_norm([p.grad for p in model.parameters() if p.grad is not None]))
            seen["loss"] = max(seen["loss"], abs(result.loss - wanted) / wanted)
            seen["norm"] = max(seen["norm"], abs(engine.grad_norm() - norm) / norm)
            for module in stages.values():
                for name, parameter in module.named_parameters():
                    index, _, rest = module.full_name(name).partition(".")
                    kind = str(parameter.dtype).removeprefix("torch.")
                    error = error_of(whole(parameter.grad), plain[int(index)].get_parameter(rest).grad)
                    seen[kind] = max(seen[kind], error)
                    kinds.add((rest.rpartition(".")[0] or rest, isinstance(parameter, DTensor)))
            for optimizer in (ours, theirs):
                optimizer.step()
                optimizer.zero_grad()
            if not step:
                save_checkpoint(folder, engine, ours)
    return seen | {"kinds": sorted(kinds)}


def len_pp(mesh: Any) -> int:
    return mesh["pp"].size() if "pp" in mesh.mesh_dim_names else 1


def not_sharded_alike(schedule: Schedule) -> list[str]:
    """What is said of weights in several dtypes in one unit, at set-up and when one thaws; of what FSDP refuses."""
    mesh, said = mesh_of({"dp_shard": 2}), []

    def stages_of() -> dict[int, Any]:
        stages: dict[int, Any] = dict(module_stages(blocks(2), schedule, 0))
        stages[0].blocks[1].scale = nn.Parameter(torch.ones(WIDTH))
        return stages

    def say(work: Any) -> None:
        try:
            work()
        except ConfigError as error:
            said.append(str(error))

    stages = stages_of()
    for unit in (*stages[0].blocks, stages[0]):
        fully_shard(unit, mesh=mesh)
    say(lambda: Engine(schedule, stages, mesh=mesh))
    stages = stages_of()
    stages[0].blocks[1].scale.requires_grad_(False)
    parallelize(stages, mesh)
    with Engine(schedule, stages, mesh=mesh) as engine:
        engine.train_step(microbatches(2), SquareLoss())
        stages[0].blocks[1].scale.requires_grad_(True)
        say(lambda: engine.train_step(microbatches(2), SquareLoss()))
        stages[0].blocks[1].scale.requires_grad_(False)
        engine.train_step(microbatches(2), SquareLoss())
    stages = stages_of()
    stages[0].blocks[0].up.weight = nn.Parameter(torch.ones(WIDTH, 2 * WIDTH, dtype=torch.float64).t())
    say(lambda: parallelize(stages, mesh))
    return said


def train_ernie(schedule: Schedule, options: dict[str, Any]) -> tuple[float, float, set[str]]:
    """A step of ernie4_5_moe in float64, whose routers stay in float32, beside one process; which weights are whole."""
    from transformers import Ernie4_5_MoeConfig

    config = Ernie4_5_MoeConfig(
        hidden_size=32, intermediate_size=48, num_attention_heads=4, num_key_value_heads=2, num_hidden_layers=4,
        vocab_size=64, moe_num_experts=4, moe_k=2, moe_intermediate_size=16, moe_layer_start_index=1,
        moe_num_shared_experts=1, dtype=torch.float64,
    )  # fmt: skip
    config._experts_implementation = "eager"  # torch's grouped products know no float64
    mesh, loss_fn = mesh_of({"pp": 2, "dp_shard": 2}), CausalLMLoss()
    plain = hf_model(config)
    stages = parallelize(hf_stages(config, schedule, rank_of(mesh)), mesh)
    tokens = torch.randint(64, (2, schedule.num_microbatches, 1, 8), generator=torch.Generator().manual_seed(0))
    data = [[{"input_ids": rows, "labels": rows} for rows in some] for some in tokens]
    with Engine(schedule, stages, mesh=mesh, **options) as engine:
        wanted = hf_plain_step(plain, [batch for some in data for batch in some], loss_fn)
        loss = engine.train_step(data[pipeline_of(mesh)], loss_fn).loss
        named = [(name, p) for stage in stages.values() for name, p in stage.named_parameters()]
        whole_ones = {".".join(name.split(".")[-2:]) for name, p in named if not isinstance(p, DTensor)}
        return abs(loss - wanted) / wanted, hf_difference(stages, plain, "grad"), whole_ones


def fused_optimizer(kind: str, fused: str) -> tuple[list[float], float] | str:
    """The trainer's optimizer: the decay of its groups, and how far its step is from torch's; or what it says."""
    mesh, schedule = mesh_of({"dp_shard": 2}), build("1f1b", ranks=1, microbatches=2)
    plain, loss_fn, data = [Odd(0), Odd(1)], SquareLoss(), microbatches(2)
    stages: dict[int, Any] = parallelize(dict(module_stages([Odd(0), Odd(1)], schedule, 0)), mesh)
    table = {"name": kind, "fused": fused, "weight_decay": 0.1, "lr": 0.01}
    config = RunConfig.model_validate({"model": {"path": "none"}, "optimizer": table})
    with Engine(schedule, stages, mesh=mesh) as engine:
        try:
            optimizer = make_optimizer(config, engine, torch.device("cpu"))
        except ConfigError as error:
            return str(error)
        engine.train_step(data, loss_fn)
        optimizer.step()
        for group in optimizer.param_groups:
            group["weight_decay"] = 7.0
        reset_groups(optimizer, config.optimizer)
        plain_step(nn.Sequential(*plain), data + data, loss_fn)
        for parameter in nn.Sequential(*plain).parameters():
            decay = 0.1 if parameter.dim() > 1 else 0.0
            if kind == "adamw":
                torch.optim.AdamW([parameter], lr=0.01, weight_decay=decay, betas=(0.9, 0.95)).step()
            else:
                torch.optim.SGD([parameter], lr=0.01, weight_decay=decay).step()
        return [group["weight_decay"] for group in optimizer.param_groups], difference(stages, plain, "weight")
