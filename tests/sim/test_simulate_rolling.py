"""Rolling gradients in the simulator: a reduce for each microbatch on the link, memory of a few units."""

from __future__ import annotations

from itertools import pairwise

import pytest

import zeropipe as zp
from zeropipe.core import explain, jit
from zeropipe.core.action import Kind
from zeropipe.sim.fit import fit

NAMES = ["1f1b", "zb-h1", "interleaved", "zbv", "dualpipev", "dualpipe", "hanayo"]
POLICIES = ["rolling", "rolling:1"]
SIZES = {"shards": "keep", "units": 4, "full_gradients": 8, "activation": 0}


def sim(name="1f1b", ranks=1, microbatches=3, **costs):
    return zp.simulate(zp.build(name, ranks=ranks, microbatches=microbatches), zp.Costs(**{**SIZES, **costs}))


def lane(timeline, rank=0):
    return [(str(span.action), span.start, span.end) for span in timeline.sharding_spans(rank)]


def during(timeline, rank=0):
    begin, stop = timeline.schedule.packed.offsets[rank : rank + 2]
    return list(memoryview(timeline.memory.during).cast("d")[begin:stop])


def test_each_microbatch_is_reduced_within_its_backward():
    """B takes 2: its units end at 0.5, 1, 1.5 and 2 of it, each is reduced in 0.25."""
    timeline = sim(reduce=1, gradients="rolling")
    reduces = [("0REDUCE_GRAD", start + 0.5, start + 2.25) for start in (1, 4, 7)]
    assert lane(timeline)[1:] == reduces
    assert timeline.makespan == 9.25  # only the last unit is left


def test_a_unit_is_computed_and_one_is_reduced():
    """Two of four units; one of them is still being reduced while the next F runs."""
    timeline = sim(reduce=1, gradients="rolling")
    assert during(timeline) == [0, 4, 2, 4, 2, 4]
    assert during(sim(reduce=1)) == [0, 8, 8, 8, 8, 8]
    assert during(sim(reduce=1, gradients="rolling", rolling_gradients=5)) == [0, 5, 2, 5, 2, 5]


def test_gradients_wait_for_a_slow_link():
    """A reduce takes 4, three of its units until there is room; F goes on meanwhile."""
    timeline = sim(reduce=4, gradients="rolling", microbatches=2)
    assert lane(timeline)[1:] == [("0REDUCE_GRAD", 1.5, 5.5), ("0REDUCE_GRAD", 5.5, 9.5)]
    assert [(str(s.action), s.start) for s in timeline.spans(0)] == [("0F0", 0), ("0B0", 1), ("0F1", 3), ("0B1", 4.5)]


def test_stages_take_turns_with_one_of_them_whole():
    schedule = zp.build("interleaved", ranks=1, microbatches=4, stages_per_rank=2)
    peaks = {}
    for policy in ("whole", "rolling:1", "rolling"):
        timeline = zp.simulate(schedule, zp.Costs(**SIZES, gradients=policy, reduce=0.2))
        peaks[policy] = timeline.peak_memory[0]
    assert peaks == {"whole": 8 + 8, "rolling:1": 8 + 2, "rolling": 4}  # a unit is still being reduced


def test_an_overlap_is_reduced_after_it():
    timeline = sim("1f1b-overlap", microbatches=4, reduce=0.4, gradients="rolling")
    ends = [step[0].end for step in timeline.steps(0) if len(step) == 2]
    starts = [start for name, start, _ in lane(timeline) if name.endswith("GRAD")]
    assert set(ends) < set(starts)
    assert timeline.peak_memory[0] >= 8


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("policy", POLICIES)
def test_the_laws_of_rolling_gradients(name, policy):
    """The Program's order on one link, no more memory than with whole ones, and no reduce costs no time."""
    schedule = zp.build(name, ranks=4, microbatches=8)
    costs = {**SIZES, "activation": 1, "unshard": 0.7, "p2p": 0.1}
    rolling = zp.simulate(schedule, zp.Costs(**costs, gradients=policy, reduce=0.3))
    whole = zp.simulate(schedule, zp.Costs(**costs, reduce=0.3))
    assert all(a <= b for a, b in zip(rolling.peak_memory, whole.peak_memory))
    program = zp.lower(schedule, "keep", policy)
    for rank in range(4):
        moves = list(rolling.sharding_spans(rank))
        wanted = [a for a in program.rows[rank] if getattr(a, "kind", None) in (Kind.UNSHARD, Kind.REDUCE_GRAD)]
        assert [span.action for span in moves] == wanted
        assert all(a.end <= b.start + 1e-9 for a, b in pairwise(moves))
        assert explain.idle_times(rolling)[rank].total == pytest.approx(rolling.makespan - rolling.busy[rank])
    free = zp.simulate(schedule, zp.Costs(**costs, gradients=policy, reduce=0))
    assert (free.start, free.end) == tuple(
        getattr(zp.simulate(schedule, zp.Costs(**costs)), x) for x in ("start", "end")
    )
    for timeline in (rolling, free):
        assert list(memoryview(timeline.memory.after).cast("d"))[-1] >= 0
    assert zp.from_json(zp.to_json(rolling)) == rolling


def test_compiled_kernels_say_the_same(monkeypatch):
    given = {"unshard": 0.7, "reduce": 1.3, "full_weights": 2, "gradients": "rolling:1"}
    plain = sim("interleaved", 4, 8, **given)
    for module in ("core.shard_actions", "sim.simulate"):
        monkeypatch.setattr(f"zeropipe.{module}.arrays", lambda size: jit.Compiled)
    assert sim("interleaved", 4, 8, **given) == plain


@pytest.mark.parametrize("name, policy", [("1f1b", "rolling"), ("zbv", "rolling"), ("interleaved", "rolling:1")])
def test_a_fit_gives_the_policy_back(name, policy):
    run = sim(name, 2, 8, gradients=policy, reduce=0.4, unshard=0.5, full_weights=6)
    costs = fit(run)
    assert costs.gradients == policy
    assert costs.reduce == pytest.approx((0.4,) * run.schedule.num_stages)
    assert zp.simulate(run.schedule, costs).makespan == pytest.approx(run.makespan, rel=0.05)


def test_policies_have_names():
    with pytest.raises(zp.ConfigError, match="gradients='never': must be 'whole', 'rolling', or 'rolling:N'"):
        zp.Costs(shards="keep", gradients="never")
    with pytest.raises(zp.ConfigError, match="gradients is set for unsharded stages"):
        zp.Costs(gradients="rolling")
