"""Sharded stages in the simulator: a link of their own, memory of whole weights and gradients, causes of waiting."""

import json
from functools import partial
from itertools import pairwise

import pytest

import zeropipe as zp
from zeropipe.core import explain, jit
from zeropipe.core.action import Action, Kind, Overlap, actions_of
from zeropipe.sim.fit import fit


def sim(name="1f1b", ranks=1, microbatches=3, **costs):
    return zp.simulate(zp.build(name, ranks=ranks, microbatches=microbatches), zp.Costs(**{"shards": "keep"} | costs))


def lane(timeline, rank=0):
    return [(str(span.action), span.start, span.end) for span in timeline.sharding_spans(rank)]


def test_one_rank_gathers_computes_and_reduces():
    timeline = sim(unshard=2, reduce=3, f=1, b=2)
    assert lane(timeline) == [("0UNSHARD", 0, 2), ("0REDUCE_GRAD", 11, 14)]
    assert timeline.makespan == 2 + 3 * 3 + 3
    assert explain.idle_times(timeline) == (explain.Idle(0, 0, 0, 0, 0, 5),)
    gaps = [(gap.start, gap.end, gap.cause) for gap in explain.find_gaps(timeline)]
    assert gaps == [(0, 2, "sharding"), (11, 14, "sharding")]


def test_a_stage_goes_through_its_units():
    """F starts with the first unit and ends after the last; a reduce begins within the last W."""
    timeline = sim("zb-h1", microbatches=1, unshard=4, reduce=4, units=4)
    assert [(str(s.action), s.start, s.end) for s in timeline.spans(0)] == [
        ("0F0", 1, 4.25), ("0I0", 4.25, 5.25), ("0W0", 5.25, 6.25),
    ]  # fmt: skip
    assert lane(timeline) == [("0UNSHARD", 0, 4), ("0REDUCE_GRAD", 5.5, 9.5)]
    quick = sim("zb-h1", microbatches=1, reduce=0.4, units=4)
    assert lane(quick)[1] == ("0REDUCE_GRAD", 2.25, pytest.approx(3.1))  # only the last unit is left


def test_a_w_in_parts_ends_with_its_last_part():
    schedule = zp.fill_gaps(zp.build("zb-h1", ranks=1, microbatches=1), weight_parts=2)
    timeline = zp.simulate(schedule, zp.Costs(shards="keep", reduce=4, units=4))
    assert lane(timeline)[1] == ("0REDUCE_GRAD", 2.5, 6.5)  # of the first part's two units


@pytest.mark.parametrize("name", ["1f1b", "interleaved", "zbv", "dualpipe", "dualpipev", "interleaved-zb"])
@pytest.mark.parametrize("policy", ["keep", "regather"])
def test_what_costs_nothing_changes_nothing(name, policy):
    schedule = zp.build(name, ranks=4, microbatches=8)
    whole, sharded = zp.simulate(schedule), zp.simulate(schedule, zp.Costs(shards=policy))
    assert (sharded.start, sharded.end, sharded.memory) == (whole.start, whole.end, whole.memory)
    assert explain.idle_times(sharded) == explain.idle_times(whole)


@pytest.mark.parametrize("name", ["1f1b", "interleaved", "zbv", "dualpipe", "1f1b-overlap"])
@pytest.mark.parametrize("policy", ["keep", "regather"])
def test_the_laws_of_a_sharded_timeline(name, policy):
    """The Program's order on one link, F after its weights, and every idle moment has a cause."""
    schedule = zp.build(name, ranks=4, microbatches=8)
    timeline = zp.simulate(schedule, zp.Costs(shards=policy, unshard=0.7, reduce=1.3, units=2, p2p=0.1))
    program = zp.lower(schedule, shards=policy)
    for rank in range(4):
        moves = list(timeline.sharding_spans(rank))
        wanted = [a for a in program.rows[rank] if getattr(a, "kind", None) in (Kind.UNSHARD, Kind.REDUCE_GRAD)]
        assert [span.action for span in moves] == wanted
        assert all(a.end <= b.start + 1e-9 for a, b in pairwise(moves))
        for span in timeline.spans(rank):
            if span.action.kind is Kind.F:
                mine = Action(span.action.stage, Kind.UNSHARD, 0)
                gathers = [m for m in moves if m.action == mine and m.start < span.start]
                assert gathers[-1].start + 0.35 <= span.start + 1e-9
                assert gathers[-1].end <= span.end
        causes = explain.idle_times(timeline)[rank]
        assert causes.total == pytest.approx(timeline.makespan - timeline.busy[rank])
        gaps = [gap for gap in explain.find_gaps(timeline) if gap.rank == rank]
        pieces = [sum(gap.end - gap.start for gap in gaps if gap.cause == cause) for cause in explain.CAUSES]
        assert pieces == pytest.approx(causes)
    assert timeline.makespan == max(span.end for rank in range(4) for span in timeline.sharding_spans(rank))
    assert zp.from_json(zp.to_json(timeline)) == timeline


