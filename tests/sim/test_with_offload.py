"""Copies of activations to the host: their times and memory, and the rule that places them."""

import random
from dataclasses import replace

import pytest

import zeropipe as zp
from zeropipe.core.action import BACKWARD, OFFLOADING, Action, Kind, actions_of
from zeropipe.errors import ConfigError

NAMES = zp.names()


def random_copies(schedule, seed):
    """The schedule with OFFLOAD and RELOAD of random microbatches at random places."""
    rng, rows = random.Random(seed), []
    for row in schedule.rows:
        steps = [[step] for step in row]
        where = {action: index for index, step in enumerate(row) for action in actions_of([step])}
        for action, index in where.items():
            if action.kind in BACKWARD and rng.random() < 0.6:
                stage, _, microbatch, *_ = action
                forward = where[Action(stage, Kind.F, microbatch)]
                first, last = sorted(rng.choices(range(forward, index), k=2))
                steps[first].append(Action(stage, Kind.OFFLOAD, microbatch))
                steps[last].append(Action(stage, Kind.RELOAD, microbatch))
        rows.append([step for some in steps for step in some])
    return zp.Schedule.of(schedule.problem, schedule.placement, rows)


def random_costs(num_stages, seed):
    rng = random.Random(seed)
    some = lambda low, high: [round(rng.uniform(low, high), 2) for _ in range(num_stages)]  # noqa: E731
    return zp.Costs(
        f=some(0.5, 2), i=some(0.5, 2), w=some(0.2, 1), activation=some(1, 3), stash=some(0.1, 0.9), p2p=0.1,
        offload_time=some(0, 3), reload_time=some(0, 3), offload_size=some(0.2, 1),
    )  # fmt: skip


def reference_copies(timeline, costs, rank):
    """(start, end) of every copy of a rank, from the ends of its computations alone."""
    stages = timeline.schedule.num_stages
    times = {Kind.OFFLOAD: costs.column("offload_time", stages), Kind.RELOAD: costs.column("reload_time", stages)}
    free, ended, found = {Kind.OFFLOAD: 0.0, Kind.RELOAD: 0.0}, {}, {}
    ends = {span.action: span.end for span in timeline.spans(rank)}
    now = 0.0
    for action in actions_of(timeline.schedule.rows[rank]):
        if action.kind not in OFFLOADING:
            now = ends[action]
            continue
        key = action.stage, action.microbatch
        start = max(now, free[action.kind], ended.get(key, 0.0))
        free[action.kind] = ended[key] = start + times[action.kind][action.stage]
        found[action] = start, ended[key]
    return found


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("name", NAMES)
def test_times_and_memory_against_a_direct_computation(name, seed):
    plain = zp.build(name, ranks=4, microbatches=8)
    schedule, costs = random_copies(plain, seed), random_costs(plain.num_stages, seed)
    timeline, stages = zp.simulate(schedule, costs), plain.num_stages
    activation, stash, size = (costs.column(n, stages) for n in ("activation", "stash", "offload_size"))
    for rank in range(schedule.num_ranks):
        copies = reference_copies(timeline, costs, rank)
        events = list(timeline.offloading.events(rank))
        assert [action for action, _, _ in events] == list(copies)
        assert [time for _, *times in events for time in times] == pytest.approx(sum(copies.values(), ()))
        row = actions_of(schedule.rows[rank])
        spans = {span.action: span for span in timeline.spans(rank)}
        steps = {span.action: [s.action for s in step] for step in timeline.steps(rank) for span in step}
        during = memoryview(timeline.memory.during).cast("d")
        at = schedule.packed.offsets[rank]
        for action in (action for action in row if action.kind not in OFFLOADING):
            reload = action._replace(kind=Kind.RELOAD)
            if action.kind in BACKWARD and reload in copies:
                assert spans[action].start >= copies[reload][1] - 1e-9
            before = row[: row.index(steps[action][0])]  # of both actions of an Overlap
            level = sum(activation[a.stage] for a in [*before, *steps[action]] if a.kind is Kind.F)
            for stage, kind, microbatch, *_ in before:
                if kind is Kind.OFFLOAD:
                    ended = copies[Action(stage, kind, microbatch)][1] <= spans[action].start
                    level -= size[stage] if ended else 0.0
                freed = {Kind.B: activation[stage], Kind.I: activation[stage] - stash[stage], Kind.W: stash[stage]}
                level -= freed.get(kind, -size[stage] if kind is Kind.RELOAD else 0.0)
            assert during[at] == pytest.approx(level, abs=1e-9), str(action)
            at += 1


