"""Layers from stages: what a recorded step says about a better cut of the model."""

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


class Cut(NamedTuple):
    """Layers per stage, and the makespan predicted for them beside that of the cut that ran."""

    layers: tuple[int, ...]
    makespan: float
    before: float


def better_cut(schedule: Schedule, costs: Costs, layers: Sequence[int]) -> Cut | None:
    """The cut whose slowest rank is fastest, if it is predicted to be faster than `layers`."""
    if len(layers) != schedule.num_stages or not any(layers):
        return None
    found = _layer_costs(costs, layers)
    counts = balance(found, schedule).counts
    now, then = (_makespan(schedule, found, cut, costs) for cut in (layers, counts))
    return Cut(counts, then, now) if then < now else None


def _makespan(schedule: Schedule, layers: LayerCosts, counts: Sequence[int], costs: Costs) -> float:
    found = layers.costs(counts)
    return simulate(schedule, Costs(f=found.f, i=found.i, w=found.w, b=found.b, p2p=costs.p2p)).makespan


def _layer_costs(costs: Costs, layers: Sequence[int]) -> LayerCosts:
    """One kind of layer, and what the first and the last stage take beside theirs."""
    f, i, w, b = (_parts(costs.column(name, len(layers)), layers) for name in ("f", "i", "w", "b"))
    kinds = {kind: LayerCost(f[at], i[at], w[at], b[at]) for at, kind in enumerate((LAYER, FIRST, LAST))}
    return LayerCosts(
        "the run", "profile", (LAYER,) * sum(layers), (Setting(kinds),), before=(FIRST,), after=(LAST,), dtype="float32"
    )


def _parts(column: Sequence[float], layers: Sequence[int]) -> tuple[float, float, float]:
    """The time of a layer, and what is left of the first and the last stage.

    Stages in the middle have nothing but layers. Without them, the stage that is faster per layer says what one takes.
    """
    each = [time / count if count else None for time, count in zip(column, layers, strict=True)]
    inner = [time for time in each[1:-1] if time is not None]
    layer = median(inner) if inner else min(time for time in each if time is not None)
    first, last = (max(0.0, column[at] - layers[at] * layer) for at in (0, -1))
    return layer, first, last if len(column) > 1 else 0.0
