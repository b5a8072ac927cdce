"""The search for Overlaps: against all schedules of small cases, and with the costs of a published trace."""

from dataclasses import replace
from itertools import product
from random import Random

import pytest
from full_marker import mark_rest_full

import zeropipe as zp
from zeropipe.core.action import Action, Kind, Overlap
from zeropipe.core.placement import Problem
from zeropipe.core.schedule import Schedule
from zeropipe.errors import DeadlockError
from zeropipe.searching.bounds.lower_bound import THOROUGH_EFFORT, lower_bound
from zeropipe.searching.overlap_search import find_patterns
from zeropipe.searching.task import SearchTask, timeline_value

DEEPSEEK = {
    "attention": {"f": 4.37, "i": 9.34, "w": 2.39},
    "dispatch": {"f": 6.69, "i": 7.48},
    "experts": {"f": 4.60, "i": 5.31, "w": 3.54},
    "combine": {"f": 8.69, "i": 5.77},
}


def some_phases(random: Random) -> dict[str, dict[str, float]]:
    """A layer, with exchanges or almost without."""
    most = random.choice((2, 6))
    kinds = {"attention": "fiw", "dispatch": "fi", "experts": "fiw", "combine": "fi"}
    return {
        phase: {kind: random.randint(0, 6 if len(names) == 3 else most) for kind in names}
        for phase, names in kinds.items()
    }


def list_rows(stages: list[int], microbatches: int):
    """All rows of a rank with I and W, B and Overlaps, whose microbatches keep their order."""

    def extend(row, state):
        # of each stage: how many F, backwards and W have run; which backwards have no W yet
        if all(f == b == microbatches and not pending for f, b, pending in state):
            yield row
            return
        new_f = [s for s, (f, _, _) in zip(stages, state) if f < microbatches]
        new_b = [s for s, (f, b, _) in zip(stages, state) if b < f]
        for s in new_f:
            yield from extend((*row, Action(s, Kind.F, count(state, s)[0])), after(state, s, Kind.F))
        for s, kind in product(new_b, (Kind.B, Kind.I)):
            yield from extend((*row, Action(s, kind, count(state, s)[1])), after(state, s, kind))
            for t in new_f:
                pair = Overlap(Action(t, Kind.F, count(state, t)[0]), Action(s, kind, count(state, s)[1]))
                yield from extend((*row, pair), after(after(state, s, kind), t, Kind.F))
        for s in stages:
            if pending := count(state, s)[2]:
                yield from extend((*row, Action(s, Kind.W, pending[0])), after(state, s, Kind.W))

    def count(state, stage):
        return state[stages.index(stage)]

    def after(state, stage, kind):
        f, b, pending = count(state, stage)
        if kind is Kind.F:
            changed = f + 1, b, pending
        elif kind is Kind.W:
            changed = f, b, pending[1:]
        else:
            changed = f, b + 1, (*pending, b) if kind is Kind.I else pending
        return tuple(changed if one == stage else old for one, old in zip(stages, state))

    yield from extend((), ((0, 0, ()),) * len(stages))


def find_optimum(task: SearchTask) -> float:
    """The least value of all schedules that fit."""
    rows = [list_rows(list(task.placement.stages_of(rank)), task.num_microbatches) for rank in range(task.num_ranks)]
    best = float("inf")
    for chosen in product(*(list(one) for one in rows)):
        try:
            timeline = zp.simulate(Schedule.of(task.problem, task.placement, chosen, "any"), task.costs)
        except DeadlockError:
            continue
        if task.fits(timeline):
            best = min(best, timeline_value(timeline, task.minimizes_span))
    return best


