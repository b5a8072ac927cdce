"""Laws of wide beams: what they lead to fits, is the same each time, and reaches bounds."""

from random import Random

import numpy as np
import pytest
from test_search_patterns import PLACEMENTS, require_right, some_task

import zeropipe as zp
from zeropipe.core.placement import Problem
from zeropipe.search.bound.bound import THOROUGH, lower_bound
from zeropipe.search.judge import Judge
from zeropipe.search.model import Task
from zeropipe.search.starts.starts import one_by_one
from zeropipe.search.starts.wide import wide

GO_ON = np.zeros(1, np.int64)


@pytest.mark.parametrize("per_rank,rule", PLACEMENTS, ids=lambda x: getattr(x, "__name__", x))
def test_what_a_wide_beam_leads_to_is_complete_and_fits(per_rank, rule):
    random, met = Random(per_rank), 0
    for number in range(8):
        task = some_task(random, per_rank, rule)
        start = wide(task, 1.01 * Judge(task).plays(one_by_one(task)).value, 64, number, 0, GO_ON)
        if start is None:
            continue
        met += 1
        require_right(task, start)
    assert met >= 7


def test_a_loop_of_three_stages_per_rank_reaches_its_bound():
    """Walks from other starts end at 33.2."""
    problem, costs = Problem(5, 15, 6), zp.Costs(f=0.33, i=0.3333, w=0.2112, p2p=0.26)
    task = Task(problem, zp.loop(problem), costs, False, (27, 10, 21, 29, 14))
    start = wide(task, np.inf, 1000, 0, 0, GO_ON)
    assert start.value == pytest.approx(lower_bound(task, THOROUGH), rel=1e-9)


def test_wide_beams_are_the_same_each_time_and_end_when_they_are_told_to():
    problem = Problem(3, 6, 5)
    costs = zp.Costs(f=[1, 1.2, 1, 0.9, 1, 1.1], i=1.2, w=0.7, p2p=0.1, memory_limit=5)
    task = Task(problem, zp.vee(problem), costs, False)
    one, other = (wide(task, np.inf, 200, 1, 3, GO_ON) for _ in range(2))
    assert one.value == other.value
    assert np.array_equal(one.rows, other.rows)
    assert wide(task, np.inf, 200, 1, 3, np.ones(1, np.int64)) is None
