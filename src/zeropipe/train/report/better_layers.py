"""Layers of each stage that are predicted to be faster, from the costs of stages in a recorded step."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import median
from typing import NamedTuple

from zeropipe.balancing.balance import balance
from zeropipe.core.schedule import Schedule
from zeropipe.sim.costs import Costs
from zeropipe.sim.layer_costs import LayerCost, LayerCosts, Setting
from zeropipe.sim.simulate import simulate

LAYER, FIRST, LAST = "layer", "embedding", "head"


class BetterLayers(NamedTuple):
    """Layers of each stage, their predicted makespan, and that of the layers that ran."""

    layers: tuple[int, ...]
    makespan: float
    current: float


def find_better_layers(schedule: Schedule, costs: Costs, layers: Sequence[int]) -> BetterLayers | None:
    """Balance the layers, which minimizes the time of the slowest rank. None if that is not predicted to be faster."""
    if len(layers) != schedule.num_stages or not any(layers):
        return None
    layer_costs = _split_stage_costs(costs, layers)
    counts = balance(layer_costs, schedule).counts
    current, balanced = (_makespan(schedule, layer_costs, cut, costs) for cut in (layers, counts))
    return BetterLayers(counts, balanced, current) if balanced < current else None


def _makespan(schedule: Schedule, layer_costs: LayerCosts, counts: Sequence[int], costs: Costs) -> float:
    found = layer_costs.costs(counts)
    return simulate(schedule, Costs(f=found.f, i=found.i, w=found.w, b=found.b, p2p=costs.p2p)).makespan


def _split_stage_costs(costs: Costs, layers: Sequence[int]) -> LayerCosts:
    """Costs of one kind of layer, of the embedding in the first stage and of the head in the last."""
    f, i, w, b = (_split_times(costs.column(name, len(layers)), layers) for name in ("f", "i", "w", "b"))
    kinds = {kind: LayerCost(f[n], i[n], w[n], b[n]) for n, kind in enumerate((LAYER, FIRST, LAST))}
    return LayerCosts(
        "the run", "profile", (LAYER,) * sum(layers), (Setting(kinds),), before=(FIRST,), after=(LAST,), dtype="float32"
    )


def _split_times(times: Sequence[float], layers: Sequence[int]) -> tuple[float, float, float]:
    """The time of a layer, and the remaining times of the first and the last stage.

    Stages in the middle have only layers. Without such stages, the one that is faster per layer gives its time.
    """
    per_layer = [time / count if count else None for time, count in zip(times, layers, strict=True)]
    inner = [time for time in per_layer[1:-1] if time is not None]
    layer = median(inner) if inner else min(time for time in per_layer if time is not None)
    first, last = (max(0.0, times[stage] - layers[stage] * layer) for stage in (0, -1))
    return layer, first, last if len(times) > 1 else 0.0
