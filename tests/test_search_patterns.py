"""Laws of what repeats: no action is in another's way, memory suffices, and what is known to be possible is found."""

from dataclasses import replace
from random import Random

import numpy as np
import pytest

import zeropipe as zp
from zeropipe.core.placement import Problem
from zeropipe.searching.bound.bound import lower_bound
from zeropipe.searching.judge import Judge, Start
from zeropipe.searching.model import Task
from zeropipe.searching.starts.patterns import find, repeating, shortest_period

PLACEMENTS = [(1, zp.linear), (2, zp.vee), (2, zp.loop), (3, zp.loop), (3, zp.vee)]


def task_of(ranks, microbatches, rule, per_rank, costs, parts=1, limits=None) -> Task:
    problem = Problem(ranks, ranks * per_rank, microbatches, parts)
    return Task(problem, rule(problem), costs, False, limits)


def some_task(random: Random, per_rank, rule) -> Task:
    p, m = random.choice((2, 3, 4)), random.choice((1, 5, 9))
    num_stages = p * per_rank

    def column(low, high):
        return [random.randint(low, high) / 4 for _ in range(num_stages)]

    costs = zp.Costs(
        f=column(2, 8), i=column(2, 8), w=column(0, 6), p2p=random.choice((0, 0.3)),
        activation=random.choice((1, column(4, 8))), stash=random.choice((None, 0.5)), blocking=random.random() < 0.2,
    )  # fmt: skip
    limits = tuple(random.uniform(1.5, 2.5) * num_stages for _ in range(p)) if random.random() < 0.7 else None
    return task_of(p, m, rule, per_rank, costs, random.choice((1, 3)), limits)


def require_right(task: Task, start: Start) -> None:
    """Its schedule is complete, fits, takes no longer than it says, and no less than the bound."""
    schedule = task.schedule(start.rows, start.share)
    zp.check(schedule)
    timeline = zp.simulate(schedule, task.costs)
    assert task.fits(timeline)
    assert lower_bound(task) * (1 - 1e-9) <= timeline.makespan <= start.value * (1 + 1e-9)


@pytest.mark.parametrize("per_rank,rule", PLACEMENTS, ids=lambda x: getattr(x, "__name__", x))
def test_what_repeats_is_free_of_conflicts_and_the_schedule_fits(per_rank, rule):
    random, met = Random(per_rank), 0
    for _ in range(8):
        task = some_task(random, per_rank, rule)
        period = shortest_period(task) * random.choice((1, 1.05, 1.2))
        costs = {name: np.array(task.costs.column(name, task.num_stages)) for name in ("f", "i", "w")}
        work = np.bincount(np.array(task.placement.copies[0]), sum(costs.values()))
        assert period >= work.max() * (1 - 1e-12)
        for pattern in find(task, period, 0, steps=3000):
            met += 1
            lasts = np.concatenate([costs["f"], costs["i"][::-1]])
            arrives = pattern.at + lasts + task.model.lag
            assert np.all(pattern.at[1:] >= arrives[:-1] - 1e-6)
            for rank, passes in enumerate(task.passes_by_rank):
                begins = pattern.at[passes] % period
                order = np.argsort(begins)
                after = np.append(begins[order][1:], begins[order][0] + period)
                assert np.all(begins[order] + lasts[passes][order] <= after + 1e-6), f"two at a time on rank {rank}"
            start = Judge(task).plays(pattern.rows(task))
            schedule = task.schedule(start.rows, start.share)
            zp.check(schedule)
            timeline = zp.simulate(schedule, task.costs)
            assert task.fits(timeline)
            assert timeline.makespan == pytest.approx(start.value)
    assert met >= 6


@pytest.mark.parametrize("ranks", [4, 6, 8])
@pytest.mark.parametrize("peak", ["half", "third"])
def test_the_published_patterns_of_a_v_are_found(ranks, peak):
    """V-Half and V-Min (arXiv 2405.15362): no idle time with about a half and a third of 1F1B's memory."""
    limit = 2 * ((ranks + 2) // 2 if peak == "half" else (ranks + 4) // 3)
    task = task_of(ranks, 3 * ranks, zp.vee, 2, zp.Costs(memory_limit=limit))
    assert shortest_period(task) == pytest.approx(6)
    assert any(find(task, 6.0, number) for number in range(8))
    tighter = replace(task, rank_limits=(2.0,) * ranks)  # one microbatch at a time
    assert shortest_period(tighter) > 6
    assert not find(tighter, 6.0, 0)


def test_patterns_lead_to_the_optimum():
    costs = zp.Costs(f=1, i=1.2, w=0.7, p2p=0.05, memory_limit=6)  # three quarters of 1F1B's
    found = zp.search(ranks=4, microbatches=16, stages_per_rank=2, placement=zp.vee, costs=costs, steps=60_000)
    assert found.gap == 0


def test_patterns_stay_out_where_they_cannot_help():
    task = task_of(4, 8, zp.vee, 2, zp.Costs(memory_limit=8))
    assert list(repeating(task, 8 * 6)) == []  # nothing can be better than that
    assert list(repeating(task_of(4, 8, zp.linear, 1, zp.Costs(memory_limit=4)), 1e9)) == []
    assert list(repeating(replace(task, costs=zp.Costs(f=0, i=0, w=0)), 1e9)) == []
    assert list(repeating(task, 1e9, lambda: True)) == []
