"""Slices of sequences in the language of schedules: text, checks, formats, lowering."""

import random
from itertools import pairwise, product
from math import isclose

import pytest
from reference_simulator import reference_simulate

import zeropipe as zp
from zeropipe.core.action import parse_action
from zeropipe.core.explain import critical_path, idle_times
from zeropipe.core.formats.csv import program_from_csv
from zeropipe.core.needs import needs
from zeropipe.core.placement import Problem
from zeropipe.core.resize import resize
from zeropipe.core.slices import balanced_shares, parse_shares, slices_as_microbatches, token_bounds
from zeropipe.schedules.registry import entries, find
from zeropipe.sim.fit import fit

SCHEDULES = [
    zp.build("seq1f1b", ranks=3, microbatches=3, slices=4),
    zp.build("slimpipe", ranks=2, microbatches=3, slices=2, stages_per_rank=2),
    zp.build("zb-h1", ranks=4, microbatches=2, slices=3),
    zp.build("seq1f1b", ranks=1, microbatches=1, slices=2),
]
sliced = pytest.mark.parametrize("schedule", SCHEDULES, ids=repr)


def test_text_of_an_action():
    action = zp.Action(2, zp.Kind.F, 0, 3)
    assert str(action) == "2F0.3"
    assert parse_action(" 2F0.3 ") == action
    assert str(zp.Action(2, zp.Kind.F, 0)) == "2F0"
    assert parse_action("2F0").slice is None
    with pytest.raises(zp.ScheduleError, match="at most 4096 slices"):
        parse_action("0F0.4096")
    with pytest.raises(zp.ScheduleError, match="is not an action"):
        parse_action("0F0.")


@sliced
def test_schedules_are_valid_and_come_back(schedule):
    zp.check(schedule)
    assert "slices" in schedule.sizes
    assert zp.from_csv(zp.to_csv(schedule)) == schedule
    assert zp.from_json(zp.to_json(schedule)) == schedule
    program = zp.lower(schedule)
    zp.check(program)
    again = program_from_csv(zp.to_csv(program))
    assert again.packed == program.packed
    zp.check(again)
    timeline = zp.simulate(schedule)
    assert zp.from_json(zp.to_json(timeline)) == timeline


@sliced
@pytest.mark.parametrize("shards", ["keep", "regather"])
def test_gathers_and_reductions_of_slices(schedule, shards):
    zp.check(zp.lower(schedule, shards))
    zp.simulate(schedule, zp.Costs(shards=shards, unshard=1, reduce=1))


def test_without_slices_nothing_shows():
    plain, one = zp.build("1f1b", ranks=4, microbatches=8), zp.build("seq1f1b", ranks=4, microbatches=8, slices=1)
    assert zp.to_csv(plain) == zp.to_csv(one)
    assert "num_slices" not in zp.to_json(plain)
    assert "slices" not in plain.sizes


@sliced
def test_every_swap_of_slices_is_refused(schedule):
    """F in the order of the slices, backwards in the opposite one: any other order of a stage is an error."""
    for rank, row in enumerate(schedule.rows):
        for a in range(len(row)):
            for b in range(a + 1, len(row)):
                one, other = row[a], row[b]
                if (one.stage, one.kind, one.microbatch) != (other.stage, other.kind, other.microbatch):
                    continue
                rows = [list(r) for r in schedule.rows]
                rows[rank][a], rows[rank][b] = other, one
                changed = zp.Schedule.of(schedule.problem, schedule.placement, rows)
                if one.kind is zp.Kind.W:
                    continue  # W have no order among themselves
                with pytest.raises(zp.ScheduleError, match=r"runs before .*: forwards run in the order of the slices"):
                    zp.check(changed)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("0F0.0,0F0,0B0.1,0B0.0", "0F0 has no slice: microbatches have 2 slices; write 0F0.0"),
        ("0F0.0,0F0.1,0B0.1", "stage 0, microbatch 0, slice 0 has only F: must be F and B, or F, I and W"),
        ("0F0.0,0F0.2,0B0.2,0B0.0", "0F0.2 runs before 0F0.1"),
        ("0F0.0,0F0.1,0B0.1,0B0.0,0B0.0", "0B0.0 is repeated"),
        ("0F0.0,0F0.1,0B0.0,0B0.1", r"0B0.0 runs before 0B0.1"),
    ],
)
def test_errors_name_the_slice(text, message):
    with pytest.raises(zp.ScheduleError, match=message):
        zp.check(zp.from_csv(text))


