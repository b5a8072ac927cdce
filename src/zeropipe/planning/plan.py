"""`zp.plan`: what to run for a model, GPUs, memory and a batch; how fast it is, and how far from the lower bound."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from math import inf
from time import monotonic
from typing import Any, NamedTuple

from zeropipe.core.model.positions import require_positions
from zeropipe.core.units import count_text
from zeropipe.core.workers import count_cores
from zeropipe.errors import ConfigError, require_positive_integers, short
from zeropipe.estimating.counted import CountedModel
from zeropipe.estimating.estimate import estimate
from zeropipe.estimating.gpus import find_gpu
from zeropipe.estimating.model import Model, ShapedModel, open_model
from zeropipe.estimating.shapes import read_config
from zeropipe.planning.candidates import (
    Variant,
    drop_too_large,
    group_by_schedule,
    list_candidates,
    list_runs,
    list_variants,
)
from zeropipe.planning.context import RESERVE, PlanContext
from zeropipe.planning.layouts import Layout, list_layouts, max_stages
from zeropipe.planning.pool import score_groups
from zeropipe.planning.refine import add_gaps, search_best_runs
from zeropipe.planning.result import Plan
from zeropipe.planning.rows import Candidate, PlanRow, Run
from zeropipe.schedules.registry import entries
from zeropipe.searching.search import require_callbacks, require_seconds
from zeropipe.sim.layer_costs import LayerCosts

DEFAULT_MODES = ("none", "selective:op", "full")
DEFAULT_MICROBATCH_SIZES = (1, 2, 4)
MAX_CANDIDATES = 4000  # that are simulated: those with the least work
NUM_ROWS_WITH_GAP = 12


def plan(
    model: str | Mapping[str, Any] | ShapedModel | CountedModel | LayerCosts,
    *,
    gpus: int,
    batch: int,
    gpus_per_node: int = 8,
    memory: float | None = None,
    reserve: float = RESERVE,
    gpu: str = "h100",
    sequence: int = 4096,
    dtype: str = "bf16",
    compile: bool = True,
    efficiency: dict[str, Any] | None = None,
    pp: int | Sequence[int] | None = None,
    tp: int | Sequence[int] | None = None,
    microbatch_sizes: int | Sequence[int] | None = None,
    ac: str | Sequence[str] | None = None,
    schedules: str | Sequence[str] | None = None,
    search_seconds: float = 10.0,
    search_steps: int | None = None,
    max_candidates: int = MAX_CANDIDATES,
    workers: int | None = None,
    progress: Callable[[str, float], object] | None = None,
) -> Plan:
    """Try layouts, schedules, microbatch sizes, checkpointing modes and cuts, and rank those that fit.

    `model` is an argument of `zp.estimate` (which then gets `gpu`, `sequence`, `dtype`, `compile` and `efficiency`), or
    LayerCosts. `batch` is the number of sequences per step, over all GPUs. `memory` is that of a GPU in bytes, of which
    `reserve` is not used. The default is to try all pipeline and tensor-parallel sizes, microbatches of 1, 2 and 4
    sequences, ac `none`, `selective:op` and `full` (or the settings of LayerCosts), and all built-in schedules. Then
    `zp.search` runs for the best rows, for `search_seconds` in all or with `search_steps` each. At most
    `max_candidates` are simulated, those with the least work. `progress` gets a description and the completed fraction.
    """
    begin, report = monotonic(), progress or (lambda text, fraction: None)
    require_callbacks(progress, workers)
    require_positive_integers(gpus=gpus, batch=batch, gpus_per_node=gpus_per_node, max_candidates=max_candidates)
    require_seconds("search_seconds", search_seconds, "; 0 for no search")
    if search_steps is not None and (search_seconds == 0 or schedules is not None):
        reason = "schedules=" if search_seconds else "search_seconds=0"
        raise ConfigError(
            f"search_steps={short(search_steps)}: nothing is searched with {reason}; leave one of them out"
        )
    pp_sizes, tp_sizes = _parse_integers("pp", pp), _parse_integers("tp", tp)
    sizes, modes = _parse_integers("microbatch_sizes", microbatch_sizes), _parse_names("ac", ac)
    names = _parse_names("schedules", schedules)
    if isinstance(model, LayerCosts):
        costs, space = model, _find_settings(model, tp_sizes, sizes, modes)
    else:
        opened = open_model(model)
        if isinstance(model, str | Mapping):
            require_positions(read_config(model)[1], sequence, "sequence")
        space = SearchSpace(
            tp_sizes or _default_tp_sizes(opened, gpus, gpus_per_node),
            sizes or list(DEFAULT_MICROBATCH_SIZES),
            modes or list(DEFAULT_MODES),
        )
        costs = estimate(
            opened, gpu=gpu, sequence=sequence, dtype=dtype, compile=compile, efficiency=efficiency,
            tp=space.tp, microbatch_size=space.microbatch_sizes,
            ac=[*space.ac, *({"none"} - set(space.ac))],  # "none" tells how much of the others is recomputation
        )  # fmt: skip
        memory = find_gpu(gpu).memory if memory is None else memory
    context = PlanContext.create(costs, gpus_per_node, _usable_memory(costs, memory, reserve))
    runs, oversized = drop_too_large(context, _list_runs(context, gpus, batch, pp_sizes, space))
    candidates = _list_candidates(context, runs, names)
    rows = _score(context, candidates[:max_candidates], workers, lambda done: report("trying schedules", 0.8 * done))
    num_tried = len({row.candidate for row in rows})
    if search_seconds > 0 and schedules is None:
        rows += search_best_runs(
            context, _rank(rows), search_seconds, search_steps, lambda done: report("searching", 0.8 + 0.15 * done)
        )
    ranked = add_gaps(context, _rank(rows), NUM_ROWS_WITH_GAP)
    report("done", 1.0)
    return Plan(
        tuple(ranked), _find_misfits(rows), tuple(oversized), context, gpus, batch, num_tried,
        max(0, len(candidates) - max_candidates), monotonic() - begin,
    )  # fmt: skip


class SearchSpace(NamedTuple):
    """The settings of layers to try."""

    tp: list[int]
    microbatch_sizes: list[int]
    ac: list[str]


def _find_settings(
    costs: LayerCosts, tp_sizes: list[int] | None, sizes: list[int] | None, modes: list[str] | None
) -> SearchSpace:
    """The requested settings, by default all of `costs`; ConfigError for one that they do not have."""
    for tp in tp_sizes or ():
        costs.setting(tp=tp)
    for size in sizes or ():
        costs.setting(microbatch_size=size)
    for mode in modes or ():
        costs.setting(ac=mode)
    return SearchSpace(
        sorted(set(tp_sizes or (setting.tp for setting in costs.settings))),
        sizes or sorted({setting.microbatch_size for setting in costs.settings}),
        modes or list(dict.fromkeys(setting.ac for setting in costs.settings)),
    )


def _default_tp_sizes(model: Model, gpus: int, gpus_per_node: int) -> list[int]:
    """The powers of two that divide the GPUs and the model."""
    powers = [2**n for n in range(5)]
    return [n for n in powers if n <= min(gpus_per_node, gpus) and gpus % n == 0 and model.allows_tp(n)]


def _usable_memory(costs: LayerCosts, memory: float | None, reserve: float) -> float:
    """Bytes of a GPU that a candidate may use."""
    memory = costs.machine.get("memory") if memory is None else memory
    if isinstance(reserve, bool) or not isinstance(reserve, (int, float)) or not reserve >= 0:
        raise ConfigError(f"reserve={short(reserve)}: must be a non-negative number of bytes")
    if memory is None:
        raise ConfigError("memory is missing: the costs do not have the memory of a GPU; pass it, like 80GB")
    if isinstance(memory, bool) or not isinstance(memory, (int, float)) or not memory > reserve:
        raise ConfigError(
            f"memory={short(memory)}: must be a number of bytes above the reserve of {reserve / 1e9:g} GB, like 80GB; "
            "or pass a smaller reserve"
        )
    return memory - reserve


def _list_runs(
    context: PlanContext, gpus: int, batch: int, pp_sizes: Sequence[int] | None, space: SearchSpace
) -> list[Run]:
    """Every run in the search space; ConfigError if there is none."""
    num_layers = context.costs.num_layers
    every = list_layouts(gpus, context.gpus_per_node, space.tp, num_layers)
    layouts = [layout for layout in every if pp_sizes is None or layout.pp in pp_sizes]
    if not layouts:
        possible = _join(sorted({layout.pp for layout in every}))
        raise ConfigError(
            f"pp={_join(pp_sizes or ())}: no layout of {gpus} GPUs and {num_layers} layers has that many pipeline "
            f"ranks; use one of {possible}"
        )
    runs = list_runs(context, batch, layouts, space.microbatch_sizes, space.ac)
    if not runs:
        raise _explain_no_runs(batch, gpus, layouts, space.microbatch_sizes)
    return runs


def _explain_no_runs(batch: int, gpus: int, layouts: Sequence[Layout], sizes: Sequence[int]) -> ConfigError:
    if any(batch % (layout.dp_shard * size) == 0 for layout in layouts for size in sizes):
        return ConfigError(
            f"batch={batch}: too many microbatches of {_join(sizes)} to simulate; use a smaller batch or larger "
            "microbatches"
        )
    return ConfigError(
        f"batch={batch}: cannot be divided over {gpus} GPUs in microbatches of {_join(sizes)}; use a multiple of them, "
        "or other microbatch_sizes"
    )


def _list_candidates(context: PlanContext, runs: Sequence[Run], names: Sequence[str] | None) -> list[Candidate]:
    """Every candidate of the runs; ConfigError if all schedules have too many stages."""
    costs = context.costs
    has_overlap_costs = any(kind.overlap is not None for setting in costs.settings for kind in setting.kinds.values())
    variants = list_variants(names, has_overlap_costs)
    candidates = list_candidates(runs, variants, costs.num_layers)
    if runs and not candidates:
        raise _explain_too_many_stages(runs, variants, costs.num_layers)
    return candidates


def _explain_too_many_stages(runs: Sequence[Run], variants: Sequence[Variant], num_layers: int) -> ConfigError:
    pp, (name, per_rank) = min(run.layout.pp for run in runs), min(variants, key=lambda variant: variant[1])
    return ConfigError(
        f"schedules={name}: {pp} pipeline ranks with {count_text(per_rank, 'stage')} each are {pp * per_rank} stages, "
        f"and {num_layers} layers fill {max_stages(num_layers)} at most; use fewer pipeline ranks or other schedules"
    )


def _score(
    context: PlanContext, candidates: Sequence[Candidate], workers: int | None, progress: Callable[[float], object]
) -> list[PlanRow]:
    groups = group_by_schedule(candidates)
    built_in = {entry.name for entry in entries() if entry.is_ours}
    if any(candidate.schedule not in built_in for candidate in candidates):
        workers = 1  # a user's schedule is not registered in other processes
    rows = score_groups(context, groups, workers or count_cores(), lambda done: progress(done / len(groups)))
    if candidates and not any(rows):
        candidates[0].build_schedule()  # raises the reason
    return [row for group in rows for row in group]


def _rank(rows: Sequence[PlanRow]) -> list[PlanRow]:
    """The rows that fit, the fastest first, then the smallest; of a candidate's other cuts only smaller ones."""
    found: list[PlanRow] = []
    smallest: dict[Candidate, float] = {}
    for row in sorted(rows, key=lambda row: (row.step, row.memory.peak, row.candidate)):
        key = replace(row.candidate, cut="")
        if row.memory.peak < smallest.get(key, inf) * (1 - 1e-9):
            smallest[key] = row.memory.peak
            found.append(row)
    return [row for row in found if row.fits]


