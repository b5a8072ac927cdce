"""Bounds below the memory of 1F1B, where microbatches take turns and have to pass each other."""

from collections.abc import Callable, Iterable
from dataclasses import replace
from random import Random

import numpy as np
import pytest
from full_marker import mark_rest_full

import zeropipe as zp
from zeropipe.core.placement import Problem
from zeropipe.searching.bounds.lower_bound import THOROUGH_EFFORT, lower_bound
from zeropipe.searching.bounds.pending_w import pending_w
from zeropipe.searching.candidates.registered import sequential_rows
from zeropipe.searching.candidates.rules import dispatched_candidates
from zeropipe.searching.evaluator import Evaluator
from zeropipe.searching.solver import solve
from zeropipe.searching.task import SearchTask


def tight_task(random: Random) -> SearchTask:
    """A small line of ranks with little memory: random costs, limits and memory kept for W."""
    p = random.choice((2, 2, 3, 3, 4))
    m, alike = random.randint(3, 8 if p < 4 else 6), random.random() < 0.5

    def column(low: int, high: int):
        return random.randint(low, high) if alike else [random.randint(low, high) for _ in range(p)]

    activation = random.choice((1, 2, 4, column(1, 3)))
    most = max(activation) if isinstance(activation, list) else activation
    costs = zp.Costs(
        f=column(1, 5), i=column(1, 5), w=column(0, 5), p2p=random.choice((0, 0, 1, 2, 3)),
        blocking=random.random() < 0.1, activation=activation, stash=random.choice((None, None, 0, 1)),
        memory_limit=random.randint(2 * most, max(2, p) * most),
    )  # fmt: skip
    limits = tuple(random.randint(2 * most, p * most + 1) for _ in range(p)) if random.random() < 0.3 else None
    problem = Problem(p, p, m, random.choice((1, 1, 1, 2)))
    return SearchTask(problem, zp.linear(problem), costs, random.random() < 0.2, limits)


