"""What the local ranks run in test_engine_float8.py."""

from __future__ import annotations

from typing import Any

import torch
from engine_helpers import error_of
from mesh_cases import mesh_of, whole
from stage_models import CONFIGS
from torch import Tensor

from zeropipe.core.schedule import Schedule
from zeropipe.engine import CausalLMLoss, Engine, hf_model, hf_stages, parallelize
from zeropipe.engine.backward import float8
from zeropipe.engine.float8 import set_float8
from zeropipe.engine.stages.contract import describe_stage
from zeropipe.schedules.registry import build

LOSS = CausalLMLoss()


def tiny(family: str = "qwen3", layers: int = 4) -> Any:
    config = CONFIGS[family](num_hidden_layers=layers, initializer_range=0.05)
    return hf_model(config, dtype=torch.float32, seed=1)


def data_of(pipeline: int, number: int, seed: int = 0) -> list[dict[str, Tensor]]:
    """Rows with 16 losses each: the sum of a step is divided by a power of two, which no rounding depends on."""
    generator = torch.Generator().manual_seed(100 * seed + pipeline)
    rows = [torch.randint(61, (2, 17), generator=generator) for _ in range(number)]
    return [{"input_ids": row, "labels": row} for row in rows]


def plain_gradients(mode: str, batches: list[dict[str, Tensor]]) -> dict[str, Tensor]:
    """Those of all layers in one stage, microbatch after microbatch, with autograd's own sums."""
    (stage,) = hf_stages(tiny(), build("1f1b", ranks=1, microbatches=1), 0).values()
    set_float8(describe_stage(0, stage), mode)
    total = sum(map(LOSS.count, batches))
    for batch in batches:
        (LOSS(stage(**stage.pick(batch)), batch)[0] / total).backward()
    names = stage.full_names()
    return {names[name]: p.grad for name, p in stage.named_parameters()}


def gradient_differences(
    schedule: Schedule, sizes: dict[str, int], mode: str, options: dict[str, Any]
) -> tuple[float, float]:
    """The largest difference of a step's gradients from `plain_gradients`, and of all from those in float32."""
    mesh = mesh_of(sizes)
    rank = mesh["pp"].get_local_rank() if "pp" in sizes else 0
    pipelines = [size for name, size in sizes.items() if name.startswith("dp")]
    mine = mesh[next(name for name in sizes if name.startswith("dp"))].get_local_rank() if pipelines else 0
    data = [data_of(pipeline, schedule.num_microbatches) for pipeline in range(pipelines[0] if pipelines else 1)]
    stages: dict[int, Any] = parallelize(hf_stages(tiny(), schedule, rank), mesh)
    with Engine(schedule, stages, mesh=mesh, float8=mode, fused_head=False, **options) as engine:
        engine.train_step(data[mine], LOSS)
    found = {}
    for stage in stages.values():
        names = stage.full_names()
        found |= {names[name]: whole(p.grad) for name, p in stage.named_parameters()}
    batches = [batch for some in data for batch in some]
    wanted, exact = plain_gradients(mode, batches), plain_gradients("none", batches)
    difference, all_exact = (
        torch.cat([(a[name] - b[name] if b else a[name]).flatten() for name in found])
        for a, b in ((found, exact), (exact, None))
    )
    return max(error_of(found[name], wanted[name]) for name in found), float(difference.norm() / all_exact.norm())


def losses(mode: str, steps: int) -> list[float]:
    """Of training steps in bfloat16 with float32 sums; each token follows from the one before it."""
    from zeropipe.engine import MasterWeights, main_gradients

    schedule = build("zb-h1", ranks=2, microbatches=2)
    mesh = mesh_of({"pp": 2})
    model = hf_model(CONFIGS["qwen3"](num_hidden_layers=2, initializer_range=0.05), dtype=torch.bfloat16, seed=1)
    stages: dict[int, Any] = hf_stages(model, schedule, mesh["pp"].get_local_rank())
    for stage in stages.values():
        main_gradients(stage, torch.float32)
    generator, found = torch.Generator().manual_seed(3), []
    with Engine(schedule, stages, mesh=mesh, float8=mode) as engine:
        optimizer = MasterWeights(torch.optim.AdamW, engine.parameters(), lr=4e-3)
        for _ in range(steps):
            first = torch.randint(61, (2, 4, 1), generator=generator)
            rows = (first + 7 * torch.arange(24)) % 61
            found.append(engine.train_step([{"input_ids": row, "labels": row} for row in rows], LOSS).loss)
            optimizer.step()
            optimizer.zero_grad()
    return found


def count_conversions(options: dict[str, Any]) -> tuple[list[int], int, float]:
    """Conversions of weights in steps of 3 microbatches, weights kept after them, and a change of the loss."""
    schedule = build("zb-h1", ranks=1, microbatches=3)
    stages: dict[int, Any] = parallelize(hf_stages(tiny(), schedule, 0), mesh_of({"dp_shard": 2}))
    convert, calls = float8._convert_weight, []

    def counted(*args: Any) -> Any:
        calls.append(1)
        return convert(*args)

    float8._convert_weight = counted
    counts, values = [], []
    try:
        with Engine(schedule, stages, mesh=mesh_of({"dp_shard": 2}), float8="tensor", **options) as engine:
            for _ in range(2):
                calls.clear()
                values.append(engine.train_step(data_of(0, 3), LOSS).loss)
                counts.append(len(calls))
                for parameter in engine.parameters():
                    parameter.data.mul_(0.5)  # a write that no version counts
    finally:
        float8._convert_weight = convert
    kept = sum(getattr(layer, "copies", None) is not None for layer in stages[0].modules())
    return counts, kept, abs(values[1] - values[0])
