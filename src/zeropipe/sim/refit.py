"""Costs of layers corrected by a recorded run.

The run tells what stages took, not layers: so each kind of layer gets a factor, for F, I, W and B apart, with which the
stages come out as measured. Where stages cannot tell kinds apart (a head that is always with the same layers), the
factors are those that change least.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from statistics import median
from typing import Any

from zeropipe.core.action import Kind
from zeropipe.core.timeline import Origin, Timeline
from zeropipe.core.units import count_text
from zeropipe.errors import ConfigError
from zeropipe.sim.costs import Costs
from zeropipe.sim.fit import fit
from zeropipe.sim.layer_costs import SHORT_DTYPES, LayerCost, LayerCosts, Setting

_PULL = 1e-4  # towards a factor of 1, beside errors relative to the measured time
_KINDS = {"f": Kind.F, "i": Kind.I, "w": Kind.W, "b": Kind.B}


def refitted(
    costs: LayerCosts, run: Timeline | Sequence[Timeline], counts: Sequence[int], setting: Setting | None = None,
    ac: str | None = None,
) -> LayerCosts:  # fmt: skip
    """`costs` whose prediction of a run with so many layers in each stage is what was measured.

    Only the setting of the run is corrected, and only what the run had: a schedule without W says nothing about W. Of
    several recorded steps of a schedule the medians count.
    """
    steps = (run,) if isinstance(run, Timeline) else tuple(run)
    measured, chosen = steps[0], setting or costs.settings[0]
    require_steps(steps)
    if len(counts) != measured.schedule.num_stages:
        raise ConfigError(
            f"layers={list(counts)} has {count_text(len(counts), 'entry')}: the run has "
            f"{count_text(measured.schedule.num_stages, 'stage')}"
        )
    if ac is not None and ac != chosen.ac:
        raise ConfigError(f"ac={ac} is made of two settings, which one run cannot correct: record a run with ac none")
    found = [fit(step) for step in steps]
    seen = {span.action.kind for rank in range(measured.num_ranks) for span in measured.spans(rank)}
    names = _names(costs, counts)
    factors = {
        name: _factors(chosen, names, name, _column(found, name, len(counts)))
        for name, kind in _KINDS.items()
        if kind in seen
    }
    kinds = {
        kind: _scaled(layer, {name: by_kind.get(kind, 1.0) for name, by_kind in factors.items()})
        for kind, layer in chosen.kinds.items()
    }
    link = costs.link
    if measured.num_ranks > 1:
        transfer = costs.message(chosen) / link.bandwidth if link.bandwidth else 0.0
        link = link._replace(p2p=max(0.0, median(one.p2p for one in found) - transfer))
    settings = tuple(replace(one, kinds=kinds) if one is chosen else one for one in costs.settings)
    # a run's own time between actions is in the times of all of them
    return replace(costs, settings=settings, link=link, sending=0.0, receiving=0.0)


def setting_of_run(
    costs: LayerCosts, origin: Origin | None, ac: str | None = None, microbatch_size: int | None = None
) -> Setting:
    """The setting that a run had; ConfigError where costs have it not, or it may have been one of several."""
    if origin is not None:
        _require_same_settings(costs, origin)
        return costs.setting(ac=origin.ac, microbatch_size=origin.microbatch_size, tp=origin.tp, compile=origin.compile)
    modes = list(dict.fromkeys(one.ac for one in costs.settings))
    if ac is None and len(modes) > 1:
        raise ConfigError(f"the costs are of ac {' and of ac '.join(modes)}: say with --ac which one the run had")
    return costs.setting(ac=ac, microbatch_size=microbatch_size)


def _require_same_settings(costs: LayerCosts, origin: Origin) -> None:
    """Raise ConfigError if the run has another sequence length or dtype than the costs, or trains an adapter."""
    if origin.lora:
        raise ConfigError("the run trains an adapter (LoRA), costs are for training all weights; use a run without it")
    dtype = SHORT_DTYPES.get(origin.dtype, origin.dtype)
    if dtype != SHORT_DTYPES.get(costs.dtype, costs.dtype):
        raise ConfigError(f"the run has dtype {dtype}, the costs {costs.dtype}; create costs with --dtype {dtype}")
    if origin.sequence and costs.sequence and origin.sequence != costs.sequence:
        raise ConfigError(
            f"the run has sequences of {count_text(origin.sequence, 'token')}, the costs are for "
            f"{count_text(costs.sequence, 'token')}; create costs with --sequence {origin.sequence}"
        )


def require_steps(steps: Sequence[Timeline]) -> None:
    """ConfigError for recorded steps that cannot correct costs: without times in seconds, or of several schedules."""
    for step in steps:
        if step.unit != "s":
            raise ConfigError(f"the run's times are in {step.unit or 'no unit'}: costs of layers are in seconds")
        if step.schedule != steps[0].schedule:
            one, other = (f"{run.schedule.name} ({run.schedule.sizes})" for run in (steps[0], step))
            raise ConfigError(f"steps of {one} and of {other} correct costs one after the other: give those of one")
        if step.origin != steps[0].origin:
            raise ConfigError("these steps are of runs that differ in more than their times: give those of one run")


def _names(costs: LayerCosts, counts: Sequence[int]) -> list[list[str]]:
    """The kinds in each stage."""
    stages, start = [], 0
    for count in counts:
        stages.append([*costs.each, *costs.layers[start : start + count]])
        start += count
    stages[0] += costs.before
    stages[-1] += costs.after
    return stages


def _column(found: Sequence[Costs], name: str, num_stages: int) -> list[float]:
    return [median(times) for times in zip(*(one.column(name, num_stages) for one in found), strict=True)]


def _time(layer: LayerCost, name: str) -> float:
    return layer.whole if name == "b" else float(getattr(layer, name))


def _factors(setting: Setting, stages: list[list[str]], name: str, measured: list[float]) -> dict[str, float]:
    """Least squares of relative errors, pulled a little towards 1."""
    kinds = sorted({kind for stage in stages for kind in stage if _time(setting.kinds[kind], name) > 0})
    rows = []
    for stage, took in zip(stages, measured, strict=True):
        if took > 0:
            rows.append([stage.count(kind) * _time(setting.kinds[kind], name) / took for kind in kinds])
    size = range(len(kinds))
    matrix = [[sum(row[a] * row[b] for row in rows) + (_PULL if a == b else 0.0) for b in size] for a in size]
    right = [sum(row[a] for row in rows) + _PULL for a in size]
    return {kind: max(0.0, factor) for kind, factor in zip(kinds, _solved(matrix, right), strict=True)}


def _solved(matrix: list[list[float]], right: list[float]) -> list[float]:
    """Gauss: the matrix is small, symmetric and positive."""
    rows = [[*row, value] for row, value in zip(matrix, right, strict=True)]
    size = len(rows)
    for at in range(size):
        pivot = max(range(at, size), key=lambda row: abs(rows[row][at]))
        rows[at], rows[pivot] = rows[pivot], rows[at]
        for row in range(size):
            if row != at:
                times = rows[row][at] / rows[at][at]
                rows[row] = [value - times * other for value, other in zip(rows[row], rows[at], strict=True)]
    return [rows[at][size] / rows[at][at] for at in range(size)]


def _scaled(layer: LayerCost, factors: dict[str, float]) -> LayerCost:
    changes: dict[str, Any] = {name: _time(layer, name) * factor for name, factor in factors.items()}
    new = replace(layer, **changes)
    if layer.b is None and "b" not in changes:
        new = replace(new, b=None)
    if layer.overlap is not None:  # a pair saves what it did, relative to its two halves
        apart = layer.f + layer.whole
        new = replace(new, overlap=layer.overlap * (new.f + new.whole) / apart if apart else layer.overlap)
    return new
