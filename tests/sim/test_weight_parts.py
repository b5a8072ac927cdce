"""A W in several parts: what the checker, the texts, the simulator and `fill_gaps` make of it."""

import json
from collections import Counter
from dataclasses import replace

import pytest
from reference_simulator import reference_simulate

import zeropipe as zp
from zeropipe.core import jit
from zeropipe.core.action import Action, Kind
from zeropipe.errors import ConfigError, ScheduleError
from zeropipe.schedules.registry import entries
from zeropipe.sim.compare import compare
from zeropipe.sim.costs_file import load_costs
from zeropipe.sim.fill import _fill_rows, divide_weights
from zeropipe.sim.fit import fit

SPLIT = [entry.name for entry in entries() if entry.splits_backward]
COSTS = [
    zp.Costs(),
    zp.Costs(f=1, i=1.2, w=0.7, p2p=0.05, stash=0.5),
    zp.Costs(f=18, i=18, w=14, p2p=0.6, stash=0.4),
    zp.Costs(f=1, i=2, w=3, p2p=0.3, blocking=True, serial_links=True),
    zp.Costs(f=1, i=1, w=0, activation=1, stash=1.5),
]
TWO_RANKS = "0F0,0F1,0I0,0W0,0I1,0W1\n1F0,1I0,1W0,1F1,1I1,1W1\n"


def without_weights(schedule):
    return [
        [step for step in row if not (isinstance(step, Action) and step.kind is Kind.W)] for row in schedule.rows
    ]  # fmt: skip


def test_half_a_w_runs_where_a_whole_one_has_no_room():
    """Rank 1 waits half a unit for 1F1, and has no memory for 1F1 beside a whole W that waits."""
    schedule = zp.from_csv(TWO_RANKS)
    costs = zp.Costs(f=[2, 1], i=[1.5, 0.5], w=[0.25, 1], activation=[0.5, 1], memory_limit=1.5)
    whole, halves = (zp.fill_gaps(schedule, costs, weight_parts=parts) for parts in (1, 2))
    assert whole == schedule
    assert str(halves).splitlines() == [
        "0F0 0F1 0I0 0I1 0W0 0W0 0W1 0W1",
        "1F0 1I0 1W0 1F1 1I1 1W0 1W1 1W1",
    ]
    assert [zp.simulate(s, costs).makespan for s in (schedule, halves)] == [7.75, 7.5]
    assert zp.simulate(halves, costs).peak_memory == (1.0, 1.5)


@pytest.mark.parametrize("parts", [1, 2, 5])
@pytest.mark.parametrize("costs", COSTS, ids=range(len(COSTS)))
@pytest.mark.parametrize("name", SPLIT)
def test_filled_schedules_are_right_and_never_longer_or_larger(name, costs, parts):
    schedule = zp.build(name, ranks=4, microbatches=10)
    filled = zp.fill_gaps(schedule, costs, weight_parts=parts)
    zp.check(filled)
    assert without_weights(filled) == without_weights(schedule)
    before, after = zp.simulate(schedule, costs), zp.simulate(filled, costs)
    assert after.makespan <= before.makespan * (1 + 1e-9)
    assert all(new <= old * (1 + 1e-9) for new, old in zip(after.peak_memory, before.peak_memory, strict=True))
    assert sum(after.busy) == pytest.approx(sum(before.busy))


@pytest.mark.parametrize("policy", ["keep", "regather"])
@pytest.mark.parametrize("name", SPLIT)
def test_nor_where_stages_are_sharded(name, policy):
    """Parts of W change when weights are gathered, which counts as time and memory."""
    shards = {"unshard": 0.9, "reduce": 0.9, "units": 2, "full_weights": 0.9, "full_gradients": 0.7}
    costs = zp.Costs(f=0.5, i=0.3, w=1, stash=1.5, shards=policy, **shards)
    schedule = zp.build(name, ranks=4, microbatches=8)
    before = zp.simulate(schedule, costs)
    for limit in (None, max(before.peak_memory)):
        costs = replace(costs, memory_limit=limit)
        filled = zp.fill_gaps(schedule, costs, weight_parts=3)
        zp.check(filled)
        after = zp.simulate(filled, costs)
        assert after.makespan <= before.makespan * (1 + 1e-9)
        most = [limit or peak for peak in before.peak_memory]
        assert all(peak <= one * (1 + 1e-9) for peak, one in zip(after.peak_memory, most, strict=True))


