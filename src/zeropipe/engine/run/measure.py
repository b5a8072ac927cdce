"""Run a schedule and record its steps, for `zeropipe run` and benchmarks."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from zeropipe.core.schedule import Schedule
from zeropipe.core.timeline import Timeline
from zeropipe.engine.engine import Engine
from zeropipe.engine.stages.contract import Microbatch
from zeropipe.engine.step.losses import LossFn


@dataclass(frozen=True)
class Measured:
    """A run: the timeline of the step with the median makespan, and every recorded step's loss and makespan."""

    timeline: Timeline
    losses: tuple[float, ...]
    makespans: tuple[float, ...]


def measure(
    schedule: Schedule,
    stages: Mapping[int, nn.Module],
    microbatches: Callable[[int], Sequence[Microbatch]],
    loss_fn: LossFn,
    *,
    steps: int = 3,
    on_step: Callable[[int, float, float], None] | None = None,
    **options: Any,
) -> Measured:
    """Train one warm-up step and `steps` recorded ones; every rank calls it and gets the same result.

    `microbatches(step)` returns a step's data; step 0 is the warm-up. `on_step(step, loss, seconds)` is called after
    each step. `options` are passed to Engine.
    """
    losses, timelines = [], []
    with Engine(schedule, stages, record=True, **options) as engine:
        # a rank whose stages have no layers has nothing to train
        optimizer = torch.optim.AdamW(engine.parameters() or [torch.zeros(1)], lr=1e-3)
        for step in range(steps + 1):
            loss = engine.train_step(microbatches(step), loss_fn).loss
            optimizer.step()
            optimizer.zero_grad()
            timeline = engine.timeline()
            if on_step is not None:
                on_step(step, loss, timeline.makespan)
            if step:
                losses.append(loss)
                timelines.append(timeline)
    median = sorted(timelines, key=lambda t: t.makespan)[len(timelines) // 2]
    return Measured(median, tuple(losses), tuple(t.makespan for t in timelines))