def test_a_copy_that_is_slow_delays_the_backward_and_nothing_else():
    schedule = zp.from_csv("0F0,0OFFLOAD0,0F1,0F2,0RELOAD0,0B0,0B1,0B2")
    plain = zp.from_csv("0F0,0F1,0F2,0B0,0B1,0B2")
    for bandwidth, delay in ((None, 0), (2.0, 0.5), (1.0, 1), (0.5, 2), (0.25, 6)):
        costs = zp.Costs(offload_bandwidth=bandwidth)
        assert zp.simulate(schedule, costs).makespan == zp.simulate(plain, costs).makespan + delay
    both = zp.simulate(schedule, zp.Costs(offload_bandwidth=1.0, reload_bandwidth=0.5))
    assert [(start, end) for _, start, end in both.offloading.events(0)] == [(1.0, 2.0), (3.0, 5.0)]
    assert zp.simulate(schedule, zp.Costs(offload_time=0.5, reload_time=0.25)).makespan == 9.25
    assert both.peak_host_memory == (1.0,)
    assert zp.simulate(plain).peak_host_memory == (0.0,)
    again = zp.from_json(zp.to_json(both))
    assert again == both
    assert again.offloading == both.offloading


@pytest.mark.parametrize("bandwidth", [None, 2.0, 1.0, 0.5, 0.1])
@pytest.mark.parametrize("name", NAMES)
def test_auto_takes_no_time(name, bandwidth):
    plain = zp.build(name, ranks=4, microbatches=12)
    costs = zp.Costs(offload_bandwidth=bandwidth, stash=0.25, p2p=0.05)
    one = zp.with_offload(plain, costs)
    zp.check(one)
    before, after = zp.simulate(plain, costs), zp.simulate(one, costs)
    assert after.makespan == pytest.approx(before.makespan, rel=1e-12)
    assert max(after.peak_memory) <= max(before.peak_memory)
    for rank in range(one.num_ranks):
        starts = {span.action: span.start for span in after.spans(rank)}
        backward = {(a.stage, a.microbatch): start for a, start in starts.items() if a.kind in BACKWARD}
        for action, _, end in after.offloading.events(rank) if after.offloading else ():
            assert end <= backward[action.stage, action.microbatch] + 1e-9


def test_auto_with_uneven_stages_and_shards():
    plain = zp.build("interleaved", ranks=4, microbatches=16, stages_per_rank=3)
    for seed in range(8):
        costs = random_costs(12, seed)
        before, after = zp.simulate(plain, costs), zp.simulate(zp.with_offload(plain, costs), costs)
        assert after.makespan == pytest.approx(before.makespan, rel=1e-12)
    costs = zp.Costs(
        offload_bandwidth=1.0, shards="regather", full_weights=1.0, full_gradients=1.0, unshard=0.3, reduce=0.4
    )
    one = zp.simulate(zp.with_offload(plain, costs), costs)
    assert one.makespan == pytest.approx(zp.simulate(plain, costs).makespan)
    assert max(one.peak_memory) < 0.5 * max(zp.simulate(plain, costs).peak_memory)