def _find_misfits(rows: Sequence[PlanRow]) -> tuple[PlanRow, ...]:
    """The cut of each candidate that comes closest to fitting, if none fits; the closest first."""
    closest: dict[Candidate, PlanRow] = {}
    for row in rows:
        key = replace(row.candidate, cut="")
        if key not in closest or row.excess < closest[key].excess:
            closest[key] = row
    return tuple(sorted((row for row in closest.values() if not row.fits), key=lambda row: row.excess))


def _parse_integers(name: str, value: int | Sequence[int] | None) -> list[int] | None:
    """One positive integer or several, as a list."""
    if value is None:
        return None
    values = list(value) if isinstance(value, Iterable) else [value]
    if not values or any(type(item) is not int or item < 1 for item in values):
        raise ConfigError(f"{name}={short(value)}: must be a positive integer or a list of them, like 4 or [2, 4]")
    return values


def _parse_names(name: str, value: str | Sequence[str] | None) -> list[str] | None:
    """One name or several, as a list."""
    if value is None:
        return None
    values = [value] if isinstance(value, str) else list(value) if isinstance(value, Iterable) else []
    if not values or not all(isinstance(item, str) for item in values):
        raise ConfigError(f"{name}={short(value)}: must be a name or a list of names")
    return values


def _join(values: Iterable[int]) -> str:
    return ", ".join(map(str, values))