def test_numbers_out_of_range():
    problem = Problem(1, 1, 1, num_slices=2)
    with pytest.raises(zp.ScheduleError, match=r"0F0\.2 is out of range: slices 0 to 1"):
        zp.Schedule.of(problem, zp.linear(problem), [[zp.Action(0, zp.Kind.F, 0, 2)]])
    with pytest.raises(zp.ScheduleError, match="has a slice: the schedule has one slice"):
        zp.Schedule.of(Problem(1, 1, 1), zp.linear(problem), [[zp.Action(0, zp.Kind.F, 0, 0)]])
    with pytest.raises(zp.ConfigError, match="num_slices=0"):
        zp.Schedule.of(Problem(1, 1, 1, num_slices=0), zp.linear(problem), [[]])
    with pytest.raises(zp.ConfigError, match="slices=0: must be an integer from 1"):
        zp.build("seq1f1b", ranks=2, microbatches=2, slices=0)
    with pytest.raises(zp.ConfigError, match="slices=4: gpipe has no slices; use one of seq1f1b, slimpipe, zb-h1"):
        zp.build("gpipe", ranks=2, microbatches=2, slices=4)


def test_a_deadlock_names_slices():
    rows = "0F0.0,0F0.1,0B0.1,0B0.0\n1F0.0,1B0.1,1F0.1,1B0.0"
    with pytest.raises(zp.DeadlockError, match=r"rank 0 waits at step 2: 0B0.1 needs 1B0.1"):
        zp.lower(zp.from_csv(rows))


@sliced
def test_needs_of_each_action_have_ended(schedule):
    """Also those on slices of the same stage, which no kernel waits for: the order of rows ensures them."""
    timeline = zp.simulate(schedule, zp.Costs(f=2, i=3, w=1, p2p=0.5, f_attention=1, i_attention=2))
    spans = {span.action: span for rank in range(schedule.num_ranks) for span in timeline.spans(rank)}
    for action, span in spans.items():
        for need in needs(action, schedule.num_stages, schedule.num_slices):
            source = spans.get(need) or spans[need._replace(kind=zp.Kind.B)]
            assert source.end <= span.start + 1e-9


@sliced
@pytest.mark.parametrize("seed", range(4))
def test_times_against_the_reference(schedule, seed):
    dice = random.Random(seed)
    sizes = [dice.uniform(1, 5) for _ in range(schedule.num_slices)]
    shares = [size / sum(sizes) for size in sizes]
    f, i, w = ([dice.uniform(2, 4) for _ in range(schedule.num_stages)] for _ in range(3))
    fa, ia, p2p = dice.uniform(0, 2), dice.uniform(0, 2), dice.uniform(0, 0.3)
    costs = zp.Costs(f=f, i=i, w=w, p2p=p2p, slice_sizes=sizes, f_attention=fa, i_attention=ia)

    def duration(actions):
        (action,) = actions
        begin, end = sum(shares[: action.slice]), sum(shares[: action.slice + 1])
        forward, backward = (
            (time[action.stage] - own) * (end - begin) + own * (end**2 - begin**2) for time, own in ((f, fa), (i, ia))
        )
        weights = w[action.stage] * (end - begin)
        return {"F": forward, "I": backward, "W": weights, "B": backward + weights}[action.kind.name]

    timeline = zp.simulate(schedule, costs)
    expected = reference_simulate(schedule, duration, lambda source, target: p2p)
    for rank in range(schedule.num_ranks):
        for span in timeline.spans(rank):
            assert (span.start, span.end) == pytest.approx(expected[span.action])


@sliced
def test_memory_against_a_plain_sum(schedule):
    """An F allocates its share, the first of a microbatch the keys; the last backward frees them with their sums."""
    shares = parse_shares([2] * (schedule.num_slices - 1) + [1], schedule.num_slices)
    costs = zp.Costs(activation=8, stash=5, keys=3, key_gradients=2, slice_sizes=shares, workspace=1)
    timeline = zp.simulate(schedule, costs)
    last = schedule.num_slices - 1
    for rank in range(schedule.num_ranks):
        level, peak = 0.0, 0.0
        for action in schedule.rows[rank]:
            share, kind = shares[action.slice], action.kind.name
            level += {"F": 8 * share + 3 * (action.slice == 0), "W": 0}.get(kind, 2 * (action.slice == last))
            peak = max(peak, level + (share if kind in "BI" else 0))
            freed = {"F": 0, "B": 8 * share, "I": 3 * share, "W": 5 * share}[kind]
            level -= freed + (5 if kind in "BI" and action.slice == 0 else 0)
        assert level == pytest.approx(0, abs=1e-9)
        assert timeline.peak_memory[rank] == pytest.approx(peak)


