"""Laws of wide beams: what they lead to fits, is the same each time, and reaches bounds."""

from random import Random

import numpy as np
import pytest
from test_search_patterns import PLACEMENTS, require_right, some_task

import zeropipe as zp
from zeropipe.core.placement import Problem
from zeropipe.searching.bound.bound import THOROUGH, lower_bound
from zeropipe.searching.judge import Judge
from zeropipe.searching.model import Task
from zeropipe.searching.starts.beams import Setting, bed_of, field_of, grown
from zeropipe.searching.starts.rules import most_alive
from zeropipe.searching.starts.scarce import in_memory
from zeropipe.searching.starts.starts import one_by_one
from zeropipe.searching.starts.wide import wide

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


def test_many_kinds_of_schedules_go_on_where_those_that_promise_most_lead_nowhere():
    """One rank of a loop has little memory: without groups the best of a beam starts too many microbatches."""
    problem, costs = Problem(7, 14, 10), zp.Costs(f=0.5, i=0.7, w=0.29, p2p=0.16, stash=0.5)
    task = Task(problem, zp.loop(problem), costs, False, (24, 27, 23, 15, 7, 18, 16))
    field = field_of(task)
    bed = bed_of(field, 250, GO_ON)
    share, most, none = np.full(7, 0.5), most_alive(task).astype(np.int64), np.zeros(28, np.int64)
    forwards = ((task.model.home == 4) & (np.arange(28) < 14)).astype(np.int64)
    alike = grown(task, field, np.inf, 250, Setting(20.0, 0.3, share, most, none), bed)
    apart = grown(task, field, np.inf, 250, Setting(20.0, 0.3, share, most, forwards), bed)
    assert apart.value < 0.96 * alike.value


def test_how_long_memory_is_needed():
    """One microbatch: F of rank 0 from 0 to 1, F and I of rank 1 from 1.5 to 4.5, I of rank 0 from 5 to 7."""
    problem = Problem(2, 2, 3, 2)
    costs = zp.Costs(f=1, i=2, w=3, p2p=0.5, activation=2, stash=1, memory_limit=4)
    stays, holds = in_memory(Task(problem, zp.linear(problem), costs, False))
    assert 4 * stays == pytest.approx(np.array([[17, 9], [14, 9], [12, 7], [7, 0]]))
    assert 4 * holds == pytest.approx(np.array([[0, 0], [2, 0], [2, 2], [2, 0]]))
