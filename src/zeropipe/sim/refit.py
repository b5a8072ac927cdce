"""Costs of layers corrected by a recorded run.

The run has the times of stages, not of layers. So each kind of layer gets a factor, separately for F, I, W and B, such
that the times of the stages are those measured. Where stages do not determine the factors of single kinds (a head that
is always with the same layers), the factors closest to 1 are chosen.
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
from zeropipe.sim.fit import fit
from zeropipe.sim.layer_costs import DTYPE_NAMES, LayerCost, LayerCosts, Setting

_REGULARIZATION = 1e-4  # weight of (factor - 1)², against squared errors relative to the measured time
_KINDS = {"f": Kind.F, "i": Kind.I, "w": Kind.W, "b": Kind.B}


def refit(
    costs: LayerCosts, run: Timeline | Sequence[Timeline], counts: Sequence[int], setting: Setting | None = None,
    ac: str | None = None,
) -> LayerCosts:  # fmt: skip
    """`costs` that predict the measured times of a run with `counts` layers in its stages.

    Only the run's setting is corrected, and only the kinds of its actions: a schedule without W does not change W. Of
    several recorded steps of a schedule the medians are used.
    """
    steps = (run,) if isinstance(run, Timeline) else tuple(run)
    measured, chosen = steps[0], setting or costs.settings[0]
    require_same_run(steps)
    if len(counts) != measured.schedule.num_stages:
        raise ConfigError(
            f"layers={list(counts)} has {count_text(len(counts), 'entry')}: the run has "
            f"{count_text(measured.schedule.num_stages, 'stage')}"
        )
    if ac is not None and ac != chosen.ac:
        raise ConfigError(f"ac={ac} combines two settings, which one run cannot correct; record a run with ac none")
    fitted = [fit(step) for step in steps]
    present = {span.action.kind for rank in range(measured.num_ranks) for span in measured.spans(rank)}
    stages = [[kind for kind, _ in stage] for stage in costs.for_schedule(measured.schedule).stage_kinds(counts)]
    factors = {}
    for name, kind in _KINDS.items():
        if kind in present:
            columns = (one.column(name, len(counts)) for one in fitted)
            times = [median(column) for column in zip(*columns, strict=True)]
            factors[name] = _fit_factors(chosen, stages, name, times)
    kinds = {
        kind: _scale(layer, {name: by_kind.get(kind, 1.0) for name, by_kind in factors.items()})
        for kind, layer in chosen.kinds.items()
    }
    link = costs.link
    if measured.num_ranks > 1:
        transfer = costs.message_bytes(chosen) / link.bandwidth if link.bandwidth else 0.0
        link = link._replace(p2p=max(0.0, median(one.p2p for one in fitted) - transfer))
    settings = tuple(replace(one, kinds=kinds) if one is chosen else one for one in costs.settings)
    # the times of actions include the run's own time between them
    return replace(costs, settings=settings, link=link, sending=0.0, receiving=0.0)


def find_run_setting(
    costs: LayerCosts, origin: Origin | None, ac: str | None = None, microbatch_size: int | None = None
) -> Setting:
    """The setting of a run; ConfigError if the costs do not have it, or if it may be one of several."""
    if origin is not None:
        _require_same_origin(costs, origin)
        return costs.setting(
            ac=origin.ac, microbatch_size=origin.microbatch_size, tp=origin.tp, compile=origin.compile,
            sequence_parallel=origin.sequence_parallel,
        )  # fmt: skip
    modes = list(dict.fromkeys(one.ac for one in costs.settings))
    if ac is None and len(modes) > 1:
        raise ConfigError(f"the costs are of ac {' and of ac '.join(modes)}; set the one of the run with --ac")
    return costs.setting(ac=ac, microbatch_size=microbatch_size)


def _require_same_origin(costs: LayerCosts, origin: Origin) -> None:
    """ConfigError for costs of another sequence length or precision than the run."""
    if costs.lora_rank is not None and not origin.lora:
        raise ConfigError(
            "the run trains all weights, costs are for training an adapter (LoRA); create costs without --lora"
        )
    if origin.lora and costs.lora_rank is None:
        raise ConfigError(
            "the run trains an adapter (LoRA), costs are for training all weights; create costs with `zeropipe "
            "estimate --lora`, or record a run without one"
        )
    dtype = DTYPE_NAMES.get(origin.dtype, origin.dtype)
    if dtype != DTYPE_NAMES.get(costs.dtype, costs.dtype):
        raise ConfigError(f"the run has dtype {dtype}, the costs {costs.dtype}; create costs with --dtype {dtype}")
    if origin.sequence and costs.sequence and origin.sequence != costs.sequence:
        raise ConfigError(
            f"the run has sequences of {count_text(origin.sequence, 'token')}, the costs are for "
            f"{count_text(costs.sequence, 'token')}; create costs with --sequence {origin.sequence}"
        )


def require_same_run(steps: Sequence[Timeline]) -> None:
    """ConfigError for recorded steps that cannot correct costs: without times in seconds, or of different runs."""
    for step in steps:
        if step.unit != "s":
            raise ConfigError(f"the run's times are in {step.unit or 'no unit'}: costs of layers are in seconds")
        if step.schedule != steps[0].schedule:
            one, other = (f"{run.schedule.name} ({run.schedule.sizes})" for run in (steps[0], step))
            raise ConfigError(f"there are steps of {one} and of {other}: must be of one schedule")
        if step.origin != steps[0].origin:
            raise ConfigError("these steps are of runs with different settings: must be of one run")


def _time(layer: LayerCost, name: str) -> float:
    return layer.full_backward if name == "b" else float(getattr(layer, name))


def _fit_factors(setting: Setting, stages: list[list[str]], name: str, measured: list[float]) -> dict[str, float]:
    """The factor of each kind: least squares of relative errors, regularized towards 1."""
    import numpy as np

    kinds = sorted({kind for stage in stages for kind in stage if _time(setting.kinds[kind], name) > 0})
    rows = [
        [stage.count(kind) * _time(setting.kinds[kind], name) / time for kind in kinds]
        for stage, time in zip(stages, measured, strict=True)
        if time > 0
    ]
    matrix = np.array(rows).reshape(len(rows), len(kinds))
    normal = matrix.T @ matrix + _REGULARIZATION * np.eye(len(kinds))
    factors = np.linalg.solve(normal, matrix.sum(axis=0) + _REGULARIZATION)
    return {kind: max(0.0, float(factor)) for kind, factor in zip(kinds, factors, strict=True)}


def _scale(layer: LayerCost, factors: dict[str, float]) -> LayerCost:
    changes: dict[str, Any] = {name: _time(layer, name) * factor for name, factor in factors.items()}
    scaled = replace(layer, **changes)
    if layer.b is None and "b" not in changes:
        scaled = replace(scaled, b=None)
    if layer.overlap is not None:  # an Overlap saves the same fraction of its two halves
        before, after = layer.f + layer.full_backward, scaled.f + scaled.full_backward
        scaled = replace(scaled, overlap=layer.overlap * after / before if before else layer.overlap)
    return scaled
