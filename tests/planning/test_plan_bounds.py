"""Bounds of plans whose sequences are in parts: below every simulated row, and below the solver's optimum."""

from dataclasses import replace

import pytest

import zeropipe as zp
from zeropipe.core.placement import PLACEMENTS, Problem
from zeropipe.planning.candidates import drop_too_large, least_memory, lower_bounds
from zeropipe.planning.layouts import Layout
from zeropipe.planning.rows import Candidate
from zeropipe.searching.bounds.lower_bound import lower_bound
from zeropipe.searching.solver import solve
from zeropipe.searching.task import SearchTask


@pytest.fixture(scope="module")
def long():
    return zp.plan(
        "llama-3-8b", gpus=8, batch=8, sequence=65536, gpu="h200", memory=64e9, compile=True, microbatch_sizes=1,
        schedules=["1f1b", "zbv", "v-min", "interleaved"], search_seconds=0, workers=1,
    )  # fmt: skip


def test_what_is_left_out_unseen_could_not_fit(long):
    """Runs are left out by bounds of their seconds and bytes, which no simulated row of the run undercuts."""
    rows = (*long.rows, *long.misfits)
    assert {row.candidate.shards for row in long.rows} == {"keep", "regather"}
    layouts = {row.candidate.layout for row in rows}
    assert {layout.cp for layout in layouts} == {1, 2, 4, 8}
    assert all(layout.shard_cp == (layout.cp > 1) for layout in layouts)
    for row in rows:
        run = row.candidate.run
        is_rolling = row.candidate.gradients != "whole"
        seconds, needs = lower_bounds(long.context, run, is_rolling, offload=row.candidate.offload)
        if row.candidate.shards != "keep":
            needs -= lower_bounds(long.context, run)[1] - least_memory(long.context, run)
        assert seconds <= row.makespan * (1 + 1e-9), row.candidate
        assert needs <= row.memory.peak * (1 + 1e-9), row.candidate
    assert all(row.gap is None or row.gap >= -1e-9 for row in long.rows)


def in_units(costs, num_stages):
    """The costs in whole units of time, as the solver takes them."""
    times = {name: [round(20 * time) for time in costs.column(name, num_stages)] for name in ("f", "i", "w")}
    memory = {name: list(costs.column(name, num_stages)) for name in ("activation", "stash", "weights")}
    return zp.Costs(**times, **memory)


@pytest.mark.parametrize("placement,per_rank", [("linear", 1), ("vee", 2)])
def test_bounds_with_exchanges_are_below_the_optimum(placement, per_rank, long):
    """Also where memory is scarce: a limit between the least that runs and what is best without one."""
    pytest.importorskip("ortools")
    candidate = Candidate(Layout(2, 1, 1, cp=4, shard_cp=True), "1f1b", per_rank, 2, 1, "full", "even")
    problem = Problem(2, 2 * per_rank, 2)
    rule = PLACEMENTS[placement]
    counts = [32 // problem.num_stages] * problem.num_stages
    costs = in_units(long.context.stage_costs(candidate, counts, rule(problem), gathers=False), problem.num_stages)
    free = SearchTask(problem, rule(problem), replace(costs, memory_limit=None), minimizes_span=False)
    peak = zp.simulate(zp.build("zbv" if per_rank == 2 else "1f1b", ranks=2, microbatches=2), costs).peak_memory
    for task in (free, replace(free, costs=replace(costs, memory_limit=max(peak)))):
        bound = lower_bound(task)
        optimum = solve(task, None, 4 * bound, 0.0, seconds=60, workers=1).bound
        assert 0 < bound <= optimum < 4 * bound


def test_runs_whose_weights_must_be_gathered_again_come_last(long):
    """So a limited number of candidates has all that a plan without it has."""
    context = long.context
    runs = list(dict.fromkeys(row.candidate.run for row in (*long.rows, *long.misfits)))
    possible, oversized = drop_too_large(context, runs)
    fits = [lower_bounds(context, run)[1] <= context.memory_limit for run in possible]
    assert fits == sorted(fits, reverse=True)
    assert set(fits) == {True, False}
    kept, over = drop_too_large(replace(context, shard_modes=("keep",)), runs)
    assert kept == possible[: len(kept)]
    assert {misfit.run for misfit in oversized} < {misfit.run for misfit in over}
