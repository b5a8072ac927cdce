"""Laws of schedules that grow side by side: they fit, they are the same each time, and they reach what walks do not."""

from itertools import islice
from random import Random

import pytest
from test_search_patterns import PLACEMENTS, some_task

import zeropipe as zp
from zeropipe.search.bound.bound import lower_bound
from zeropipe.search.judge import Judge
from zeropipe.search.starts.beams import NARROW, beamed
from zeropipe.search.starts.starts import one_by_one


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
            schedule = task.schedule(start.rows, start.share)
            zp.check(schedule)
            timeline = zp.simulate(schedule, task.costs)
            assert task.fits(timeline)
            assert lower_bound(task) * (1 - 1e-9) <= timeline.makespan <= start.value * (1 + 1e-9)
    assert met >= 12


def test_a_loop_with_little_memory_reaches_its_bound():
    """Walks from other starts end at 88.9, however long they are."""
    costs = zp.Costs(f=0.5, i=0.56, w=0.62, p2p=0.17)
    options = {"ranks": 4, "microbatches": 20, "stages_per_rank": 2, "placement": zp.loop, "rank_limits": (6, 4, 4, 5)}
    found = zp.search(**options, costs=costs, steps=4000)
    assert found.value == pytest.approx(85.96, abs=1e-6)
    assert found.gap == 0


def test_beams_are_the_same_each_time():
    task = some_task(Random(7), 2, zp.vee)
    value = Judge(task).plays(one_by_one(task)).value
    one, other = ([start and start.value for _, start in islice(beamed(task, value, 3), 30)] for _ in range(2))
    assert one == other
    assert any(one)
