"""What a Timeline and a Schedule say about themselves."""

from dataclasses import replace

import pytest

import zeropipe as zp
from zeropipe.core.timeline import Timeline


@pytest.fixture
def timeline():
    return zp.simulate(zp.build("1f1b", ranks=4, microbatches=8), zp.Costs(memory_limit=3))


def test_a_timeline_prints_as_one_line_of_figures(timeline):
    line = (
        "1f1b: 4 ranks, 4 stages (linear), 8 microbatches: "
        "makespan 33, idle 27.3%, peak memory 4, over the limit of 3"
    )  # fmt: skip
    assert str(timeline) == line
    assert repr(timeline) == f"<Timeline {line}>"
    assert repr([timeline.with_label("mine")]).startswith("[<Timeline mine: 4 ranks")


def test_units_are_written_and_unknown_memory_is_not(timeline):
    assert str(replace(timeline, unit="s", memory=None)).endswith("8 microbatches: makespan 33 s, idle 27.3%")
    assert str(replace(timeline, memory_unit="B", memory_limit=None)).endswith("peak memory 4 B")


def test_a_timeline_of_nothing_prints():
    problem = zp.Problem(2, 2, 1)
    empty = Timeline(zp.Schedule.of(problem, zp.linear(problem), [[], []]), b"", b"")
    assert "makespan 0, idle 0.0%" in str(empty)


def test_no_bubble_is_below_zero():
    schedule = zp.build("zbv", ranks=4, microbatches=8)
    run = zp.simulate(schedule, zp.Costs(f=0.0005, i=0.0005, w=0.0005))  # sums are rounded: 1 - busy / cost is not 0
    assert str(run).endswith("makespan 0.0255, idle 5.9%, peak memory 8")
    assert min(*run.rank_bubble, run.bubble, run.bubble_to_ideal) >= 0


def test_a_schedule_and_a_program_are_named_in_one_line():
    schedule = zp.build("1f1b", ranks=2, microbatches=3)
    assert repr(schedule) == "<Schedule 1f1b: 2 ranks, 2 stages (linear), 3 microbatches, 12 actions>"
    assert repr(zp.lower(schedule)) == f"<Program of {schedule!r}, 24 steps>"
    assert "W in 3 parts" in repr(zp.fill_gaps(zp.build("zbv", ranks=2, microbatches=4), weight_parts=3))


@pytest.mark.parametrize("p,m", [(4, 8), (8, 3), (1, 5)])
def test_bubble_to_ideal_is_megatrons(p, m):
    timeline = zp.simulate(zp.build("1f1b", ranks=p, microbatches=m), zp.Costs(f=1, i=1.5, w=0.5))
    assert timeline.bubble_to_ideal == pytest.approx((p - 1) / m)


@pytest.mark.parametrize("v", [2, 4])
def test_bubble_to_ideal_of_interleaving(v):
    schedule = zp.build("interleaved", ranks=4, microbatches=12, stages_per_rank=v)
    assert zp.simulate(schedule).bubble_to_ideal == pytest.approx(3 / (v * 12))


def test_bubble_to_ideal_counts_what_bubble_leaves_out():
    """zb-h2's ranks are never idle between their first and last action, and yet the last one starts later."""
    timeline = zp.simulate(zp.build("zb-h2", ranks=4, microbatches=12))
    assert timeline.bubble == pytest.approx(0)
    assert timeline.bubble_to_ideal == pytest.approx(3 / 36)
    nothing = zp.simulate(timeline.schedule, zp.Costs(f=0, i=0, w=0))
    assert nothing.bubble_to_ideal == 0
