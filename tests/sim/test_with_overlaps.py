"""Overlaps of neighbouring F and B of any schedule."""

import random

import pytest

import zeropipe as zp
from zeropipe.core.action import BACKWARD, Kind, Overlap, actions_of

NAMES = zp.names()


def some_costs(num_stages, seed):
    rng = random.Random(seed)
    some = lambda low, high: [round(rng.uniform(low, high), 2) for _ in range(num_stages)]  # noqa: E731
    return zp.Costs(f=some(0.5, 2), i=some(0.5, 2), w=some(0.2, 1), p2p=0.1)


@pytest.mark.parametrize("name", NAMES)
def test_every_schedule_keeps_its_order_and_ends(name):
    for seed, (ranks, microbatches) in enumerate([(2, 8), (4, 12)]):
        try:
            schedule = zp.build(name, ranks=ranks, microbatches=microbatches)
        except zp.ConfigError:
            continue
        costs = some_costs(schedule.num_stages, seed)
        joined = zp.with_overlaps(schedule, costs)
        zp.check(joined)
        for one, other in zip(schedule.rows, joined.rows):
            plain, now = actions_of(one), actions_of(other)
            moved = [(a, b) for a, b in zip(plain, now) if a != b]
            assert sorted(plain) == sorted(now)
            assert all({a.kind for a in pair} & BACKWARD for pair in moved)  # F is first in an Overlap
        assert zp.simulate(joined, costs).makespan > 0


def test_one_rank_runs_the_next_forward_with_each_backward():
    joined = zp.with_overlaps(zp.build("1f1b", ranks=1, microbatches=4))
    text = [str(step) for step in joined.rows[0]]
    assert text == ["0F0", "(0F1;0B0)OVERLAP_F_B", "(0F2;0B1)OVERLAP_F_B", "(0F3;0B2)OVERLAP_F_B", "0B3"]


@pytest.mark.parametrize("name", ["1f1b", "zbv", "interleaved", "zb-h1", "v-half", "hanayo"])
def test_both_can_start_when_the_first_one_does(name):
    schedule = zp.build(name, ranks=4, microbatches=12)
    costs = some_costs(schedule.num_stages, 3)
    joined, timeline = zp.with_overlaps(schedule, costs), zp.simulate(schedule, costs)
    spans = {span.action: span for rank in range(4) for span in timeline.spans(rank)}
    pairs = [step for row in joined.rows for step in row if isinstance(step, Overlap)]
    assert pairs
    for pair in pairs:
        start = min(spans[action].start for action in pair)
        for action in pair:
            sources = [other for other in spans if is_source(other, action, schedule.num_stages)]
            assert all(spans[other].end <= start + 1e-9 for other in sources)


def is_source(one, action, num_stages):
    if one.microbatch != action.microbatch:
        return False
    if action.kind is Kind.F:
        return one.kind is Kind.F and one.stage == action.stage - 1
    own = one.kind is Kind.F and one.stage == action.stage
    return own or (one.kind in BACKWARD and one.stage == action.stage + 1)


def test_phases_of_layers_make_it_faster():
    from zeropipe.core.phases import LayerPhases, PhaseTimes

    layer = LayerPhases(PhaseTimes(4, 9, 2), PhaseTimes(7, 7), PhaseTimes(5, 5, 4), PhaseTimes(9, 6))
    costs = zp.Costs(phases=[layer._asdict()] * 4)
    schedule = zp.build("1f1b", ranks=1, microbatches=8)
    assert zp.simulate(zp.with_overlaps(schedule, costs), costs).makespan < 0.7 * zp.simulate(schedule, costs).makespan


def test_other_numbers_of_microbatches_and_copies():
    joined = zp.with_overlaps(zp.build("1f1b", ranks=2, microbatches=4))
    assert joined.rebuild(8) == zp.with_overlaps(zp.build("1f1b", ranks=2, microbatches=8))
    with pytest.raises(zp.ConfigError, match="make Overlaps first"):
        zp.with_overlaps(zp.with_offload(zp.build("1f1b", ranks=2, microbatches=4), offload=1.0))
    dualpipev = zp.build("dualpipev", ranks=2, microbatches=8)
    assert [step for row in zp.with_overlaps(dualpipev).rows for step in row if isinstance(step, Overlap)]


def test_on_the_command_line(run, tmp_path):
    out = tmp_path / "joined.csv"
    assert run("draw", "1f1b", "--ranks", 1, "--microbatches", 4, "--overlaps", "-o", out)[0] == 0
    assert out.read_text().count("OVERLAP_F_B") == 3
    assert run("check", out)[0] == 0
