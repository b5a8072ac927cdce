"""What the local ranks run in test_expert_load.py: the rows of experts and the biases that balance them."""

from __future__ import annotations

import math
from functools import partial
from typing import Any
from unittest import mock

import expert_cases
import torch
import torch.distributed as dist
from engine_helpers import hf_plain_step
from expert_cases import error_text, pipeline_index, tokens
from mesh_cases import compare_update, hf_difference, mesh_of
from torch import nn

from zeropipe.core.mesh import DATA_DIMENSIONS
from zeropipe.core.schedule import Schedule
from zeropipe.engine import CausalLMLoss, Engine, ExpertLoads, hf_model, hf_stages, parallelize
from zeropipe.engine.blocks import compiling

RATE = 0.05  # of a score: so that the next step chooses other experts


class PlainCounts:
    """The rows of experts in a plain model, seen at the calls of its experts."""

    def __init__(self, model: nn.Module) -> None:
        self.rows: dict[str, torch.Tensor] = {}
        for name, module in model.named_modules():
            if name.endswith(".experts"):
                module.register_forward_pre_hook(partial(self._count, name))

    def _count(self, name: str, module: Any, args: Any) -> None:
        counted = torch.bincount(args[1].flatten(), minlength=module.num_experts)
        self.rows[name] = self.rows.get(name, 0) + counted

    def take(self) -> dict[str, torch.Tensor]:
        """Those of the first rank, which alone runs the plain model."""
        told = [self.rows]
        if dist.get_world_size() > 1:
            dist.broadcast_object_list(told, 0)
        self.rows = {}
        return told[0]


def biases(model: nn.Module) -> dict[str, torch.Tensor]:
    return {name.removeprefix("lm."): b for name, b in model.named_buffers() if name.endswith("score_correction_bias")}


def train_balanced(
    schedule: Schedule, sizes: dict[str, int], ep: int, kind: str, options: dict[str, Any], steps: int = 3
) -> dict[str, float]:
    """AdamW steps beside one process; the largest differences. `changed`: the rows that another expert got later."""
    config, mesh, loss_fn = expert_cases.config_of(kind, num_hidden_layers=4), mesh_of(sizes), CausalLMLoss()
    plain = hf_model(config)
    counts = PlainCounts(plain)
    stages = hf_stages(config, schedule, mesh["pp"].get_local_rank() if "pp" in sizes else 0)
    parallelize(stages, mesh, ep=ep)
    pipelines, mine = math.prod(sizes.get(name, 1) for name in DATA_DIMENSIONS), pipeline_index(mesh, sizes)
    seen = {"loss": 0.0, "norm": 0.0, "grad": 0.0, "weight": 0.0, "rows": 0.0, "bias": 0.0, "changed": 0.0}
    with (
        mock.patch.object(compiling, "inductor_backend", mock.Mock(return_value="aot_eager")),
        Engine(schedule, stages, mesh=mesh, **options) as engine,
    ):
        loads = ExpertLoads(engine, RATE)
        ours, theirs = (
            torch.optim.AdamW(p, lr=0.01, foreach=False) for p in (engine.parameters(), list(plain.parameters()))
        )
        first: dict[str, torch.Tensor] = {}
        for _ in range(steps):
            every = [tokens(schedule.num_microbatches, pipeline, 0, False) for pipeline in range(pipelines)]
            wanted = hf_plain_step(plain, [batch for some in every for batch in some], loss_fn)
            rows = counts.take()
            seen["loss"] = max(seen["loss"], abs(engine.train_step(every[mine], loss_fn).loss - wanted) / wanted)
            found = loads.take()
            assert found.keys() == rows.keys()
            seen["rows"] += sum(found[name].rows != tuple(rows[name].tolist()) for name in rows)
            compare_update(seen, engine, plain, (ours, theirs), partial(hf_difference, stages, plain))
            loads.balance(found)
            for name, bias in biases(plain).items():
                own = rows[next(layer for layer in rows if layer.startswith(name.rsplit(".", 2)[0]))].double()
                bias += (RATE * torch.sign(own.mean() - own)).to(bias)
            for stage in stages.values():
                for name, bias in biases(stage).items():
                    seen["bias"] = max(seen["bias"], float((bias - biases(plain)[name]).abs().max()))
            first = first or rows
            seen["changed"] = float(sum((rows[name] - first[name]).abs().sum() for name in rows))
            engine.eval_step(every[mine], loss_fn)
            loads.reset()
    return seen


def without_bias(schedule: Schedule) -> str:
    """Why experts without a bias are not balanced by it."""
    stages = hf_stages(expert_cases.config_of("mixtral"), schedule, 0)
    with Engine(schedule, stages) as engine:
        return error_text(lambda: ExpertLoads(engine, RATE))


def without_experts(schedule: Schedule) -> tuple[str, dict[str, Any]]:
    stages = hf_stages(expert_cases.config_of("qwen3"), schedule, 0)
    with Engine(schedule, stages) as engine:
        return error_text(lambda: ExpertLoads(engine, RATE)), ExpertLoads(engine).take()
