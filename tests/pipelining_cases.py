"""What the local ranks run in test_pipelining.py: our schedule classes beside torch's, on stages with equal weights."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from engine_helpers import WIDTH, blocks, error_of
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage
from torch.distributed.pipelining import schedules as torchs

import zeropipe.pipelining as ours

Make = Callable[[int], list[nn.Module]]


def mean_square(output: Tensor, target: Tensor) -> Tensor:
    return (output - target).square().mean()


def draw(rows: int, seed: int) -> tuple[Tensor, Tensor]:
    """A batch and its target."""
    generator = torch.Generator().manual_seed(seed)
    return tuple(torch.randn(rows, 3, WIDTH, generator=generator, dtype=torch.float64) for _ in range(2))  # type: ignore[return-value]


def stages_for(modules: list[nn.Module], numbers: tuple[int, ...], group: Any = None, **more: Any) -> list[Any]:
    """torch's stages around this rank's part of a model."""
    cpu = torch.device("cpu")
    return [PipelineStage(modules[n], n, len(modules), cpu, group=group, **more) for n in numbers]


def one_or_all(kind: type, stages: list[Any]) -> Any:
    return stages[0] if issubclass(kind, torchs.PipelineScheduleSingle) else stages


def feed(schedule: Any, stages: list[Any], x: Tensor, y: Tensor, call: str = "step", **kwargs: Any) -> Any:
    """One step as users write it: the batch where the first stage is, the target where the last one is."""
    losses: list[Tensor] = []
    first, last = any(s.is_first for s in stages), any(s.is_last for s in stages)
    args = (x,) if first else ()
    more = {"target": y, "losses": losses} if last else {}
    output = getattr(schedule, call)(*args, **more, **kwargs)
    assert (output is not None) == last
    return output, losses


def gap(mine: Any, theirs: Any) -> float:
    if theirs is None:
        assert mine is None
        return 0.0
    if isinstance(theirs, list | tuple):
        assert len(mine) == len(theirs)
        return max((gap(a, b) for a, b in zip(mine, theirs)), default=0.0)
    return error_of(mine.detach(), theirs.detach())


def gradients(stages: list[Any]) -> list[Tensor | None]:
    return [p.grad for stage in stages for p in stage.submod.parameters()]


def beside_torch(name: str, microbatches: int, per_rank: int, steps: int = 2, scale_grads: bool = True) -> float:
    """Outputs, losses and gradients of some steps; the largest difference from torch's class of the same name."""
    ranks, rank = dist.get_world_size(), dist.get_rank()
    kind, torch_kind = getattr(ours, name), getattr(torchs, name)
    numbers = kind.stages_of(rank, ranks, ranks * per_rank)
    mine, theirs = (stages_for(blocks(ranks * per_rank), numbers) for _ in range(2))
    schedules = [
        each(one_or_all(each, stages), microbatches, loss_fn=mean_square, scale_grads=scale_grads)
        for each, stages in ((kind, mine), (torch_kind, theirs))
    ]
    worst = 0.0
    for step in range(steps):
        x, y = draw(2 * microbatches, step)
        got, wanted = (feed(schedule, stages, x, y) for schedule, stages in zip(schedules, (mine, theirs)))
        worst = max(worst, gap(got, wanted), gap(gradients(mine), gradients(theirs)))
        assert all(stage.has_backward for stage in mine)
    return worst