@pytest.mark.parametrize("name", ["zb-h1", "v-half"])
def test_memory_buys_time(name):
    """The more a rank may keep, the later a W may run; the limit itself holds."""
    schedule = zp.build(name, ranks=4, microbatches=12)
    costs = zp.Costs(f=1, i=1.2, w=0.7, p2p=0.05, stash=0.5)
    tight = zp.simulate(schedule, costs)
    limit = 1.5 * max(tight.peak_memory)
    roomy = zp.Costs(f=1, i=1.2, w=0.7, p2p=0.05, stash=0.5, memory_limit=limit)
    filled = zp.simulate(zp.fill_gaps(schedule, roomy), roomy)
    assert filled.makespan < 0.98 * tight.makespan
    assert max(tight.peak_memory) < max(filled.peak_memory) <= limit * (1 + 1e-9)


def test_simulated_as_the_obvious_rules_say():
    schedule = zp.fill_gaps(zp.build("zbv", ranks=3, microbatches=7), COSTS[1], weight_parts=3)
    price = {Kind.F: 1, Kind.I: 1.2, Kind.W: 0.7 / 3}
    times = reference_simulate(schedule, lambda actions: sum(price[a.kind] for a in actions), lambda *_: 0.05)
    timeline = zp.simulate(schedule, COSTS[1])
    for rank in range(3):
        last = {span.action: (span.start, span.end) for span in timeline.spans(rank)}  # of a W: its last part
        for action, (start, end) in last.items():
            assert times[action] == pytest.approx((start, end))
    assert fit(timeline).column("w", 6) == pytest.approx([0.7] * 6)


def test_compiled_kernels_give_the_same(monkeypatch):
    schedule = zp.build("v-half", ranks=3, microbatches=7)
    plain = zp.fill_gaps(schedule, COSTS[1], weight_parts=3)
    monkeypatch.setattr(jit, "COMPILE_FROM_SIZE", 0)
    assert zp.fill_gaps(schedule, COSTS[1], weight_parts=3) == plain


def test_text_keeps_the_parts():
    schedule = zp.fill_gaps(zp.build("zbv", ranks=2, microbatches=4), COSTS[1], weight_parts=3)
    assert schedule.problem.num_weight_parts == 3
    assert zp.from_csv(zp.to_csv(schedule)) == schedule
    assert zp.from_json(zp.to_json(schedule)) == schedule
    program = zp.lower(schedule)
    assert Counter(str(program).split())["1W2"] == 3
    zp.check(program)


def test_a_file_of_before_has_full_weights():
    schedule = zp.build("zb-h1", ranks=2, microbatches=2)
    data = json.loads(zp.to_json(schedule))
    del data["num_weight_parts"]
    assert zp.from_json(json.dumps(data)) == schedule


def test_one_w_too_many_is_a_mistake_and_no_part():
    with pytest.raises(ScheduleError, match="rank 1, step 6: 1W1 is repeated: every action runs exactly once"):
        zp.check(zp.from_csv(TWO_RANKS.replace("1W1", "1W1,1W1")))


def test_parts_are_all_there():
    schedule = divide_weights(zp.from_csv(TWO_RANKS), 3)
    rows = [list(row) for row in schedule.rows]
    rows[0].remove(Action(0, Kind.W, 1))
    with pytest.raises(ScheduleError, match="0W1 is present 2 of 3 times: every W here has 3 parts"):
        zp.check(zp.Schedule.of(schedule.problem, schedule.placement, rows))
    rows[0] += [Action(0, Kind.W, 1)] * 2
    with pytest.raises(ScheduleError, match="rank 0, step 10: 0W1 is one too many: every W here has 3 parts"):
        zp.check(zp.Schedule.of(schedule.problem, schedule.placement, rows))


@pytest.mark.parametrize("wrong", [Action(1, Kind.W, 0), Action(1, Kind.I, 7), Action(7, Kind.I, 1)], ids=str)
def test_a_wrong_schedule_is_refused_before_it_is_cut(wrong):
    """A user's function may write anything."""
    schedule = zp.from_csv(TWO_RANKS)
    rows = [list(row) for row in schedule.rows]
    rows[1][-1] = wrong
    with pytest.raises(ScheduleError):
        zp.fill_gaps(zp.Schedule.of(schedule.problem, schedule.placement, rows))


def test_bad_numbers():
    schedule = zp.build("zb-h1", ranks=2, microbatches=2)
    for parts in (0, 65, 1.5, True):
        with pytest.raises(ConfigError, match="must be an integer from 1 to 64"):
            zp.fill_gaps(schedule, weight_parts=parts)
    with pytest.raises(ConfigError, match="zb-h1 has W in 2 parts already"):
        zp.fill_gaps(zp.fill_gaps(schedule, weight_parts=2))
    data = json.loads(zp.to_json(schedule)) | {"num_weight_parts": 10**30}
    with pytest.raises(ScheduleError, match="num_weight_parts is 1000"):
        zp.from_json(json.dumps(data))


