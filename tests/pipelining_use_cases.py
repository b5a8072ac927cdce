"""What the local ranks run in test_pipelining_use.py: sharded stages, options, timelines, torch's names rebound."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from engine_helpers import blocks
from mesh_cases import mesh_of, whole
from pipelining_cases import draw, feed, gap, gradients, mean_square, one_or_all, plain_step, stages_for
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.pipelining import schedules as torchs
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

import zeropipe.pipelining as ours


class Stage(nn.Module):
    """Two blocks in a list, as models have them."""

    def __init__(self, number: int, of: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(blocks(2 * of)[2 * number : 2 * number + 2])

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return x


def sharded(name: str, per_rank: int, summing: bool, beside: bool) -> float:
    """Stages under FSDP2 on 2 x 2 ranks, each pipeline with its own rows, against the plain model.

    `beside`: torch's class, too. Its zero-bubble schedules leave parameters of sharded stages without a gradient.
    """
    mesh = mesh_of({"pp": 2, "dp_shard": 2})
    rank, group, number, results = mesh["pp"].get_local_rank(), mesh["pp"].get_group(), 2 * per_rank, []
    numbers = getattr(ours, name).stages_of(rank, 2, number)
    for kind in (getattr(ours, name), getattr(torchs, name))[: 2 if beside else 1]:
        modules = [Stage(n, number) for n in range(number)]
        for module in modules:
            for layer in module.layers:
                fully_shard(layer, mesh=mesh["dp_shard"])
            fully_shard(module, mesh=mesh["dp_shard"])
            for unit in (*module.layers, module):
                unit.set_force_sum_reduction_for_comms(True)  # gloo has no scaled sums
                if summing:
                    unit.set_gradient_divide_factor(1.0)
        stages = stages_for(modules, numbers, group)
        schedule = kind(one_or_all(kind, stages), 4, loss_fn=mean_square)
        x, y = draw(8, mesh["dp_shard"].get_local_rank())
        got = feed(schedule, stages, x, y)
        results.append([whole(gradient) for gradient in gradients(stages)])
        if kind is getattr(ours, name):
            output, _ = feed(schedule, stages, x, y, "eval")
            assert output is None or gap(output, got[0]) < 1e-12
            assert all(torch.equal(whole(a), b) for a, b in zip(gradients(stages), results[0]))
    plain = [Stage(n, number) for n in range(number)]
    for pipeline in range(2):
        plain_step(plain, *draw(8, pipeline), 4)
    wanted = [p.grad if summing else p.grad / 2 for n in numbers for p in plain[n].parameters()]
    return max(gap(each, wanted) for each in results)


def tensor_parallel(name: str, per_rank: int) -> float:
    """Stages that torch's own tensor parallelism has spread, beside the plain model."""
    mesh = mesh_of({"pp": 2, "tp": 2})
    rank, group, number = mesh["pp"].get_local_rank(), mesh["pp"].get_group(), 2 * per_rank
    modules = blocks(number)
    for module in modules:
        parallelize_module(module, mesh["tp"], {"up": ColwiseParallel(), "down": RowwiseParallel()})
    kind = getattr(ours, name)
    stages = stages_for(modules, kind.stages_of(rank, 2, number), group)
    x, y = draw(8, 0)
    plain = blocks(number)
    wanted = plain_step(plain, x, y, 4)
    got = feed(kind(one_or_all(kind, stages), 4, loss_fn=mean_square), stages, x, y)
    theirs = [p.grad for stage in stages for p in plain[stage.stage_index].parameters()]
    worst = gap([whole(gradient) for gradient in gradients(stages)], theirs)
    return max(worst, gap(got, wanted)) if stages[-1].is_last else worst


def configured(options: dict[str, Any]) -> dict[str, Any]:
    """A step under options of the engine, beside the plain model; whether blocks were changed."""
    ranks, rank = dist.get_world_size(), dist.get_rank()
    number = 2 * ranks
    numbers = ours.ScheduleZBVZeroBubble.stages_of(rank, ranks, number)
    stages = stages_for([Stage(n, number) for n in range(number)], numbers)
    kinds = {type(layer) for stage in stages for layer in stage.submod.layers}
    x, y = draw(8, 0)
    ours.configure(**options)
    try:
        schedule = ours.ScheduleZBVZeroBubble(stages, 4, loss_fn=mean_square)
        feed(schedule, stages, x, y)
    finally:
        ours.configure()
    changed = kinds != {type(layer) for stage in stages for layer in stage.submod.layers}
    plain = [Stage(n, number) for n in range(number)]
    plain_step(plain, x, y, 4)
    seen = gap(gradients(stages), [p.grad for n in numbers for p in plain[n].parameters()])
    return {"seen": seen, "changed": changed}


def recorded() -> bool:
    """The timeline of a step is that of the schedule that ran."""
    ranks, rank = dist.get_world_size(), dist.get_rank()
    stages = stages_for(blocks(ranks), (rank,))
    x, y = draw(8, 0)
    ours.configure(record=True)
    try:
        schedule = ours.Schedule1F1B(stages[0], 4, loss_fn=mean_square)
        feed(schedule, stages, x, y)
        timeline = schedule.timeline()
    finally:
        ours.configure()
    assert timeline.makespan > 0
    return timeline.schedule == schedule.schedule


def rebound() -> list[str]:
    """The classes that a program with torch's imports gets, before, while and after install()."""
    import torch.distributed.pipelining as theirs

    def homes() -> str:
        found = [theirs.ScheduleGPipe, torchs.get_schedule_class("zbvzerobubble"), torchs._PipelineScheduleRuntime]
        return " ".join(kind.__module__.split(".")[0] for kind in found)

    seen = [homes()]
    ours.install()
    ours.install()
    try:
        seen.append(homes())
        ranks, rank = dist.get_world_size(), dist.get_rank()
        stages = stages_for(blocks(ranks), (rank,))
        schedule = theirs.ScheduleGPipe(stages[0], 2, loss_fn=mean_square)
        feed(schedule, stages, *draw(4, 0))
        seen.append(type(schedule).__module__.split(".")[0])
    finally:
        ours.uninstall()
    return [*seen, homes()]