@pytest.mark.parametrize(("attention", "slices"), [(0, 4), (0.3, 2), (0.5, 8), (1, 4), (1e-12, 3)])
def test_balanced_shares_take_equal_time(attention, slices):
    shares = balanced_shares(slices, attention)
    assert isclose(sum(shares), 1)
    costs = zp.Costs(f=1, i=0, w=0, f_attention=attention, slice_sizes=shares)
    timeline = zp.simulate(zp.build("seq1f1b", ranks=1, microbatches=1, slices=slices), costs)
    forwards = [span.end - span.start for span in timeline.spans(0) if span.action.kind is zp.Kind.F]
    assert forwards == pytest.approx([1 / slices] * slices)
    assert sorted(shares, reverse=True) == pytest.approx(list(shares))


def test_bounds_of_tokens():
    assert token_bounds(10, (0.5, 0.5)) == (0, 5, 10)
    assert token_bounds(3, (0.98, 0.01, 0.01)) == (0, 1, 2, 3)
    dice = random.Random(0)
    for _ in range(200):
        sizes = [dice.uniform(0.01, 3) for _ in range(dice.randint(1, 6))]
        shares, length = parse_shares(sizes, len(sizes)), dice.randint(len(sizes), 50)
        bounds = token_bounds(length, shares)
        assert bounds[0] == 0
        assert bounds[-1] == length
        assert all(a < b for a, b in pairwise(bounds))
    with pytest.raises(zp.ConfigError, match="too short for 2 slices"):
        token_bounds(1, (0.5, 0.5))


@pytest.mark.parametrize("sizes", [[1, 0], [1, -1], [], "12", [1, float("nan")], [True, 1], 3])
def test_sizes_are_refused(sizes):
    with pytest.raises(zp.ConfigError, match=r"slice_sizes=.*positive numbers"):
        zp.Costs(slice_sizes=sizes)


def test_costs_that_do_not_fit_slices():
    schedule = SCHEDULES[0]
    with pytest.raises(zp.ConfigError, match="must be 4 numbers, one for each slice"):
        zp.simulate(schedule, zp.Costs(slice_sizes=[1, 2]))
    with pytest.raises(zp.ConfigError, match="f_attention=2 of stage 0: must be at most its f, 1"):
        zp.simulate(schedule, zp.Costs(f_attention=2))
    with pytest.raises(zp.ConfigError, match="has slices, whose W are not divided"):
        zp.fill_gaps(SCHEDULES[2], weight_parts=2)


@sliced
@pytest.mark.parametrize("number", [1, 2, 5])
def test_resize(schedule, number):
    other = resize(schedule, number)
    assert (other.num_microbatches, other.num_slices) == (number, schedule.num_slices)
    zp.check(other)
    repeated = resize(zp.from_csv(zp.to_csv(schedule)), number)
    zp.check(repeated)


@sliced
def test_slices_as_microbatches(schedule):
    """The rows for an executor: the order of backwards is another one, so it is no schedule of a paper, but valid."""
    flat = slices_as_microbatches(schedule)
    zp.check(flat)
    assert flat.num_microbatches == schedule.num_microbatches * schedule.num_slices
    assert zp.simulate(flat, zp.Costs(f=1, i=1, w=1)).makespan == pytest.approx(
        zp.simulate(schedule, zp.Costs(f=schedule.num_slices, i=schedule.num_slices, w=schedule.num_slices)).makespan
    )


@sliced
def test_idle_time_has_causes(schedule):
    timeline = zp.simulate(schedule, zp.Costs(p2p=0.1))
    for idle, busy in zip(idle_times(timeline), timeline.busy, strict=True):
        assert idle.total == pytest.approx(timeline.makespan - busy)
    assert critical_path(timeline)[-1].action.slice == 0


@pytest.mark.parametrize("name", [entry.name for entry in entries() if entry.has_slices])
@pytest.mark.parametrize("slices", [2, 3, 4, 7])
def test_every_schedule_with_slices_at_every_size(name, slices):
    entry = find(name)
    for ranks, microbatches, per_rank in product((1, 2, 3, 4, 5), (1, 2, 3, 5, 8), entry.stages_per_rank[:3]):
        schedule = zp.build(name, ranks=ranks, microbatches=microbatches, stages_per_rank=per_rank, slices=slices)
        zp.check(schedule)
        assert zp.from_csv(zp.to_csv(schedule)) == schedule


@sliced
def test_costs_fitted_to_a_timeline_predict_it(schedule):
    timeline = zp.simulate(schedule, zp.Costs(f=2, i=1, w=1, activation=3))
    again = zp.simulate(schedule, fit(timeline))
    assert again.makespan == pytest.approx(timeline.makespan)
    assert again.peak_memory == pytest.approx(timeline.peak_memory)