def test_a_schedule_without_w_stays_as_it_is():
    schedule = zp.build("1f1b", ranks=2, microbatches=2)
    assert zp.fill_gaps(schedule) == schedule
    assert compare([schedule], zp.Costs(), weight_parts=4)[0].schedule == schedule


def test_costs_of_a_recorded_timeline(tmp_path):
    timeline = zp.simulate(zp.build("zbv", ranks=2, microbatches=4), zp.Costs(f=3, i=4, w=2))
    path = tmp_path / "recorded.json"
    path.write_text(zp.to_json(timeline))
    assert load_costs(str(path)).column("i", 4) == pytest.approx([4] * 4)
    path.write_text(zp.to_json(timeline.schedule))
    with pytest.raises(ConfigError, match="a schedule without times"):
        load_costs(str(path))


def test_rounding_is_not_over_the_limit():
    """Parts of a stash add up to a little more or less than the stash."""
    costs = zp.Costs(f=1, i=1.2, w=0.7, p2p=0.05, activation=0.6, stash=0.1, memory_limit=2.5)
    schedule = zp.build("zbv", ranks=2, microbatches=6)
    filled = zp.simulate(zp.fill_gaps(schedule, costs), costs)
    assert filled.peak_memory == pytest.approx((2.5, 2.5))
    assert filled.over_limit == ()
    assert zp.simulate(schedule, zp.Costs(memory_limit=2)).over_limit == (0, 1)


def test_messages_that_hold_the_sender_count_in_the_choice():
    """With blocking sends the kernel's own estimate is not the simulation: all candidates are simulated."""
    costs = zp.Costs(f=1, i=1.2, w=0.7, p2p=0.3, stash=0.5, memory_limit=9, blocking=True, serial_links=True)
    for name in ("zb-h1", "v-half", "interleaved-zb"):
        schedule = zp.build(name, ranks=4, microbatches=12)
        best = min(zp.simulate(one, costs).makespan for one in candidates(schedule, costs))
        assert zp.simulate(zp.fill_gaps(schedule, costs), costs).makespan == best


def candidates(schedule, costs):
    whole = divide_weights(schedule, 4)
    return [whole, *_fill_rows(whole, costs, (costs.memory_limit,) * schedule.num_ranks)]


def test_files_in_parts_are_compared_as_they_are():
    filled = zp.fill_gaps(zp.build("zbv", ranks=2, microbatches=4), COSTS[1], weight_parts=3)
    [timeline] = compare([filled], zp.Costs(), weight_parts=4)
    assert timeline.schedule == filled


def test_wrong_numbers_of_parts_in_files(tmp_path):
    whole = json.loads(zp.to_json(zp.build("1f1b", ranks=2, microbatches=2)))
    with pytest.raises(ScheduleError, match="num_weight_parts is 3, but the schedule has no W"):
        zp.check(zp.from_json(json.dumps(whole | {"num_weight_parts": 3})))
    path = tmp_path / "recorded.json"
    filled = zp.fill_gaps(zp.build("zbv", ranks=2, microbatches=4))
    path.write_text(json.dumps(json.loads(zp.to_json(zp.simulate(filled))) | {"num_weight_parts": 5}))
    with pytest.raises(ConfigError, match="0W0 is present 4 of 5 times"):
        load_costs(str(path))
    path.write_text('{"traceEvents": []}')
    with pytest.raises(ConfigError, match="this trace is not zeropipe"):
        load_costs(str(path))


def test_no_rank_has_a_higher_peak_where_stages_have_workspaces():
    """Without a limit: workspaces of different sizes are not taken for memory that is there all the time."""
    costs = zp.Costs(
        i=[1.3, 1.2, 0.8, 1.5, 0.7, 0.6], w=1.6, b=[0.785, 1.444, 1.252, 1.172, 2.488, 1.193],
        activation=[1.134, 0.665, 1.241, 0.814, 1.164, 1.482], workspace=[0.037, 0.448, 0.422, 0.322, 0.34, 0.017],
    )  # fmt: skip
    cases = [
        (zp.build("zbv", ranks=3, microbatches=2), costs),
        (zp.build("v-min", ranks=2, microbatches=8), zp.Costs(i=1.2, w=1.6, p2p=0.1, workspace=[2, 1, 2, 0])),
    ]
    for schedule, costs in cases:
        plain = zp.simulate(schedule, costs)
        for parts in (1, 2, 4):
            filled = zp.simulate(zp.fill_gaps(schedule, costs, weight_parts=parts), costs)
            assert filled.makespan <= plain.makespan * (1 + 1e-9)
            assert all(map(lambda one, most: one <= most * (1 + 1e-9), filled.peak_memory, plain.peak_memory))
