"""Refine the best rows of a plan: gaps to the lower bound, and schedules searched for their costs."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

from zeropipe.balancing.balance import balance_task, best_counts, peak_in_flight
from zeropipe.core.placement import PLACEMENTS, Problem
from zeropipe.errors import ZeropipeError
from zeropipe.planning.context import PlanContext
from zeropipe.planning.layouts import max_stages
from zeropipe.planning.rows import Candidate, PlanRow
from zeropipe.planning.score import score_candidate
from zeropipe.schedules.registry import build
from zeropipe.searching.bounds.lower_bound import lower_bound
from zeropipe.searching.bounds.slice_bound import slice_bound
from zeropipe.searching.driver import relative_gap
from zeropipe.searching.search import search
from zeropipe.searching.task import SearchTask

NUM_SEARCHED_RUNS = 2


def add_gaps(context: PlanContext, rows: Sequence[PlanRow], num_rows: int) -> list[PlanRow]:
    """Return the rows; the first `num_rows` with the gap of their makespan to the lower bound."""
    return [*(replace(row, gap=_compute_gap(context, row)) for row in rows[:num_rows]), *rows[num_rows:]]


def _compute_gap(context: PlanContext, row: PlanRow) -> float | None:
    schedule = row.schedule
    if len(schedule.placement.copies) > 1:
        return None  # bounds are for one copy of the model
    context = context.for_schedule(schedule)
    costs = context.stage_costs(row.candidate, row.counts, schedule.placement, gathers=False)
    candidate = row.candidate
    if candidate.layout.num_shards > 1 or candidate.offload or candidate.checkpointing:  # not everything stays
        costs = replace(costs, memory_limit=None)
    if schedule.num_slices > 1:
        bound = slice_bound(schedule, costs)
    else:
        bound = lower_bound(SearchTask(schedule.problem, schedule.placement, costs, minimizes_span=False))
    return relative_gap(row.makespan - row.seconds.data, bound)


def search_best_runs(
    context: PlanContext, rows: Sequence[PlanRow], seconds: float, steps: int | None,
    progress: Callable[[float], object],
) -> list[PlanRow]:  # fmt: skip
    """Search schedules for the runs of the best rows, with one and with two stages per rank, until Ctrl-C.

    A schedule that is slower than all others of its run, because the time was too short, is left out.
    """
    best = [row for row in rows if row.candidate.layout.pp > 1]
    runs = list(dict.fromkeys(row.candidate.run for row in best))[:NUM_SEARCHED_RUNS]
    slowest = {row.candidate.run: row.step for row in best}  # the last of each run: rows are ranked
    searches = [(run, per_rank) for run in runs for per_rank in (1, 2)]
    found: list[PlanRow] = []
    for index, (run, per_rank) in enumerate(searches):
        candidate = Candidate(
            run.layout, "searched", per_rank, run.num_microbatches, run.microbatch_size, run.ac, "balanced"
        )
        row, interrupted = _search_candidate(context, candidate, seconds / len(searches), steps)
        found += [] if row is None or row.step > slowest[run] else [row]
        progress((index + 1) / len(searches))
        if interrupted:
            break
    return found


def _search_candidate(
    context: PlanContext, candidate: Candidate, seconds: float, steps: int | None
) -> tuple[PlanRow | None, bool]:
    """Search a schedule for balanced layers; returns its row (None if nothing fits or is new), and if interrupted."""
    counts = _balance(context, candidate)
    if counts is None:
        return None, False
    problem = Problem(candidate.layout.pp, len(counts), candidate.num_microbatches)
    rule = PLACEMENTS["linear" if candidate.stages_per_rank == 1 else "vee"]
    costs = context.stage_costs(candidate, counts, rule(problem), gathers=False)
    try:
        found = search(
            ranks=problem.num_ranks, microbatches=problem.num_microbatches, costs=costs, placement=rule,
            stages_per_rank=candidate.stages_per_rank, seconds=seconds, steps=steps,
        )  # fmt: skip
    except ZeropipeError:  # not even one microbatch fits
        return None, False
    if found.registered is not None and found.value >= found.value_of(found.registered) * (1 - 1e-9):
        return None, found.interrupted  # a registered schedule is as good, and a candidate already
    row = score_candidate(context, candidate, found.schedule, counts)
    return replace(row, own_schedule=found.schedule), found.interrupted


def _balance(context: PlanContext, candidate: Candidate) -> tuple[int, ...] | None:
    """Balance layers, with the live microbatches of a built-in schedule of the same placement."""
    if candidate.layout.pp * candidate.stages_per_rank > max_stages(context.costs.num_layers):
        return None
    name = "1f1b" if candidate.stages_per_rank == 1 else "zbv"
    schedule = build(name, ranks=candidate.layout.pp, microbatches=candidate.num_microbatches)
    task = balance_task(
        context.costs, schedule.problem, schedule.placement, peak_in_flight(schedule),
        setting=context.setting(candidate), ac=candidate.ac, shards=candidate.layout.num_shards,
    )  # fmt: skip
    return best_counts(task)[0]
