"""Which timeline of a comparison is the best."""

import math

import pytest

import zeropipe as zp
from zeropipe.core.ranking import rank_timelines
from zeropipe.core.timeline import Memory, Timeline
from zeropipe.sim.compare import compare


def made(time, peak=1.0, *, limit=None, unit="", memory_unit="", microbatches=1, memory=True):
    """A timeline of one rank with this makespan and peak."""
    schedule = zp.build("gpipe", ranks=1, microbatches=microbatches)
    size = schedule.num_actions
    start = memoryview(bytearray(8 * size)).cast("d")
    end, levels = memoryview(bytearray(8 * size)).cast("d"), memoryview(bytearray(8 * size)).cast("d")
    end[size - 1], levels[0] = time, peak
    columns = Memory(levels.tobytes(), levels.tobytes()) if memory else None
    return Timeline(schedule, start.tobytes(), end.tobytes(), columns, limit, unit, memory_unit)


def test_all_that_differ_only_by_rounding_are_the_best():
    found = rank_timelines([made(2.0, 3.0), made(1.0, 2.0), made(1.0 + 1e-12, 1.0), made(1.1, 1.0)])
    assert [s.best_time for s in found.standings] == [False, True, True, False]
    assert [s.best_memory for s in found.standings] == [False, False, True, True]
    assert [s.of_best for s in found.standings] == pytest.approx([2.0, 1.0, 1.0, 1.1])
    assert found.order == (2, 1, 3, 0)  # a tie in time goes to the one with less memory
    assert all(s.fits for s in found.standings)


def test_a_full_tie_keeps_the_order_given():
    assert rank_timelines([made(1.0), made(1.0), made(1.0)]).order == (0, 1, 2)


def test_what_does_not_fit_cannot_win():
    found = rank_timelines([made(1.0, 9.0, limit=4.0), made(2.0, 4.0, limit=4.0), made(3.0, 2.0, limit=4.0)])
    assert [s.fits for s in found.standings] == [False, True, True]
    assert [s.best_time for s in found.standings] == [False, True, False]
    assert [s.best_memory for s in found.standings] == [False, False, True]
    assert [s.of_best for s in found.standings] == [0.5, 1.0, 1.5]
    assert found.order == (1, 2, 0)


def test_where_none_fits_nobody_wins():
    found = rank_timelines([made(2.0, 9.0, limit=4.0), made(1.0, 5.0, limit=4.0)])
    assert not any(s.fits for s in found.standings)
    assert not any(s.best_time or s.best_memory for s in found.standings)
    assert [s.of_best for s in found.standings] == [2.0, 1.0]
    assert found.order == (1, 0)


def test_only_the_same_work_in_the_same_unit_competes():
    found = rank_timelines([made(1.0), made(2.0, unit="s"), made(3.0, microbatches=2), made(4.0)])
    assert [s.best_time for s in found.standings] == [True, True, True, False]
    assert [s.of_best for s in found.standings] == [1.0, 1.0, 1.0, 4.0]


def test_unknown_memory_does_not_compete():
    found = rank_timelines([made(1.0, memory=False), made(1.0, 5.0), made(1.0, 2.0, memory_unit="B")])
    assert [s.best_memory for s in found.standings] == [False, True, True]
    assert found.order == (2, 1, 0)


def test_nothing_and_no_time():
    assert rank_timelines([]) == ((), ())
    found = rank_timelines([made(0.0), made(0.0)])
    assert [(s.best_time, s.of_best) for s in found.standings] == [(True, 1.0)] * 2
    assert all(math.isfinite(s.of_best) for s in found.standings)


def test_a_real_comparison():
    schedules = [zp.build(name, ranks=4, microbatches=12) for name in ("1f1b", "zbv", "v-half")]
    found = rank_timelines(compare(schedules, zp.Costs(memory_limit=3.5)))
    assert [s.fits for s in found.standings] == [False, False, True]
    assert found.order[0] == 2
