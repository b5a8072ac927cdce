"""Why time is lost: gaps, causes and the critical path, against a slow longest path and by hand."""

from array import array
from dataclasses import replace
from functools import cache
from itertools import pairwise

import pytest

import zeropipe as zp
from zeropipe.core import explain, jit
from zeropipe.core.action import Overlap
from zeropipe.core.needs import needs

RUNS = [(name, ranks, microbatches) for name in zp.names() for ranks, microbatches in ((2, 4), (4, 8))]
COSTS = zp.Costs(f=1.0, i=1.25, w=0.75, p2p=0.125)


def run(name, ranks, microbatches, costs=COSTS):
    return zp.simulate(zp.build(name, ranks=ranks, microbatches=microbatches), costs)


def parts(step):
    """The one action of a step, or the two of an Overlap."""
    return tuple(step) if isinstance(step, Overlap) else (step,)


def result(action):
    """What an action makes: B and I of a place make the same."""
    return action.stage, action.kind is zp.Kind.F, action.microbatch


def longest_path(schedule, costs):
    """The makespan by plain recursion over rows and needs: no simulator."""
    home, step_of = {}, {}
    for rank, row in enumerate(schedule.rows):
        for n, step in enumerate(row):
            for action in parts(step):
                home[action] = rank
                step_of[action] = (rank, n)

    def lasts(step):
        cost = {"F": costs.f, "B": costs.i + costs.w, "I": costs.i, "W": costs.w}
        return sum(cost[action.kind.name] for action in parts(step))

    @cache
    def end(rank, n):
        step = schedule.rows[rank][n]
        begin = end(rank, n - 1) if n else 0.0
        for action in parts(step):
            for wanted in needs(action, schedule.num_stages):
                made = wanted if wanted in home else wanted._replace(kind=zp.Kind.B)
                travels = costs.p2p if home[made] != rank else 0.0
                begin = max(begin, end(*step_of[made]) + travels)
        return begin + lasts(step)

    return max(end(rank, len(row) - 1) for rank, row in enumerate(schedule.rows) if row)


@pytest.mark.parametrize("name,ranks,microbatches", RUNS)
def test_busy_and_idle_time_add_up_to_the_makespan(name, ranks, microbatches):
    timeline = run(name, ranks, microbatches)
    for rank, (idle, busy) in enumerate(zip(explain.idle_times(timeline), timeline.busy)):
        assert idle.total + busy == pytest.approx(timeline.makespan)
        assert idle.other == 0  # a simulated rank has always a reason
        pieces = [gap for gap in explain.find_gaps(timeline) if gap.rank == rank]
        by_cause = [sum(g.end - g.start for g in pieces if g.cause == cause) for cause in explain.CAUSES]
        assert by_cause == pytest.approx(list(idle))


def bounds_of_path(timeline):
    """What each action of the critical path waited for: its data, the previous action of its rank, or nothing."""
    reasons = explain.find_reasons(timeline)
    return [
        "data" if reasons.waited[at] >= 0 else "rank" if reasons.previous[at] >= 0 else "start"
        for at in explain.critical_indices(timeline)
    ]


@pytest.mark.parametrize("name,ranks,microbatches", RUNS)
def test_the_critical_path_is_as_long_as_the_run(name, ranks, microbatches):
    timeline = run(name, ranks, microbatches)
    path = explain.critical_path(timeline)
    bounds = bounds_of_path(timeline)
    assert bounds[0] == "start"
    assert path[0].start == timeline.first_start
    assert path[-1].end - path[0].start == pytest.approx(longest_path(timeline.schedule, COSTS))
    for (before, hop), bound in zip(pairwise(path), bounds[1:], strict=True):
        gap = hop.start - before.end
        if bound == "rank":
            assert (before.rank, gap) == (hop.rank, 0)
        else:
            assert gap == pytest.approx(COSTS.p2p)
            assert before.rank != hop.rank
            step = next(step for step in timeline.schedule.rows[hop.rank] if hop.action in parts(step))
            wanted = [result(w) for action in parts(step) for w in needs(action, timeline.schedule.num_stages)]
            assert result(before.action) in wanted


def test_gaps_by_hand():
    """2 ranks, 1 microbatch: F on rank 0, a message, F and B on rank 1, a message, B on rank 0."""
    timeline = run("1f1b", 2, 1, zp.Costs(f=1, i=1, w=1, p2p=0.5))
    found = [(g.rank, g.start, g.end, g.cause, str(g.action), str(g.needs)) for g in explain.find_gaps(timeline)]
    assert found == [
        (0, 1.0, 4.5, "waiting for data", "0B0", "1B0"),
        (0, 4.5, 5.0, "communication", "0B0", "1B0"),
        (1, 0.0, 1.5, "warm-up", "1F0", "0F0"),
        (1, 4.5, 7.0, "cool-down", "None", "None"),
    ]
    assert [str(hop.action) for hop in explain.critical_path(timeline)] == ["0F0", "1F0", "1B0", "0B0"]


def test_a_blocking_send_is_communication():
    timeline = run("1f1b", 2, 3, zp.Costs(p2p=0.5, blocking=True))
    assert all(rank.other == 0 for rank in explain.idle_times(timeline))
    second = next(gap for gap in explain.find_gaps(timeline) if gap.rank == 0)
    assert (second.start, second.end, second.cause) == (1.0, 1.5, "communication")


def test_a_measured_pause_with_the_data_there_has_another_cause():
    """Rank 0's second F starts 0.25 late although it needs nothing."""
    timeline = run("gpipe", 2, 2, zp.Costs())
    start, end = array("d", timeline.start), array("d", timeline.end)
    start[1] += 0.25
    late = replace(timeline, start=start.tobytes(), end=end.tobytes(), measured=True)
    assert explain.idle_times(late)[0].other == pytest.approx(0.25)
    assert explain.idle_times(timeline)[0].other == 0


def test_compiled_and_plain_agree(monkeypatch):
    timeline = run("dualpipev", 4, 8)
    plain = explain.idle_times(timeline), explain.critical_path(timeline), explain.find_gaps(timeline)
    explain._find_reasons.cache_clear()
    monkeypatch.setattr(jit, "COMPILE_FROM_SIZE", 0)
    compiled = explain.idle_times(timeline), explain.critical_path(timeline), explain.find_gaps(timeline)
    explain._find_reasons.cache_clear()
    assert compiled == plain


@pytest.mark.parametrize("name,ranks,microbatches", RUNS)
def test_the_critical_path_has_no_hole_when_sends_block(name, ranks, microbatches):
    timeline = run(name, ranks, microbatches, replace(COSTS, blocking=True))
    path = explain.critical_path(timeline)
    assert path[0].start == timeline.first_start
    sends = {}  # how long a rank is kept after an action
    for rank, row in enumerate(zp.lower(timeline.schedule).rows):
        for step in row:
            if isinstance(step, Overlap) or step.kind < zp.Kind.SEND_F:
                last = parts(step)[0]
                sends[rank, last] = 0.0
            elif step.kind in (zp.Kind.SEND_F, zp.Kind.SEND_B):
                sends[rank, last] += COSTS.p2p
    for (before, hop), bound in zip(pairwise(path), bounds_of_path(timeline)[1:], strict=True):
        first = next(parts(s)[0] for s in timeline.schedule.rows[before.rank] if before.action in parts(s))
        kept = sends[before.rank, first]
        assert hop.start - before.end <= kept + 1e-9
        if bound == "rank":
            assert hop.start - before.end == pytest.approx(kept)
