"""What the local ranks run in test_expert_parallel.py: experts divided over processes, beside the plain model."""

from __future__ import annotations

import math
import random
import time
import warnings
from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from typing import Any
from unittest import mock

import checkpoint_cases
import tensor_cases
import torch
import torch.distributed as dist
from engine_helpers import hf_plain_step
from fault_cases import strike
from mesh_cases import compare_update, hf_difference, mesh_of
from torch import nn

from zeropipe.core.mesh import DATA_DIMENSIONS
from zeropipe.core.schedule import Schedule
from zeropipe.engine import CausalLMLoss, Engine, hf_model, hf_stages, parallelize, save_checkpoint
from zeropipe.engine.backward import turns
from zeropipe.engine.backward.experts import find_divided
from zeropipe.engine.backward.gradients import to_local
from zeropipe.engine.blocks import compiling
from zeropipe.engine.step import phase_recorder
from zeropipe.engine.torch_private import comm as torch_comm
from zeropipe.errors import ConfigError
from zeropipe.schedules.registry import build

_MOE = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
_EXTRA: dict[str, dict[str, Any]] = {
    "qwen2_moe": _MOE | {"shared_expert_intermediate_size": 24, "decoder_sparse_step": 1},
    "qwen3_moe": {"mlp_only_layers": []},
    "glm4_moe": {
        "n_routed_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16, "first_k_dense_replace": 1,
        "n_shared_experts": 1, "n_group": 1, "topk_group": 1,
    },
}  # fmt: skip
_ROUTER_LOSS = {"output_router_logits": True, "router_aux_loss_coef": 0.5}
WITH_ROUTER_LOSS = ("qwen3_moe", "mixtral", "qwen2_moe")


def config_of(kind: str, **changes: Any) -> Any:
    """A tiny model of experts in float64, with the loss of its routers if it has one."""
    router = _ROUTER_LOSS if kind in WITH_ROUTER_LOSS else {}
    return tensor_cases.config_of(kind, **{**_EXTRA.get(kind, {}), **router, **changes})


def tokens(number: int, pipeline: int, step: int, equal: bool) -> list[dict[str, Any]]:
    """Microbatches of one pipeline: each has its own lengths; `equal`: all tokens but the first are the same one."""
    generator = torch.Generator().manual_seed(100 * step + pipeline)
    made = []
    for index in range(number):
        shape = (1 + pipeline % 2, (6, 9, 4)[(index + pipeline) % 3])
        ids = torch.randint(tensor_cases.VOCABULARY, shape, generator=generator)
        labels = ids.clone()
        if equal:
            ids[:, 1:] = 5
        labels[0, : 2 + index % 2] = -100
        made.append({"input_ids": ids, "labels": labels})
    return made


def pipeline_index(mesh: Any, sizes: dict[str, int]) -> int:
    """Which of all pipelines this process is in."""
    index = 0
    for name in DATA_DIMENSIONS:
        index = index * sizes.get(name, 1) + (mesh[name].get_local_rank() if name in sizes else 0)
    return index


def train_with_ep(
    schedule: Schedule, sizes: dict[str, int], ep: int, kind: str, options: dict[str, Any], steps: int = 2,
    changes: dict[str, Any] | None = None, equal: bool = False, sequence: bool = False,
) -> dict[str, float]:  # fmt: skip
    """AdamW steps with clipping beside one process: the largest differences.

    `kept`: the experts that this process keeps of a layer. `idle`: how often no row arrived for them.
    """
    config, mesh, loss_fn = config_of(kind, **(changes or {})), mesh_of(sizes), CausalLMLoss()
    plain = hf_model(config)
    stages = hf_stages(config, schedule, mesh["pp"].get_local_rank() if "pp" in sizes else 0)
    parallelize(stages, mesh, ep=ep, sequence_parallel=sequence, dispatch=options.get("dispatch", "expert"))
    options = {name: value for name, value in options.items() if name != "dispatch"}
    pipelines, mine = math.prod(sizes.get(name, 1) for name in DATA_DIMENSIONS), pipeline_index(mesh, sizes)
    seen = {"loss": 0.0, "eval": 0.0, "norm": 0.0, "grad": 0.0, "weight": 0.0, "idle": 0.0}

    def count_idle(module: nn.Module, args: tuple[torch.Tensor, ...]) -> None:
        seen["idle"] += args[0].numel() == 0

    for stack in (stack for stage in stages.values() for stack in find_divided(stage)):
        if hasattr(stack, "act_fn") and not options.get("compile"):  # a compiled graph has no such condition
            stack.act_fn.register_forward_pre_hook(count_idle)
    with Engine(schedule, stages, mesh=mesh, **options) as engine:
        ours, theirs = (
            torch.optim.AdamW(p, lr=0.01, foreach=False) for p in (engine.parameters(), list(plain.parameters()))
        )
        for step in range(steps):
            every = [tokens(schedule.num_microbatches, pipeline, step, equal) for pipeline in range(pipelines)]
            wanted = hf_plain_step(plain, [batch for some in every for batch in some], loss_fn)
            evaluated = engine.eval_step(every[mine], loss_fn).loss
            seen["eval"] = max(seen["eval"], abs(evaluated - wanted) / wanted)
            seen["loss"] = max(seen["loss"], abs(engine.train_step(every[mine], loss_fn).loss - wanted) / wanted)
            compare_update(seen, engine, plain, (ours, theirs), partial(hf_difference, stages, plain))
    return seen | {"kept": max((local_experts(stage) for stage in stages.values()), default=0)}


