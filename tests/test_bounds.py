"""Bounds below the memory of 1F1B, where microbatches take turns and have to pass each other."""

from collections.abc import Callable, Iterable
from dataclasses import replace
from random import Random

import numpy as np
import pytest
from full_marker import mark_rest_full

import zeropipe as zp
from zeropipe.core.placement import Problem
from zeropipe.searching.bound.bound import THOROUGH, lower_bound
from zeropipe.searching.bound.ordering import smallest
from zeropipe.searching.bound.owed import owed_of
from zeropipe.searching.cpsat import prove
from zeropipe.searching.judge import Judge
from zeropipe.searching.model import Task
from zeropipe.searching.starts.rules import dispatched
from zeropipe.searching.starts.starts import one_by_one


def tight_task(random: Random) -> Task:
    """A small line of ranks with little memory: costs, limits and what W keeps by chance."""
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
    return Task(problem, zp.linear(problem), costs, random.random() < 0.2, limits)


def partly_freed_task(random: Random) -> Task:
    """The same, where I frees a part of an activation and W the rest."""
    p = random.choice((2, 2, 3, 3, 4))
    m, activation = random.randint(3, 7 if p < 4 else 6), random.choice((4, 5, 10))
    costs = zp.Costs(
        f=random.randint(1, 5), i=[random.randint(1, 5) for _ in range(p)], w=random.randint(1, 5),
        p2p=random.choice((0, 0, 1, 2)), activation=activation, stash=random.randint(1, activation - 1),
        memory_limit=random.randint(2 * activation, p * activation + activation // 2),
    )  # fmt: skip
    problem = Problem(p, p, m, random.choice((1, 1, 2)))
    return Task(problem, zp.linear(problem), costs, random.random() < 0.2)


def turning_task(random: Random) -> Task:
    """Two stages per rank."""
    p = random.choice((2, 2, 3))
    problem = Problem(p, 2 * p, random.randint(3, 5 if p == 2 else 4), random.choice((1, 1, 2)))
    activation = random.choice((1, 2))
    costs = zp.Costs(
        f=random.randint(1, 4), i=[random.randint(1, 4) for _ in range(2 * p)], w=random.randint(0, 4),
        p2p=random.choice((0, 0, 1, 2)), activation=activation, stash=random.choice((None, None, 0, 1)),
        memory_limit=random.randint(2 * activation, 2 * p * activation),
    )  # fmt: skip
    return Task(problem, random.choice((zp.vee, zp.loop))(problem), costs, random.random() < 0.2)


def uneven_task(random: Random) -> Task:
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
    return Task(problem, random.choice((zp.vee, zp.loop))(problem), costs, random.random() < 0.2, limits)


def require_below_the_optimum(seeds: Iterable[int], make: Callable[[Random], Task] = tight_task) -> int:
    """Hold bounds against the solver's own optima, which it finds with no help; how often they are equal."""
    tight = 0
    for seed in seeds:
        task = make(Random(seed))
        start = Judge(task).plays(one_by_one(task))
        if start is None:
            continue
        # this takes a second or so: the limit is for machines that stand still in between
        best = prove(task, None, start.value, 0.0, seconds=250, workers=1).bound
        bounds = [lower_bound(task), lower_bound(task, THOROUGH), lower_bound(task, THOROUGH, 1.03 * best)]
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
def test_no_bound_is_above_the_solvers_optimum(make, seeds, tight):
    assert require_below_the_optimum(seeds, make) >= tight


@pytest.mark.full
@pytest.mark.timeout(3600)
def test_no_bound_is_above_the_solvers_optimum_in_thousands_of_cases():
    assert require_below_the_optimum(range(16, 2500)) >= 1900
    assert require_below_the_optimum(range(6, 500), partly_freed_task) >= 350
    assert require_below_the_optimum(range(3, 300), turning_task) >= 270
    assert require_below_the_optimum(range(6, 300), uneven_task) >= 200


def test_microbatches_that_are_left_out_come_right_behind_the_one_before_them():
    """With two of four followed, those between them were once thought to begin later than they can: 86."""
    costs, problem = zp.Costs(f=4, i=5, w=3, p2p=3), Problem(3, 3, 5)
    task = Task(problem, zp.linear(problem), costs, False, (4, 3, 3))
    assert lower_bound(task) <= 85 == zp.search(ranks=3, microbatches=5, costs=costs, rank_limits=(4, 3, 3)).value


def test_what_two_stages_per_rank_ask_of_little_memory_is_seen():
    """Far too large for the solver. By closed formulas no rank needs more than 74.8; 88.9 was found."""
    costs, problem = zp.Costs(f=0.5, i=0.56, w=0.62, p2p=0.17), Problem(4, 8, 20)
    task = Task(problem, zp.loop(problem), costs, False, (6, 4, 4, 5))
    assert lower_bound(task, THOROUGH) == pytest.approx(85.96, abs=1e-6)


def test_that_no_pass_interrupts_a_w_is_seen():
    """Far too large for the solver. If W could be interrupted, 74.8 would do; 76.5 was found."""
    parts = (0.5, 0.5, 0.6, 0.44, 0.45, 0.46, 0.64, 0.53, 0.41, 0.61, 0.62, 0.61)
    times = {"f": list(parts), "i": [1.12 * part for part in parts], "w": [1.23 * part for part in parts]}
    problem = Problem(6, 12, 18)
    limits = (12, 22, 19, 21, 16, 7)
    task = Task(problem, zp.vee(problem), zp.Costs(**times, p2p=0.09), False, limits)
    assert lower_bound(task, THOROUGH) == pytest.approx(76.447, abs=1e-3)


@pytest.mark.parametrize("ranks,limit", [(2, 2), (3, 2), (4, 3)])
def test_an_overlap_that_hides_all_of_a_backward_leaves_a_bound_that_holds(ranks, limit):
    """At the least cost of anything an I takes no time then: an action without length was taken for one too late."""
    costs = zp.Costs(f=2, i=1, w=1, overlap=2, p2p=0.1, memory_limit=limit)
    found = zp.search(ranks=ranks, microbatches=8, costs=costs, steps=100)
    assert 8 * 2 < found.bound <= found.value


@pytest.mark.parametrize("cases", mark_rest_full([4, 40], [4]))
def test_no_bound_is_above_what_dispatching_finds(cases):
    """Sizes that are too large for the solver."""
    random = Random(5)
    for _ in range(cases):
        p, m = random.choice((4, 6, 8)), random.choice((9, 16, 24))
        f, i, w = (random.choice((0.7, 1, 1.3, 2)) for _ in range(3))
        costs = zp.Costs(
            f=[f * random.choice((1, 1, 1.5)) for _ in range(p)], i=i, w=w, p2p=random.choice((0, 0.1, 0.5)),
            stash=random.choice((None, 0.4)), memory_limit=random.choice((0.5, 0.75, 0.9)) * p,
        )  # fmt: skip
        task = Task(Problem(p, p, m), zp.linear(Problem(p, p, m)), costs, span=False)
        found = [start.value for start in dispatched(task, 1) if start]
        for cap in (float("inf"), 1.02 * min(found)):
            assert lower_bound(task, THOROUGH, cap) <= min(found) * (1 + 1e-9)


@pytest.mark.parametrize("limit,makespan", [(2, 81), (3, 57)])
def test_what_passing_each_other_costs_is_seen(limit, makespan):
    """Half and three quarters of the memory of 1F1B: no bound of a single rank is above 73 and 54."""
    found = zp.search(ranks=4, microbatches=16, costs=zp.Costs(memory_limit=limit), steps=1000)
    assert found.bound == pytest.approx(makespan, rel=1e-9)
    assert found.gap < 0.02  # 0 with some thousand steps


def test_following_more_of_them_never_lowers_the_bound():
    costs = zp.Costs(f=1, i=1.2, w=0.7, p2p=0.05, memory_limit=4)
    problem = Problem(8, 8, 32)
    task = Task(problem, zp.linear(problem), costs, span=False)
    quick, thorough = lower_bound(task), lower_bound(task, THOROUGH)
    assert 166 < quick < thorough <= 169.8  # a single rank's bound is 155.6; 169.8 was found
    more = lower_bound(replace(task, costs=replace(costs, memory_limit=5)))
    assert more < quick


def test_the_smallest_values_are_found_among_equal_ones_too():
    random = Random(0)
    for _ in range(500):
        values = [random.randint(0, 6) / 2 for _ in range(random.randint(1, 12))]
        beyond, number = [-1.0] * random.randint(0, 2), random.randrange(len(values))
        assert smallest([*values, *beyond], len(values), number) == sorted(values)[number]


def test_which_w_can_be_owed():
    """Two stages on the first rank, of W that last 2 and 3; two alike on the second, cut in two; memory for two W."""
    weight, keeps = np.array([2.0, 3.0, 4.0, 4.0]), np.ones(4)
    own, room = [np.array([0, 1]), np.array([2, 3])], np.array([2.0, 1.0])
    owed = owed_of(weight, keeps, own, room, [True, True], 2, 5)
    assert owed.kind.tolist() == [0, 1, 2, 2]
    first, second = owed.lasts[: owed.first[1]], owed.lasts[owed.first[1] :]
    parts = [(a, b) for a in range(5) for b in range(5) if a + b <= 4]
    assert first.tolist() == sorted(a + 1.5 * b for a, b in parts)
    assert second.tolist() == [0, 2, 4]
    assert np.allclose(owed.parts @ [1, 1.5], np.append(first, [0, 1, 2]))
    many = owed_of(weight, keeps, own, np.array([100.0, 100.0]), [True, False], 2, 20)
    assert many.first.tolist() == [0, 0, 0]  # too many choices, or not asked for