def test_weights_and_gradients_are_memory_while_they_are_whole():
    """1F1B on one rank keeps one microbatch; gradients come with the first B."""
    keep = sim(full_weights=10, full_gradients=100, weights=1000, activation=1)
    during = list(memoryview(keep.memory.during).cast("d"))
    assert during == [1011, 1111, 1111, 1111, 1111, 1111]
    regather = sim(shards="regather", full_weights=10, full_gradients=100, weights=1000, activation=1, units=4)
    assert regather.peak_memory == (1000 + 5 + 100 + 1,)  # two of four units


@pytest.mark.parametrize("gradients", ["whole", "rolling"])
def test_a_stage_that_waits_has_only_the_first_of_its_weights(gradients):
    """Each F and B is followed by one of the other stage, which is gathered meanwhile."""
    costs = {"shards": "regather", "activation": 0, "gathered_weights": 10, "gradients": gradients}
    schedule = zp.build("interleaved", ranks=1, microbatches=1, stages_per_rank=2)
    for sizes, before in (({"started_weights": 4}, 4), ({}, 10)):
        memory = zp.simulate(schedule, zp.Costs(**costs, **sizes)).memory
        assert list(memoryview(memory.during).cast("d")) == [10 + before, 10 + before, 10 + before, 10]


def test_the_halves_of_an_overlap_share_what_is_gathered():
    whole = zp.build("1f1b", ranks=1, microbatches=2)
    f0, b0, f1, b1 = actions_of(whole.rows[0])
    schedule = zp.Schedule.of(whole.problem, whole.placement, [[f0, Overlap(f1, b0), b1]], "overlapped")
    costs = zp.Costs(shards="regather", activation=0, gathered_weights=10, started_weights=4)
    assert list(memoryview(zp.simulate(schedule, costs).memory.during).cast("d")) == [10, 10, 10, 10]


def test_what_an_i_computed_again_counts_beside_full_weights():
    """Checkpointing keeps 1 after F and 3 after I, at whose end the weights are still whole."""
    timeline = sim("zb-h1", microbatches=1, full_weights=2, activation=1, stash=3)
    assert timeline.peak_memory == (5.0,)


def test_memory_goes_when_the_reduce_has_ended():
    """Two stages on one rank: the second one's gradients are gone, or not, when the first one's last B starts."""
    schedule = zp.build("interleaved", ranks=1, microbatches=2, stages_per_rank=2)
    sizes = {"shards": "keep", "full_gradients": [100, 10], "full_weights": [0, 0], "activation": 0}
    for reduce, last in ((0, 100), (0.5, 110)):
        timeline = zp.simulate(schedule, zp.Costs(**sizes, reduce=reduce))
        during = dict(zip(map(str, actions_of(schedule.rows[0])), memoryview(timeline.memory.during).cast("d")))
        assert during["0B1"] == last


def test_the_end_that_waits_for_a_reduce_is_named():
    timeline = sim("zb-h1", ranks=2, microbatches=4, reduce=[5, 1])
    path = explain.critical_path(timeline)
    assert (str(path[-1].action), path[-1].rank) == ("0REDUCE_GRAD", 0)
    assert path[-1].end == timeline.makespan
    assert str(path[-2].action) == "0W3"
    assert explain.critical_path(sim("zb-h1", ranks=2, microbatches=4))[-1].action.kind is Kind.W
    late = sim(unshard=2)
    reasons, first = explain.find_reasons(late), explain.critical_indices(late)[0]
    assert reasons.waited[first] < 0
    assert reasons.gather_start[first] < explain.critical_path(late)[0].start  # it waited for its weights


def test_bandwidth_gives_times():
    timeline = sim(full_weights=6, full_gradients=12, shard_bandwidth=3)
    assert [(name, end - start) for name, start, end in lane(timeline)] == [("0UNSHARD", 2), ("0REDUCE_GRAD", 4)]