def train_compiled_with_ep(schedule: Schedule, sizes: dict[str, int], ep: int, backend: Any, *args: Any) -> Any:
    """`train_with_ep` of qwen3_moe with compiled blocks, whose norms and routers compute in the model's own dtype.

    transformers' compute in float32, which inductor rounds in another order, with or without ep.
    """
    from torch._dynamo.utils import counters
    from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeRMSNorm, Qwen3MoeTopKRouter

    def norm(self: Any, x: torch.Tensor) -> torch.Tensor:
        return self.weight * x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.variance_epsilon)

    def route(self: Any, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        logits = nn.functional.linear(x.reshape(-1, self.hidden_dim), self.weight)
        weights, index = torch.topk(logits.softmax(-1), self.top_k, dim=-1)
        return logits, weights / weights.sum(-1, keepdim=True), index

    # a block that falls back to running uncompiled has the right gradients too: it must not pass for compiled
    warnings.filterwarnings("error", message=".*cannot be compiled")
    torch._dynamo.reset()
    counters.clear()
    with (
        mock.patch.object(Qwen3MoeRMSNorm, "forward", norm),
        mock.patch.object(Qwen3MoeTopKRouter, "forward", route),
        mock.patch.object(compiling, "inductor_backend", mock.Mock(return_value=backend)) if backend else nullcontext(),
    ):
        seen = train_with_ep(schedule, sizes, ep, "qwen3_moe", *args)
    graphs, breaks = counters["stats"]["unique_graphs"], sum(counters["graph_break"].values())
    return seen | {"uncompiled": float(graphs == 0), "breaks": breaks}


def random_run(seed: int) -> dict[str, float]:
    """`train_with_ep` of a random case with Overlaps in turns, each process with random delays of its own."""
    chance, delays = random.Random(seed), random.Random(f"{seed} {dist.get_rank()}")
    data = chance.choice(["dp_shard", "dp_replicate"])
    sizes = chance.choice([{"pp": 2, data: 2}, {data: 4}, {"dp_replicate": 2, "dp_shard": 2}])
    name = chance.choice(["dualpipev", "1f1b-overlap", "interleaved-overlap", *(["dualpipe"] if "pp" in sizes else [])])
    schedule = build(name, ranks=sizes.get("pp", 1), microbatches=chance.choice([4, 6]))
    kind = chance.choice(["qwen3_moe", "mixtral", "deepseek_v3", "gpt_oss", "qwen2_moe"])
    changes = {
        "num_hidden_layers": schedule.num_stages + chance.randrange(3),
        "num_experts_per_tok": chance.choice([1, 2]),
    }
    options = {
        "dispatch": chance.choice(["expert", "process"]),
        "overlap": "turns",
        "ac": chance.choice(["none", "full", "selective:op", "selective:2"]),
    }

    def delayed(call: Callable[..., Any]) -> Callable[..., Any]:
        def run(*args: Any) -> Any:
            if delays.random() < 0.3:
                time.sleep(0.005 * delays.random())
            return call(*args)

        return run

    names = ("start_exchange", "finish")
    with mock.patch.multiple(torch_comm, **{name: delayed(getattr(torch_comm, name)) for name in names}):
        return train_with_ep(schedule, sizes, 2, kind, options, 1, changes, chance.random() < 0.3)


def local_experts(stage: nn.Module) -> int:
    """The number of experts in the largest part of a stack that this process has while nothing runs."""
    shards = [p for name, p in stage.named_parameters() if name.endswith("experts.down_proj")]
    return max((len(to_local(shard)) for shard in shards), default=0)


class ExpertModel(checkpoint_cases.Model):
    """A model of experts for chains of checkpoints; `ep` of each layout, by its sizes."""

    def __init__(self, ep: dict[tuple[tuple[str, int], ...], int]) -> None:
        self.tied, self.device, self.loss_fn, self._ep = False, "cpu", CausalLMLoss(), ep
        self.config = tensor_cases.config_of("qwen3_moe")

    def stages(self, schedule: Schedule, rank: int, seed: int, mesh: Any) -> dict[int, Any]:
        sizes = tuple(zip(mesh.mesh_dim_names, mesh.mesh.shape))
        return parallelize(hf_stages(self.config, schedule, rank, seed=seed), mesh, ep=self._ep.get(sizes, 1))


def exported(schedule: Schedule, sizes: dict[str, int], ep: int, kind: str, path: str) -> None:
    """Save a checkpoint with divided experts, which one process may convert."""
    mesh = mesh_of(sizes)
    stages = parallelize(hf_stages(config_of(kind), schedule, mesh["pp"].get_local_rank(), seed=4), mesh, ep=ep)
    with Engine(schedule, stages, mesh=mesh) as engine:
        save_checkpoint(path, engine)


def count_exchanges(schedule: Schedule, options: dict[str, Any]) -> int:
    """The all-to-alls of one training step."""
    return len(list_exchanges(schedule, options))


def list_exchanges(schedule: Schedule, options: dict[str, Any], dispatch: str = "expert") -> list[int]:
    """The numbers of rows that this process passes to the all-to-alls of one training step."""
    mesh, rows = mesh_of({"dp_replicate": 2}), list[int]()
    stages = parallelize(hf_stages(config_of("qwen3_moe"), schedule, 0), mesh, ep=2, dispatch=dispatch)
    data = tokens(schedule.num_microbatches, mesh.get_local_rank(), 0, False)
    start_exchange = torch_comm.start_exchange

    def count(x: torch.Tensor, *args: Any) -> torch.Tensor:
        rows.append(len(x))
        return start_exchange(x, *args)

    with (
        Engine(schedule, stages, mesh=mesh, **options) as engine,
        mock.patch.object(torch_comm, "start_exchange", count),
    ):
        engine.train_step(data, CausalLMLoss())
    return rows


def order_of_exchanges(schedule: Schedule, options: dict[str, Any]) -> str:
    """The all-to-alls of Overlaps in one training step, in the order of their starts.

    `c` for counts and `r` for rows, in capitals those of an F.
    """
    mesh, order = mesh_of({"dp_replicate": 2}), list[str]()
    stages = parallelize(hf_stages(config_of("qwen3_moe"), schedule, 0), mesh, ep=2)
    data = tokens(schedule.num_microbatches, mesh.get_local_rank(), 0, False)
    start_exchange = torch_comm.start_exchange

    def record(x: torch.Tensor, *args: Any) -> torch.Tensor:
        letter = "r" if x.is_floating_point() else "c"
        if turns.running() is not None:
            order.append(letter.upper() if turns.running() == 1 else letter)
        return start_exchange(x, *args)

    recorded = mock.patch.object(torch_comm, "start_exchange", record)
    with Engine(schedule, stages, mesh=mesh, overlap="turns", **options) as engine, recorded:
        engine.train_step(data, CausalLMLoss())
    return "".join(order)


def other_numbers(schedule: Schedule) -> tuple[str, str, float]:
    """Pipelines with other numbers of microbatches, and an Engine without the mesh; then a step that is right."""
    mesh, config = mesh_of({"dp_replicate": 2}), config_of("mixtral")
    stages = parallelize(hf_stages(config, schedule, 0), mesh, ep=2)
    mine = mesh.get_local_rank()
    with Engine(schedule, stages, mesh=mesh) as engine:
        said = error_text(lambda: engine.train_step(tokens(2 + mine, mine, 0, False), CausalLMLoss()))
        loss = engine.train_step(tokens(2, mine, 0, False), CausalLMLoss()).loss
    batches = [batch for pipeline in range(2) for batch in tokens(2, pipeline, 0, False)]
    wanted = hf_plain_step(hf_model(config), batches, CausalLMLoss())
    return said, error_text(lambda: Engine(schedule, stages)), abs(loss - wanted) / wanted


def refused(schedule: Schedule, sizes: dict[str, int], ep: Any, kind: str, spreading: dict[str, Any]) -> str:
    """Why parallelize() refuses."""
    mesh = mesh_of(sizes)
    stages = hf_stages(config_of(kind), schedule, mesh["pp"].get_local_rank() if "pp" in sizes else 0)
    return error_text(lambda: parallelize(stages, mesh, ep=ep, **spreading))


def budgeted(schedule: Schedule) -> str:
    """Why the compiler may not choose what is recomputed."""
    mesh = mesh_of({"dp_replicate": 2})
    stages = parallelize(hf_stages(config_of("mixtral"), schedule, 0), mesh, ep=2)
    return error_text(lambda: Engine(schedule, stages, mesh=mesh, compile=True, ac="memory_budget:0.5"))


def divided_twice(schedule: Schedule) -> str:
    mesh = mesh_of({"dp_replicate": 2})
    stages = parallelize(hf_stages(config_of("mixtral"), schedule, 0), mesh, ep=2)
    return error_text(lambda: parallelize(stages, mesh, ep=2))


def error_text(call: Callable[[], Any]) -> str:
    """The text of a ConfigError."""
    try:
        call()
    except ConfigError as error:
        return str(error)
    raise AssertionError("not refused")


def struck_in_experts(
    schedule: Schedule, kind: str, culprit: int, when: int, timeout: float, inside: str = "F", overlap: str = "streams"
) -> None:
    """Training; the culprit is struck in its `when`-th activation of experts, while others wait for its rows.

    `inside`: in an F, or in a B.
    """
    mesh, rank, left = mesh_of({"pp": 2, "dp_shard": 2}), dist.get_rank(), when
    stages = parallelize(hf_stages(config_of("mixtral"), schedule, mesh["pp"].get_local_rank()), mesh, ep=2)

    def point(*_: Any) -> None:
        nonlocal left
        left -= 1
        if left == 0 and rank == culprit:
            strike(kind)

    def point_in_backward(module: nn.Module, args: Any, output: torch.Tensor) -> None:
        if output.requires_grad:
            output.register_hook(point)

    for stage in stages.values():
        for stack in find_divided(stage):
            stack.act_fn.register_forward_hook(point if inside == "F" else point_in_backward)
    with Engine(schedule, stages, mesh=mesh, timeout=timeout, overlap=overlap) as engine:
        for step in range(10**6):
            data = tokens(schedule.num_microbatches, mesh["dp_shard"].get_local_rank(), step, False)
            engine.train_step(data, CausalLMLoss())


def recorded_with_ep(schedule: Schedule, sizes: dict[str, int], options: dict[str, Any]) -> Any:
    """The timeline of a recorded step, after one that is not."""
    mesh = mesh_of(sizes)
    stages = hf_stages(config_of("qwen3_moe"), schedule, mesh["pp"].get_local_rank() if "pp" in sizes else 0)
    parallelize(stages, mesh, ep=2)
    data = tokens(schedule.num_microbatches, pipeline_index(mesh, sizes), 0, False)
    with Engine(schedule, stages, mesh=mesh, record=True, **options) as engine:
        engine.train_step(data, CausalLMLoss())
        engine.train_step(data, CausalLMLoss())
        return engine.timeline()


def recorded_without_ep(schedule: Schedule) -> Any:
    """The timeline of a recorded step of experts that are not divided, which times no exchange."""
    stages = hf_stages(config_of("qwen3_moe"), schedule, 0)
    with (
        mock.patch.object(phase_recorder, "mark_time", side_effect=AssertionError),
        Engine(schedule, stages, record=True) as engine,
    ):
        engine.train_step(tokens(schedule.num_microbatches, 0, 0, False), CausalLMLoss())
        return engine.timeline()