def partly_freed_task(random: Random) -> SearchTask:
    """The same, where I frees a part of an activation and W the rest."""
    p = random.choice((2, 2, 3, 3, 4))
    m, activation = random.randint(3, 7 if p < 4 else 6), random.choice((4, 5, 10))
    costs = zp.Costs(
        f=random.randint(1, 5), i=[random.randint(1, 5) for _ in range(p)], w=random.randint(1, 5),
        p2p=random.choice((0, 0, 1, 2)), activation=activation, stash=random.randint(1, activation - 1),
        memory_limit=random.randint(2 * activation, p * activation + activation // 2),
    )  # fmt: skip
    problem = Problem(p, p, m, random.choice((1, 1, 2)))
    return SearchTask(problem, zp.linear(problem), costs, random.random() < 0.2)


def turning_task(random: Random) -> SearchTask:
    """Two stages per rank."""
    p = random.choice((2, 2, 3))
    problem = Problem(p, 2 * p, random.randint(3, 5 if p == 2 else 4), random.choice((1, 1, 2)))
    activation = random.choice((1, 2))
    costs = zp.Costs(
        f=random.randint(1, 4), i=[random.randint(1, 4) for _ in range(2 * p)], w=random.randint(0, 4),
        p2p=random.choice((0, 0, 1, 2)), activation=activation, stash=random.choice((None, None, 0, 1)),
        memory_limit=random.randint(2 * activation, 2 * p * activation),
    )  # fmt: skip
    return SearchTask(problem, random.choice((zp.vee, zp.loop))(problem), costs, random.random() < 0.2)


def uneven_task(random: Random) -> SearchTask:
    """Two or three stages per rank, all of them different, and another limit for each rank."""
    p, v = random.choice(((2, 2), (2, 3), (3, 2)))
    problem = Problem(p, v * p, random.randint(3, 5 if p * v == 4 else 4), random.choice((1, 1, 1, 2)))

    def column(low: int, high: int) -> list[int]:
        return [random.randint(low, high) for _ in range(v * p)]

    activation = random.choice(([1] * v * p, [2] * v * p, column(1, 3)))
    costs = zp.Costs(
        f=column(1, 6), i=column(1, 6), w=column(random.choice((0, 1, 2)), 9), p2p=random.choice((0, 0, 1, 2)),
        activation=activation, stash=random.choice((None, None, 0, 1)),
    )  # fmt: skip
    limits = tuple(random.randint(v * max(activation), v * p * max(activation)) for _ in range(p))
    return SearchTask(problem, random.choice((zp.vee, zp.loop))(problem), costs, random.random() < 0.2, limits)


def count_tight_bounds(seeds: Iterable[int], make: Callable[[Random], SearchTask] = tight_task) -> int:
    """Compare bounds with the optima of the solver, which it finds with no help; return how often they are equal."""
    tight = 0
    for seed in seeds:
        task = make(Random(seed))
        candidate = Evaluator(task).best_fit(sequential_rows(task))
        if candidate is None:
            continue
        # this takes about a second: the limit is for a machine that is suspended meanwhile
        best = solve(task, None, candidate.value, 0.0, seconds=250, workers=1).bound
        bounds = [
            lower_bound(task),
            lower_bound(task, THOROUGH_EFFORT),
            lower_bound(task, THOROUGH_EFFORT, 1.03 * best),
        ]
        assert max(bounds) <= best * (1 + 1e-9), seed
        tight += max(bounds) >= best * (1 - 1e-9)
    return tight


@pytest.mark.parametrize(
    "make,seeds,tight",
    [
        (tight_task, range(16), 11),
        (partly_freed_task, range(6), 4),
        (turning_task, (0, 1, 2, 4, 6, 7), 6),  # 3 and 5 take the solver longest
        (uneven_task, range(6), 6),
    ],
)
def test_bounds_are_below_the_optimum(make, seeds, tight):
    assert count_tight_bounds(seeds, make) >= tight


@pytest.mark.full
@pytest.mark.timeout(3600)
def test_bounds_are_below_the_optimum_in_thousands_of_cases():
    assert count_tight_bounds(range(16, 2500)) >= 1900
    assert count_tight_bounds(range(6, 500), partly_freed_task) >= 350
    assert count_tight_bounds(range(3, 300), turning_task) >= 270
    assert count_tight_bounds(range(6, 300), uneven_task) >= 200


def test_turn_bound_runs_skipped_microbatches_right_behind_the_one_before():
    """With two of four slots followed, the microbatches between them once began too late, and the bound was 86."""
    costs, problem = zp.Costs(f=4, i=5, w=3, p2p=3), Problem(3, 3, 5)
    task = SearchTask(problem, zp.linear(problem), costs, False, (4, 3, 3))
    assert lower_bound(task) <= 85 == zp.search(ranks=3, microbatches=5, costs=costs, rank_limits=(4, 3, 3)).value


def test_subset_bound_of_two_stages_per_rank_with_little_memory():
    """Far too large for the solver. By closed formulas no rank needs more than 74.8; 88.9 was found."""
    costs, problem = zp.Costs(f=0.5, i=0.56, w=0.62, p2p=0.17), Problem(4, 8, 20)
    task = SearchTask(problem, zp.loop(problem), costs, False, (6, 4, 4, 5))
    assert lower_bound(task, THOROUGH_EFFORT) == pytest.approx(85.96, abs=1e-6)


def test_subset_bound_does_not_interrupt_w():
    """Far too large for the solver. If W could be interrupted, 74.8 would do; 76.5 was found."""
    parts = (0.5, 0.5, 0.6, 0.44, 0.45, 0.46, 0.64, 0.53, 0.41, 0.61, 0.62, 0.61)
    times = {"f": list(parts), "i": [1.12 * part for part in parts], "w": [1.23 * part for part in parts]}
    problem = Problem(6, 12, 18)
    limits = (12, 22, 19, 21, 16, 7)
    task = SearchTask(problem, zp.vee(problem), zp.Costs(**times, p2p=0.09), False, limits)
    assert lower_bound(task, THOROUGH_EFFORT) == pytest.approx(76.447, abs=1e-3)


@pytest.mark.parametrize("ranks,limit", [(2, 2), (3, 2), (4, 3)])
def test_bound_holds_for_an_overlap_that_hides_a_full_backward(ranks, limit):
    """The least duration of an I is 0 then, and an action without duration once counted as too late."""
    costs = zp.Costs(f=2, i=1, w=1, overlap=2, p2p=0.1, memory_limit=limit)
    found = zp.search(ranks=ranks, microbatches=8, costs=costs, steps=100)
    assert 8 * 2 < found.bound <= found.value


@pytest.mark.parametrize("cases", mark_rest_full([4, 40], [4]))
def test_bounds_are_below_dispatched_candidates(cases):
    """Sizes that are too large for the solver."""
    random = Random(5)
    for _ in range(cases):
        p, m = random.choice((4, 6, 8)), random.choice((9, 16, 24))
        f, i, w = (random.choice((0.7, 1, 1.3, 2)) for _ in range(3))
        costs = zp.Costs(
            f=[f * random.choice((1, 1, 1.5)) for _ in range(p)], i=i, w=w, p2p=random.choice((0, 0.1, 0.5)),
            stash=random.choice((None, 0.4)), memory_limit=random.choice((0.5, 0.75, 0.9)) * p,
        )  # fmt: skip
        task = SearchTask(Problem(p, p, m), zp.linear(Problem(p, p, m)), costs, minimizes_span=False)
        found = [candidate.value for candidate in dispatched_candidates(task, 1) if candidate]
        for cap in (float("inf"), 1.02 * min(found)):
            assert lower_bound(task, THOROUGH_EFFORT, cap) <= min(found) * (1 + 1e-9)


@pytest.mark.parametrize("limit,makespan", [(2, 81), (3, 57)])
def test_bound_counts_waits_of_microbatches_that_meet(limit, makespan):
    """Half and three quarters of the memory of 1F1B: no bound of a single rank is above 73 and 54."""
    found = zp.search(ranks=4, microbatches=16, costs=zp.Costs(memory_limit=limit), steps=1000)
    assert found.bound == pytest.approx(makespan, rel=1e-9)
    assert found.gap < 0.02  # 0 with some thousand steps


def test_more_effort_raises_the_bound():
    costs = zp.Costs(f=1, i=1.2, w=0.7, p2p=0.05, memory_limit=4)
    problem = Problem(8, 8, 32)
    task = SearchTask(problem, zp.linear(problem), costs, minimizes_span=False)
    quick, thorough = lower_bound(task), lower_bound(task, THOROUGH_EFFORT)
    assert 166 < quick < thorough <= 169.8  # a single rank's bound is 155.6; 169.8 was found
    more = lower_bound(replace(task, costs=replace(costs, memory_limit=5)))
    assert more < quick


def test_sums_of_pending_w():
    """Two stages on the first rank, with W of 2 and 3; two equal ones on the second, in two parts; memory for two W."""
    duration, stash = np.array([2.0, 3.0, 4.0, 4.0]), np.ones(4)
    stages, limits = [np.array([0, 1]), np.array([2, 3])], np.array([2.0, 1.0])
    pending = pending_w(duration, stash, stages, limits, [True, True], 2, 5)
    first, second = pending.duration[: pending.start[1]], pending.duration[pending.start[1] :]
    parts = [(a, b) for a in range(5) for b in range(5) if a + b <= 4]
    assert first.tolist() == sorted(a + 1.5 * b for a, b in parts)
    assert second.tolist() == [0, 2, 4]
    assert sorted(pending.memory[: pending.start[1]]) == sorted((a + b) / 2 for a, b in parts)
    assert pending.memory[pending.start[1] :].tolist() == [0, 0.5, 1]
    many = pending_w(duration, stash, stages, np.array([100.0, 100.0]), [True, False], 2, 20)
    assert many.start.tolist() == [0, 0, 0]  # too many sums, or W that may be interrupted
