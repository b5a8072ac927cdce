"""`zp.plan`: what to run for a model, GPUs, memory and a batch; how fast it is, and how far from the lower bound."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from math import inf
from time import monotonic
from typing import Any

from zeropipe.core.units import count_text
from zeropipe.core.workers import count_cores
from zeropipe.errors import ConfigError, require_positive_integers, short
from zeropipe.estimating.counted import CountedModel
from zeropipe.estimating.model import ShapedModel
from zeropipe.planning.candidates import (
    Variant,
    drop_too_large,
    group_by_schedule,
    list_candidates,
    list_variants,
)
from zeropipe.planning.closest import find_closest
from zeropipe.planning.context import RESERVE, PlanContext
from zeropipe.planning.layouts import max_stages
from zeropipe.planning.offloading import HOST_MEMORY, offloaded_candidates
from zeropipe.planning.partial_checkpointing import checkpointed_candidates
from zeropipe.planning.pool import score_groups
from zeropipe.planning.refine import add_gaps, search_best_runs
from zeropipe.planning.result import Plan
from zeropipe.planning.rolling import rolling_candidates
from zeropipe.planning.rows import Candidate, PlanRow, Run
from zeropipe.planning.runs import list_task_runs
from zeropipe.planning.slicing import sliced_candidates
from zeropipe.planning.task import PlanTask, default_batch
from zeropipe.planning.untried import list_untried
from zeropipe.schedules.registry import entries
from zeropipe.searching.search import require_callbacks, require_seconds
from zeropipe.sim.layer_costs import LayerCosts

MAX_CANDIDATES = 4000  # that are simulated: those with the least work
NUM_ROWS_WITH_GAP = 12


def plan(
    model: str | Mapping[str, Any] | ShapedModel | CountedModel | LayerCosts,
    *,
    gpus: int,
    batch: int | None = None,
    gpus_per_node: int = 8,
    memory: float | None = None,
    reserve: float = RESERVE,
    gpu: str = "h100",
    sequence: int = 4096,
    dtype: str = "bf16",
    compile: bool = True,
    efficiency: dict[str, Any] | None = None,
    lora: int | None = None,
    pp: int | Sequence[int] | None = None,
    tp: int | Sequence[int] | None = None,
    ep: int | Sequence[int] | None = None,
    cp: int | Sequence[int] | None = None,
    slices: int | Sequence[int] | None = None,
    imbalance: float = 1.0,
    dispatch: str = "expert",
    sequence_parallel: bool | None = None,
    microbatch_sizes: int | Sequence[int] | None = None,
    ac: str | Sequence[str] | None = None,
    schedules: str | Sequence[str] | None = None,
    offload: bool = True,
    search_seconds: float = 10.0,
    search_steps: int | None = None,
    sample: int | None = None,
    max_candidates: int = MAX_CANDIDATES,
    workers: int | None = None,
    progress: Callable[[str, float], object] | None = None,
) -> Plan:
    """Try layouts, schedules, microbatch sizes, checkpointing modes and cuts, and rank those that fit.

    `model` is an argument of `zp.estimate` (which then gets `gpu`, `sequence`, `sample`, `dtype`, `compile` and
    `efficiency`), or LayerCosts. `batch` is the number of sequences per step, over all GPUs, by default
    about 4 million tokens. `memory` is that of a GPU
    in bytes, of which `reserve` is not used. With `lora` the model is frozen and adapters of that rank are trained.
    `sequence_parallel` is for layouts with a `tp` above 1. `ep` divides experts inside a machine and over all of
    `dp_shard`; `imbalance` is the load of the GPU with most of their rows over the mean, `dispatch` as in
    `zp.estimate`. `cp` divides every sequence over so many GPUs. The default is to try all pipeline, expert-parallel
    and tensor-parallel sizes, without and with sequence parallelism where the model allows it, microbatches of 1, 2 and
    4 sequences, ac `none`, `selective:op` and `full` (or the settings of LayerCosts), and all built-in schedules; from
    32,768 tokens also each power of two for `cp` that leaves a GPU 8,192 tokens of a sequence, and of up to 16 `slices`
    with 4,096 tokens on average. Where memory is short, activations are copied to the host (`offload`). Then
    `zp.search` runs for the best rows, for `search_seconds` in all or with `search_steps` each. At most
    `max_candidates` are simulated, those with the least work. `progress` gets a description and the completed fraction.
    """
    begin, report = monotonic(), progress or (lambda text, fraction: None)
    require_callbacks(progress, workers)
    require_positive_integers(max_candidates=max_candidates)
    require_seconds("search_seconds", search_seconds, "; 0 for no search")
    if search_steps is not None and (search_seconds == 0 or schedules is not None):
        reason = "schedules=" if search_seconds else "search_seconds=0"
        raise ConfigError(
            f"search_steps={short(search_steps)}: nothing is searched with {reason}; leave one of them out"
        )
    if batch is None:
        require_positive_integers(gpus=gpus, sequence=sequence)
        batch = default_batch(gpus, model.sequence if isinstance(model, LayerCosts) else sequence)
    task = PlanTask.create(
        model, sequence, gpus=gpus, batch=batch, gpus_per_node=gpus_per_node, memory=memory, reserve=reserve, gpu=gpu,
        dtype=dtype, compile=compile, efficiency=efficiency, lora=lora, sample=sample, pp=pp, tp=tp, ep=ep, cp=cp,
        slices=slices, imbalance=imbalance, dispatch=dispatch, sequence_parallel=sequence_parallel,
        microbatch_sizes=microbatch_sizes, ac=ac, schedules=schedules,
    )  # fmt: skip
    context, space = task.open()
    every = list_task_runs(task, context, space)
    runs, oversized = drop_too_large(context, every)
    candidates = _list_candidates(context, runs, task.schedules)
    variants = list_variants(task.schedules, context.costs.has_overlaps)
    rows = _score(context, candidates[:max_candidates], workers, lambda done: report("trying schedules", 0.7 * done))
    rolling = rolling_candidates(context, rows, oversized, variants)
    rows += _score(context, rolling, workers, lambda done: report("rolling gradients", 0.7 + 0.05 * done))
    sliced = sliced_candidates(context, rows, runs, space.slices, task.schedules)
    rows += _score(context, sliced, workers, lambda done: report("slices", 0.75 + 0.03 * done))
    offloaded = offloaded_candidates(context, rows, oversized, variants) if offload else []
    scored = _score(context, offloaded, workers, lambda done: report("offload", 0.78 + 0.02 * done))
    rows += [row for row in scored if row.host_memory <= HOST_MEMORY]
    partial = checkpointed_candidates(rows)
    rows += _score(context, partial, workers, lambda done: report("checkpointing of some F", 0.8 + 0.02 * done))
    num_tried = len({row.candidate for row in rows})
    searches = search_seconds > 0 and schedules is None
    if searches:
        rows += search_best_runs(
            context, _rank(rows), search_seconds, search_steps, lambda done: report("searching", 0.82 + 0.13 * done)
        )
    ranked, misfits = add_gaps(context, _rank(rows), NUM_ROWS_WITH_GAP), _find_misfits(rows)
    closest = None if ranked else find_closest(task, context, misfits, oversized)
    report("done", 1.0)
    return Plan(
        tuple(ranked), misfits, tuple(oversized), context, gpus, batch, num_tried,
        max(0, len(candidates) - max_candidates), monotonic() - begin, task.reserve,
        list_untried(task, context, every, searches), closest,
    )  # fmt: skip


def _list_candidates(context: PlanContext, runs: Sequence[Run], names: Sequence[str] | None) -> list[Candidate]:
    """Every candidate of the runs; ConfigError if all schedules have too many stages."""
    costs = context.costs
    variants = list_variants(names, costs.has_overlaps)
    candidates = list_candidates(runs, variants, costs.num_layers, list_variants(names, has_overlap_costs=True))
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
