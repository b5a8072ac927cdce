"""Costs fitted to a timeline give that timeline back."""

from array import array
from dataclasses import replace

import pytest

import zeropipe as zp
from zeropipe.core.explain import CAUSES, critical_indices, find_gaps, find_reasons, idle_times
from zeropipe.sim.attribution import residuals
from zeropipe.sim.fit import fit


@pytest.mark.parametrize(
    "name,ranks,microbatches",
    [
        ("1f1b", 4, 8),
        ("zbv", 4, 8),
        ("interleaved", 4, 8),
        ("v-half", 4, 8),
        ("zb-h1", 4, 8),
        ("gpipe", 2, 3),
        ("gpipe", 2, 1),
        ("1f1b", 1, 1),
        ("chimera", 3, 5),
        ("dualpipe", 4, 10),
        ("1f1b-overlap", 4, 8),
    ],
)
def test_a_simulated_timeline_is_reproduced(name, ranks, microbatches):
    schedule = zp.build(name, ranks=ranks, microbatches=microbatches)
    stages = range(schedule.num_stages)
    costs = zp.Costs(
        f=[1 + s / 10 for s in stages], i=[2 - s / 10 for s in stages], w=0.7, p2p=0.05,
        activation=[3 + s for s in stages], stash=1.0, unit="s",
    )  # fmt: skip
    timeline = zp.simulate(schedule, costs)
    again = zp.simulate(schedule, fit(timeline))
    assert again.makespan == pytest.approx(timeline.makespan)
    assert again.bubble == pytest.approx(timeline.bubble)
    assert again.peak_memory == pytest.approx(timeline.peak_memory)
    for residual in residuals(timeline, again):
        assert residual.predicted == pytest.approx(residual.measured)
        assert residual.delay == pytest.approx(0, abs=1e-9)


def test_overlap_is_fitted_from_pairs_of_two_stages():
    schedule = zp.build("dualpipev", ranks=4, microbatches=10)
    timeline = zp.simulate(schedule, zp.Costs(f=1, b=2, overlap=2.5, i=1, w=1, activation=3, stash=1, weights=10))
    again = zp.simulate(schedule, fit(timeline))
    assert again.makespan == pytest.approx(timeline.makespan)
    assert again.peak_memory == pytest.approx(timeline.peak_memory)
    assert {r.kind for r in residuals(timeline, timeline)} == {"F", "B", "I", "W", "F+B"}


@pytest.mark.parametrize("run,asked,total", [("1f1b", "zb-h1", 27), ("zb-h1", "1f1b", 33), ("gpipe", "zb1p", 27)])
def test_costs_of_one_schedule_serve_another(run, asked, total):
    """A whole backward is split in two equal parts where no part was seen."""
    costs = fit(zp.simulate(zp.build(run, ranks=4, microbatches=8)))
    assert zp.simulate(zp.build(asked, ranks=4, microbatches=8), costs).makespan == pytest.approx(total)


def test_a_run_whose_clocks_disagree_can_be_fitted():
    """Rank 1's clock is behind: it seems to start before its inputs are made."""
    timeline = zp.simulate(zp.build("zbv", ranks=2, microbatches=4), zp.Costs(p2p=0.25, unit="s"))
    start, end = array("d", timeline.start), array("d", timeline.end)
    for at in range(timeline.schedule.packed.offsets[1], len(start)):
        start[at] -= 0.75
        end[at] -= 0.75
    skewed = replace(timeline, start=start.tobytes(), end=end.tobytes(), measured=True)
    for rank, causes in enumerate(idle_times(skewed)):
        assert min(causes) >= 0
        assert sum(causes) + skewed.busy[rank] == pytest.approx(skewed.makespan)
        pieces = [sum(g.end - g.start for g in find_gaps(skewed) if (g.rank, g.cause) == (rank, c)) for c in CAUSES]
        assert pieces == pytest.approx(list(causes))
    reasons, first = find_reasons(skewed), critical_indices(skewed)[0]
    assert (reasons.waited[first], reasons.previous[first]) == (-1, -1)
    costs = fit(skewed)
    assert 0 <= costs.p2p <= 0.5
    assert zp.simulate(skewed.schedule, costs).makespan == pytest.approx(skewed.makespan, rel=0.1)


def test_a_stash_larger_than_the_activation_is_kept():
    """As with full checkpointing: F keeps a block's input, I computes the rest again and leaves it for W."""
    schedule = zp.build("zb-h1", ranks=4, microbatches=8)
    timeline = zp.simulate(schedule, zp.Costs(activation=1, stash=5))
    assert zp.simulate(schedule, fit(timeline)).peak_memory == pytest.approx(timeline.peak_memory)
    assert max(timeline.peak_memory) > 5