def test_a_share_is_a_share():
    plain = zp.build("interleaved", ranks=4, microbatches=16)
    for share in (0.0, 0.25, 0.5):
        one = zp.with_offload(plain, offload=share)
        for row in one.rows:
            offloaded = [a for a in actions_of(row) if a.kind is Kind.OFFLOAD]
            assert len(offloaded) == share * 32
            assert {a.stage // 4 for a in offloaded} <= {0}  # the first stage of a rank has the longest lifetime
    half = zp.simulate(zp.with_offload(zp.build("gpipe", ranks=2, microbatches=16), offload=0.5))
    assert max(half.peak_memory) <= 10  # spread over the microbatches, of 16


def test_a_memory_limit_is_kept_with_few_copies():
    plain = zp.build("1f1b", ranks=4, microbatches=16)
    for limit in (3.0, 2.0):
        costs = zp.Costs(offload_bandwidth=2.0, memory_limit=limit)
        one = zp.with_offload(plain, costs, "fit")
        timeline = zp.simulate(one, costs)
        assert max(timeline.peak_memory) <= limit
        assert timeline.makespan == zp.simulate(plain, costs).makespan
        needs = [peak > limit for peak in zp.simulate(plain, costs).peak_memory]
        assert [any(a.kind in OFFLOADING for a in actions_of(row)) for row in one.rows] == needs
    with pytest.raises(ConfigError, match=r"rank 0 needs 2 with all .* than memory_limit=0\.5"):
        zp.with_offload(plain, zp.Costs(offload_bandwidth=2.0, memory_limit=0.5), "fit")
    with pytest.raises(ConfigError, match="has no limit to keep"):
        zp.with_offload(plain, offload="fit")


@pytest.mark.parametrize("ranks", [4, 8])
def test_claims_of_pipeoffload(ranks):
    """arXiv 2503.01328, abstract: at least half of the activations, and potentially all, are offloaded at no cost, and

    then the memory of a device falls with the number of stages. Here the copies of both directions together take as
    long as the computations of a microbatch (k = 1 there), then two thirds of that.
    """
    for each, is_linear in ((1.5, False), (1.0, True)):
        peaks = []
        for count in (2, 4, 8):  # stages per rank, of one model
            plain = zp.build("interleaved", ranks=ranks, microbatches=32, stages_per_rank=count)
            part = dict.fromkeys(("f", "i", "w", "activation"), 1 / count)
            costs = zp.Costs(**part, offload_time=each / count, reload_time=each / count)
            one = zp.with_offload(plain, costs)
            before, after = zp.simulate(plain, costs), zp.simulate(one, costs)
            assert after.makespan == pytest.approx(before.makespan)
            num_offloaded = (one.offloading.num_codes - one.num_actions) / 2
            assert num_offloaded > 0.85 * plain.num_stages * 32
            assert max(after.peak_memory) < 0.5 * max(before.peak_memory)
            peaks.append(max(after.peak_memory))
        assert peaks == sorted(peaks, reverse=True)
        assert not is_linear or peaks[-1] == peaks[0] / 4


@pytest.mark.parametrize("offload", ["all", -0.1, 1.5, True, None])
def test_wrong_shares(offload):
    with pytest.raises(ConfigError, match="must be auto, fit, or a share from 0 to 1"):
        zp.with_offload(zp.build("1f1b", ranks=2, microbatches=4), offload=offload)


def test_slices_are_refused():
    sliced = zp.build("seq1f1b", ranks=2, microbatches=4, slices=2)
    with pytest.raises(ConfigError, match=r"offload=fit: .* whole microbatches, and .* 2 slices; use one"):
        zp.with_offload(sliced, offload="fit")


def test_auto_takes_no_time_where_sends_block():
    schedule = zp.build("dualpipev", ranks=2, microbatches=6)
    costs = zp.Costs(
        f=[0.456, 0.248, 0.203, 0.191], i=1.004, w=1.611, blocking=True, bandwidth=5.0, message=1.0, activation=1.311,
        offload_bandwidth=1, reload_bandwidth=1,
    )  # fmt: skip
    copied = zp.simulate(zp.with_offload(schedule, costs, "auto"), costs)
    assert copied.makespan <= zp.simulate(schedule, costs).makespan * (1 + 1e-9)


def test_copies_that_lower_no_peak_are_left_out():
    """Before the first backward, all activations of the step must be on the device again."""
    row = zp.build("1f1b", ranks=8, microbatches=12).rows[0]
    problem = zp.Problem(1, 1, 12)
    schedule = zp.Schedule.of(problem, zp.linear(problem), [row], "row")
    slow = zp.Costs(f=1, i=1, w=1, offload_time=3.7, reload_time=3.7)
    assert zp.with_offload(schedule, slow).offloading is None
    fast = replace(slow, offload_time=0.25, reload_time=0.25)
    copied = zp.with_offload(schedule, fast)
    assert copied.offloading is not None
    assert zp.simulate(copied, fast).peak_memory[0] < zp.simulate(schedule, fast).peak_memory[0]