def small_task(random: Random, ranks: int, per_rank: int, microbatches: int) -> SearchTask:
    """A few actions, with random phases or with the time of an Overlap."""
    problem = Problem(ranks, ranks * per_rank, microbatches)
    placement = random.choice((zp.vee, zp.loop) if per_rank > 1 else (zp.linear,))(problem)
    stages = [[some_phases(random) for _ in range(random.choice((1, 1, 2)))] for _ in range(problem.num_stages)]
    costs = zp.Costs(phases=stages, sm_tax=random.choice((0, 0.2)), p2p=random.choice((0, 0, 2)))
    if random.random() < 0.3:
        f, i, w = ([random.randint(1, 5) for _ in range(problem.num_stages)] for _ in range(3))
        costs = zp.Costs(f=f, i=i, w=w, overlap=[max(x, y + z) for x, y, z in zip(f, i, w)])
    if random.random() < 0.2:
        costs = replace(costs, blocking=True)
    if random.random() < 0.3 and per_rank == 1:
        costs = replace(costs, memory_limit=random.randint(1, microbatches))
    return SearchTask(problem, placement, costs, random.random() < 0.2)


@pytest.mark.parametrize(
    "ranks,per_rank,microbatches,seeds",
    mark_rest_full(
        [(1, 1, 3, 6), (2, 1, 2, 8), (1, 1, 3, 300), (2, 1, 2, 300), (2, 2, 1, 30), (3, 1, 2, 30)],
        lambda case: case[3] <= 8,
    ),
)
def test_bounds_are_below_the_optimum_with_overlaps(ranks, per_rank, microbatches, seeds):
    tight = 0
    for seed in range(seeds):
        task = small_task(Random(seed), ranks, per_rank, microbatches)
        best = find_optimum(task)
        assert lower_bound(task) <= best * (1 + 1e-9), seed
        assert lower_bound(task, THOROUGH_EFFORT, 1.03 * best) <= best * (1 + 1e-9), seed
        tight += lower_bound(task) >= best * (1 - 1e-9)
    assert tight >= seeds // 12  # most are of one rank


@pytest.mark.parametrize("seed", range(4))
def test_search_reaches_the_optimum_with_overlaps(seed):
    task = small_task(Random(seed), 1, 1, 3)
    found = zp.search(ranks=1, microbatches=3, costs=replace(task.costs, memory_limit=None), steps=30)
    best = find_optimum(replace(task, costs=replace(task.costs, memory_limit=None), minimizes_span=False))
    assert found.bound <= best * (1 + 1e-9)
    assert found.value == pytest.approx(best)


def test_one_rank_joins_every_forward_but_the_first():
    """The trace's ten costs: each F but the first runs in a B, and nothing is faster."""
    found = zp.search(ranks=1, microbatches=4, costs=zp.Costs(phases=[DEEPSEEK]), steps=0)
    assert [type(step) for step in found.schedule.rows[0]] == [Action, Overlap, Overlap, Overlap, Action]
    assert found.gap == 0
    assert found.value == pytest.approx(58.18 + 3 * 31.7, abs=0.1)


def test_less_memory_than_built_in_overlaps_need():
    """1F1B with Overlaps needs 8: the search joins as much as fits into 6."""
    costs = zp.Costs(phases=[DEEPSEEK] * 4, memory_limit=6)
    found = zp.search(ranks=4, microbatches=8, costs=costs, steps=20)
    assert found.value < 0.95 * found.registered.makespan
    assert any(isinstance(step, Overlap) for row in found.schedule.rows for step in row)
    assert max(found.timeline.peak_memory) <= 6
    zp.check(found.schedule)
    assert zp.simulate(zp.from_csv(zp.to_csv(found.schedule)), costs).makespan == found.value
    assert found.bound <= found.value


def test_seed_and_steps_determine_the_overlaps():
    costs = zp.Costs(phases=[DEEPSEEK] * 2, memory_limit=2)
    one, other = (zp.search(ranks=2, microbatches=4, costs=costs, steps=10, workers=n) for n in (1, 2))
    assert one.schedule == other.schedule


@pytest.mark.parametrize("name", ["1f1b", "1f1b-overlap", "zbv", "dualpipev", "interleaved-overlap"])
def test_patterns_are_those_of_the_schedule(name):
    schedule = zp.build(name, ranks=2, microbatches=6)
    orders, patterns = find_patterns(schedule)
    for row, order, pattern in zip(schedule.rows, orders, patterns):
        assert len(pattern) == len([step for step in row if isinstance(step, Overlap) or step.kind is not Kind.W])
        assert pattern.count("P") == sum(isinstance(step, Overlap) for step in row)
        assert len(order.forwards) == len(order.backwards) == pattern.count("F") + pattern.count("P")
