"""Random tasks of the schedule search, and the check of a candidate."""

from random import Random

import zeropipe as zp
from zeropipe.core.placement import Problem
from zeropipe.searching.bounds.lower_bound import lower_bound
from zeropipe.searching.evaluator import Candidate
from zeropipe.searching.task import SearchTask

PLACEMENTS = [(1, zp.linear), (2, zp.vee), (2, zp.loop), (3, zp.loop), (3, zp.vee)]


def task_of(ranks, microbatches, rule, per_rank, costs, parts=1, limits=None) -> SearchTask:
    problem = Problem(ranks, ranks * per_rank, microbatches, parts)
    return SearchTask(problem, rule(problem), costs, False, limits)


def sample_task(random: Random, per_rank, rule) -> SearchTask:
    """A task with different stages, mostly with a memory limit for each rank."""
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


def require_valid(task: SearchTask, candidate: Candidate) -> None:
    """Check that a candidate is complete, fits, takes no longer than its value, and no less than the bound."""
    schedule = task.to_schedule(candidate.rows, candidate.min_fit)
    zp.check(schedule)
    timeline = zp.simulate(schedule, task.costs)
    assert task.fits(timeline)
    assert lower_bound(task) * (1 - 1e-9) <= timeline.makespan <= candidate.value * (1 + 1e-9)