@pytest.mark.parametrize("policy", ["keep", "regather"])
def test_a_fit_gives_the_costs_back(policy):
    given = {"unshard": 0.5, "reduce": 1.5, "units": 4, "full_weights": 6, "full_gradients": 10}
    run = sim("zbv", 2, 8, shards=policy, **given)
    costs = fit(run)
    assert (costs.shards, costs.units) == (policy, 4)
    for name in ("unshard", "reduce", "full_weights", "full_gradients"):
        assert costs.column(name, 4) == pytest.approx([given[name]] * 4)
    again = zp.simulate(run.schedule, costs)
    assert again.peak_memory == pytest.approx(run.peak_memory)
    assert again.makespan == pytest.approx(run.makespan, rel=0.1)


def test_compiled_kernels_say_the_same(monkeypatch):
    plain = sim("zbv", 4, 8, unshard=0.7, reduce=1.3, units=3, full_weights=2, full_gradients=3)
    causes, gaps = explain.idle_times(plain), explain.find_gaps(plain)
    for module in ("core.shard_actions", "core.explain", "core.timeline", "sim.simulate"):
        monkeypatch.setattr(f"zeropipe.{module}.arrays", lambda size: jit.Compiled)
    explain._find_reasons.cache_clear()
    compiled = sim("zbv", 4, 8, unshard=0.7, reduce=1.3, units=3, full_weights=2, full_gradients=3)
    assert compiled == plain
    assert compiled.makespan == plain.makespan
    assert (explain.idle_times(compiled), explain.find_gaps(compiled)) == (causes, gaps)
    explain._find_reasons.cache_clear()


@pytest.mark.parametrize(
    "costs, words",
    [
        ({"unshard": 1}, "unshard is set for unsharded stages: set shards='keep' or 'regather'"),
        ({"shards": "always"}, "shards='always': must be 'keep'"),
        ({"shards": "keep", "units": 0}, "units=0: must be an integer from 1"),
        ({"shards": "keep", "reduce": -1}, "reduce=-1: must be a non-negative number"),
        ({"shards": "keep", "shard_bandwidth": 0}, "bandwidth=0"),
    ],
)
def test_costs_that_mean_nothing_are_refused(costs, words):
    with pytest.raises(zp.ConfigError, match=words):
        zp.Costs(**costs)


def test_the_command_line(tmp_path, run):
    run = partial(run, "simulate", "zb-h1", "-p", "2", "-m", "4")
    flags = ["--shards", "keep", "--unshard", "0.5", "--reduce", "2", "--units", "4"]
    status, said, _ = run(*flags)
    assert status == 0
    assert "shards" in said
    assert "the end waits 1.25 for 0REDUCE_GRAD on rank 0" in " ".join(said.split())
    wanted = sim("zb-h1", 2, 4, unshard=0.5, reduce=2, units=4)
    assert json.loads(run(*flags, "--json")[1])["makespan"] == wanted.makespan
    costs = tmp_path / "costs.toml"
    costs.write_text('shards = "regather"\nunshard = 0.5\nreduce = 2\n')
    wanted = sim("zb-h1", 2, 4, shards="regather", unshard=0.5, reduce=2)
    assert json.loads(run("--costs", str(costs), "--json")[1])["makespan"] == wanted.makespan
    assert run("--unshard", "1")[0] == 2


def test_a_reduce_hides_behind_a_full_backward():
    """FSDP reduces unit by unit inside the last B, as it does inside the last W."""
    for name in ("1f1b", "zb-h1"):
        timeline = sim(name, microbatches=4, reduce=1, units=4)
        assert timeline.makespan == pytest.approx(4 * 3 + 0.25), f"{name}: the last unit is left"


@pytest.mark.parametrize("name", ["1f1b", "zb-h1", "interleaved", "zbv", "1f1b-overlap"])
@pytest.mark.parametrize("reduce", [0.4, 6.0])
@pytest.mark.parametrize("units", [1, 4])
def test_fit_finds_the_time_of_a_reduce(name, reduce, units):
    """Both if the link is always busy, and if it waits for gradients."""
    timeline = sim(name, ranks=2, microbatches=4, unshard=0.5, reduce=reduce, units=units)
    found = fit(timeline)
    assert found.reduce == pytest.approx((reduce,) * timeline.schedule.num_stages)
    assert zp.simulate(timeline.schedule, found).makespan == pytest.approx(timeline.makespan)
