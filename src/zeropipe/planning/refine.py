"""What is done for the best rows only: their distance to the bound, and schedules made for their costs."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

from zeropipe.balancing.balance import alive_of, balance_task, solved
from zeropipe.core.placement import PLACEMENTS, Problem
from zeropipe.core.schedule import Schedule
from zeropipe.errors import ZeropipeError
from zeropipe.planning.layouts import most_stages
from zeropipe.planning.rows import Candidate, Row
from zeropipe.planning.score import Scene, costs_of, schedule_of, score, setting_of
from zeropipe.planning.tries import run_of
from zeropipe.schedules.registry import build
from zeropipe.searching.bounds.lower_bound import lower_bound
from zeropipe.searching.driver import relative_gap
from zeropipe.searching.search import search
from zeropipe.searching.task import SearchTask

RUNS = 2  # for which schedules are searched


def with_gaps(scene: Scene, rows: Sequence[Row], number: int) -> list[Row]:
    """The rows, the first ones with how far their makespan is above what their placement allows."""
    return [replace(row, gap=_gap(scene, row)) if at < number else row for at, row in enumerate(rows)]


def _gap(scene: Scene, row: Row) -> float | None:
    one = row.candidate
    schedule = row.found or schedule_of(one)
    if len(schedule.placement.copies) > 1:
        return None  # bounds are of one copy of the model
    costs = costs_of(scene, one, row.counts, schedule.placement, whole=True)
    if one.layout.dp_shard > 1:  # what is whole only at times leaves room for more
        costs = replace(costs, memory_limit=None)
    bound = lower_bound(SearchTask(schedule.problem, schedule.placement, costs, minimizes_span=False))
    return relative_gap(row.makespan - row.parts.data, bound)


def searched(
    scene: Scene, rows: Sequence[Row], seconds: float, steps: int | None, tell: Callable[[float], object]
) -> list[Row]:
    """Schedules searched for the runs of the best rows, with one stage per rank and with two, until Ctrl-C.

    What is slower than every other schedule of its run, because the time was too short, is left out.
    """
    best = [row for row in rows if row.candidate.layout.pp > 1]
    runs = list(dict.fromkeys(run_of(row.candidate) for row in best))[:RUNS]
    slowest = {run_of(row.candidate): row.step for row in best}  # they are ranked
    tries = [(run, per_rank) for run in runs for per_rank in (1, 2)]
    found: list[Row] = []
    for done, (run, per_rank) in enumerate(tries):
        candidate = Candidate(
            run.layout, "searched", per_rank, run.num_microbatches, run.microbatch_size, run.ac, "balanced"
        )
        row, interrupted = _searched(scene, candidate, seconds / len(tries), steps)
        found += [] if row is None or row.step > slowest[run] else [row]
        tell((done + 1) / len(tries))
        if interrupted:
            break
    return found


def _searched(scene: Scene, candidate: Candidate, seconds: float, steps: int | None) -> tuple[Row | None, bool]:
    """A schedule for balanced layers, None where nothing fits; and whether Ctrl-C ended its search."""
    counts = _balanced(scene, candidate)
    if counts is None:
        return None, False
    problem = Problem(candidate.layout.pp, len(counts), candidate.num_microbatches)
    rule = PLACEMENTS["linear" if candidate.stages_per_rank == 1 else "vee"]
    costs = costs_of(scene, candidate, counts, rule(problem), whole=True)
    try:
        found = search(
            ranks=problem.num_ranks, microbatches=problem.num_microbatches, costs=costs, placement=rule,
            stages_per_rank=candidate.stages_per_rank, seconds=seconds, steps=steps,
        )  # fmt: skip
    except ZeropipeError:  # not even one microbatch fits
        return None, False
    if found.registered is not None and found.value >= found.value_of(found.registered) * (1 - 1e-9):
        return None, found.interrupted  # one with a name is as good, and was tried
    row = score(scene, candidate, found.schedule, counts)
    return replace(row, found=found.schedule), found.interrupted


def _like(candidate: Candidate) -> Schedule:
    """A schedule with the placement that is searched."""
    name = "1f1b" if candidate.stages_per_rank == 1 else "zbv"
    return build(name, ranks=candidate.layout.pp, microbatches=candidate.num_microbatches)


def _balanced(scene: Scene, candidate: Candidate) -> tuple[int, ...] | None:
    if candidate.layout.pp * candidate.stages_per_rank > most_stages(scene.costs.num_layers):
        return None
    schedule = _like(candidate)
    task = balance_task(
        scene.costs, schedule.problem, schedule.placement, alive_of(schedule),
        setting=setting_of(scene, candidate), ac=candidate.ac, shards=candidate.layout.dp_shard,
    )  # fmt: skip
    return solved(task)[0]
