"""Laws of schedules that grow side by side: they fit, they are the same each time, and they reach what walks do not."""

from dataclasses import replace
from itertools import islice
from random import Random

import numpy as np
import pytest
from test_search_patterns import PLACEMENTS, require_right, some_task

import zeropipe as zp
from zeropipe.searching.judge import Judge
from zeropipe.searching.model import Task
from zeropipe.searching.starts.beams import NARROW, alive_on_the_way, beamed
from zeropipe.searching.starts.starts import one_by_one


@pytest.mark.parametrize("per_rank,rule", PLACEMENTS, ids=lambda x: getattr(x, "__name__", x))
def test_what_has_grown_is_complete_and_fits(per_rank, rule):
    random, met = Random(per_rank), 0
    for _ in range(6):
        task = some_task(random, per_rank, rule)
        slow = Judge(task).plays(one_by_one(task))
        for width, start in islice(beamed(task, slow.value, seed=0), 3):
            assert width == NARROW
            if start is None:
                continue
            met += 1
            require_right(task, start)
    assert met >= 12


def test_a_loop_with_little_memory_reaches_its_bound():
    """Walks from other starts end at 88.9, however long they are."""
    costs = zp.Costs(f=0.5, i=0.56, w=0.62, p2p=0.17)
    options = {"ranks": 4, "microbatches": 20, "stages_per_rank": 2, "placement": zp.loop, "rank_limits": (6, 4, 4, 5)}
    found = zp.search(**options, costs=costs, steps=4000)
    assert found.value == pytest.approx(85.96, abs=1e-6)
    assert found.gap == 0


def test_beams_are_the_same_for_any_number_of_workers():
    task = some_task(Random(7), 2, zp.vee)
    value = Judge(task).plays(one_by_one(task)).value
    one, two, five = (
        [(width, start and start.value) for width, start in islice(beamed(task, value, 3, workers), 40)]
        for workers in (1, 2, 5)
    )
    assert one == two == five
    assert {width for width, start in one if start} == {0, NARROW, 2 * NARROW}


@pytest.mark.parametrize("per_rank,rule", PLACEMENTS, ids=lambda x: getattr(x, "__name__", x))
def test_what_is_alive_on_the_way_fits_on_each_rank(per_rank, rule):
    """And it is so much that the tightest rank is full, or always busy."""
    random = Random(per_rank)
    for _ in range(10):
        task = some_task(random, per_rank, rule)
        alive, half = alive_on_the_way(task), task.num_stages
        level = np.bincount(task.model.home[:half], alive * task.model.needs[:half], task.num_ranks)
        assert (level <= task.model.limit * (1 + 1e-9)).all()
        assert (alive[:-1] >= alive[1:]).all()  # what a stage holds the one before it holds, too
        roomy = replace(task, costs=replace(task.costs, memory_limit=None), rank_limits=None)
        assert (alive <= alive_on_the_way(roomy) * (1 + 1e-9)).all()


def test_beams_begin_near_the_caps_that_one_tight_rank_asks_for():
    """Narrow beams with parts of each rank's own memory as caps end at 71.2; the best known takes 67.1."""
    costs = zp.Costs(f=0.5, i=0.7, w=0.29, p2p=0.16, stash=0.5)
    problem = zp.Problem(7, 14, 17)
    task = Task(problem, zp.loop(problem), costs, False, (24.0, 27.0, 23.0, 15.0, 7.0, 18.0, 16.0))
    found = [start.value for width, start in islice(beamed(task, 1e9, 0), 60) if start and width <= 16]
    assert min(found) < 70
