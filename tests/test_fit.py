"""Costs fitted to a timeline give that timeline back."""

import pytest

import zeropipe as zp
from zeropipe.sim.fit import fit, residuals


@pytest.mark.parametrize(
    "name,ranks,microbatches",
    [("1f1b", 4, 8), ("zbv", 4, 8), ("interleaved", 4, 8), ("v-half", 4, 8), ("zb-h1", 4, 8), ("gpipe", 2, 3)],
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
        assert residual.late == pytest.approx(0, abs=1e-9)


def test_overlap_is_fitted_from_pairs_of_two_stages():
    schedule = zp.build("dualpipev", ranks=4, microbatches=10)
    timeline = zp.simulate(schedule, zp.Costs(f=1, b=2, overlap=2.5, i=1, w=1))
    assert zp.simulate(schedule, fit(timeline)).makespan == pytest.approx(timeline.makespan)
    assert {r.kind for r in residuals(timeline, timeline)} == {"F", "B", "I", "W", "F+B"}
