"""The simulator against a slow, obvious one, and its knobs one by one."""

import itertools
from array import array
from dataclasses import replace

import pytest
from reference_simulator import reference_simulate

import zeropipe as zp
from zeropipe.core.action import Kind
from zeropipe.core.explain import critical_path, idle_times
from zeropipe.core.jit import Plain
from zeropipe.core.needs import build_dependencies, find_nonblocking_actions
from zeropipe.core.packed import decode
from zeropipe.sim.compare import compare
from zeropipe.sim.costs import Link

SIZES = [
    ("gpipe", 3, 5), ("1f1b", 4, 9), ("interleaved", 4, 8), ("looped-bfs", 2, 3), ("1f1b-overlap", 4, 8),
    ("interleaved-overlap", 4, 8), ("zb-h1", 4, 7), ("zb-h2", 3, 8), ("interleaved-zb", 2, 8), ("zbv", 3, 7),
    ("v-half", 4, 9), ("v-min", 3, 6), ("dualpipe", 4, 8), ("dualpipev", 4, 10), ("chimera", 4, 8), ("hanayo", 2, 5),
]  # fmt: skip


def per_stage(values):
    return lambda stage: values[stage % len(values)]


@pytest.mark.parametrize("name,ranks,microbatches", SIZES)
def test_times_equal_a_slow_simulators(name, ranks, microbatches):
    schedule = zp.build(name, ranks=ranks, microbatches=microbatches)
    f, i, w, saving = per_stage([1.0, 1.5, 0.75]), per_stage([2.0, 1.25]), per_stage([0.5]), per_stage([0.25, 0.5])
    stages = range(schedule.num_stages)
    costs = zp.Costs(
        f=[f(s) for s in stages], i=[i(s) for s in stages], w=[w(s) for s in stages],
        overlap=[f(s) + i(s) + w(s) - saving(s) for s in stages], p2p=0.125, edges={(0, 1): Link(0.5)},
    )  # fmt: skip
    price = {Kind.F: f, Kind.I: i, Kind.W: w, Kind.B: lambda s: i(s) + w(s)}

    def duration(actions):
        total = sum(price[a.kind](a.stage) for a in actions)
        return total - (sum(saving(a.stage) for a in actions) / 2 if len(actions) == 2 else 0)

    slow = reference_simulate(schedule, duration, lambda a, b: 0.5 if (a, b) == (0, 1) else 0.125)
    timeline = zp.simulate(schedule, costs)
    for rank in range(ranks):
        for span in timeline.spans(rank):
            assert (span.start, span.end) == pytest.approx(slow[span.action], abs=1e-9)


@pytest.mark.parametrize("name,ranks,microbatches", SIZES)
def test_idle_time_adds_up_and_the_critical_path_has_no_hole(name, ranks, microbatches):
    timeline = zp.simulate(zp.build(name, ranks=ranks, microbatches=microbatches), zp.Costs(p2p=0.25))
    for rank, causes in enumerate(idle_times(timeline)):
        assert sum(causes) + timeline.busy[rank] == pytest.approx(timeline.makespan)
        assert min(causes) >= 0
        assert causes.other == pytest.approx(0)
    path = critical_path(timeline)
    assert path[-1].end == pytest.approx(timeline.first_start + timeline.makespan)
    assert path[0].start == pytest.approx(timeline.first_start)
    for one, two in itertools.pairwise(path):
        assert two.start - one.end == pytest.approx(0.25 if two.rank != one.rank else 0)


def spans(timeline):
    return {str(s.action): (s.start, s.end) for r in range(timeline.num_ranks) for s in timeline.spans(r)}


def test_a_message_takes_latency_and_bytes_over_bandwidth():
    schedule = zp.build("gpipe", ranks=2, microbatches=1)
    times = spans(zp.simulate(schedule, zp.Costs(f=1, b=2, p2p=0.5, bandwidth=4, message=[6, 99])))
    assert times == {"0F0": (0, 1), "1F0": (3, 4), "1B0": (4, 6), "0B0": (8, 10)}


def test_edges_between_machines_cost_more():
    schedule = zp.build("gpipe", ranks=4, microbatches=1)
    costs = zp.Costs(p2p=0.1, node_size=2, inter_node=Link(3.0))
    times = spans(zp.simulate(schedule, costs))
    assert times["1F0"][0] == pytest.approx(1.1)
    assert times["2F0"][0] == pytest.approx(5.1)


def test_a_blocking_send_keeps_the_sender_busy():
    schedule = zp.build("gpipe", ranks=2, microbatches=2)
    eager = spans(zp.simulate(schedule, zp.Costs(p2p=0.5)))
    blocked = spans(zp.simulate(schedule, zp.Costs(p2p=0.5, blocking=True)))
    assert eager["0F1"][0] == 1
    assert blocked["0F1"][0] == 1.5


def test_a_serial_link_lets_one_message_through_at_a_time():
    schedule = zp.build("gpipe", ranks=2, microbatches=3)
    slow = {"bandwidth": 1, "message": 2}
    free = spans(zp.simulate(schedule, zp.Costs(f=1, **slow)))
    serial = spans(zp.simulate(schedule, zp.Costs(f=1, **slow, serial_links=True)))
    assert [free[f"1F{m}"][0] for m in range(3)] == [3, 4, 5]
    assert [serial[f"1F{m}"][0] for m in range(3)] == [3, 5, 7]


def test_latency_passes_beside_other_transfers():
    """A link is taken for bytes over bandwidth; latency only delays the arrival."""
    schedule = zp.build("gpipe", ranks=2, microbatches=3)

    def starts(p2p, transfer):
        costs = zp.Costs(f=1, p2p=p2p, bandwidth=1, message=transfer, serial_links=True)
        times = spans(zp.simulate(schedule, costs))
        return [times[f"1F{m}"][0] for m in range(3)]

    assert starts(2, 0.25) == [3.25, 4.25, 5.25]
    assert starts(0.25, 2) == [3.25, 5.25, 7.25]


def test_blocking_at_the_ends_leaves_the_steady_state_free():
    """1F1B on rank 0 of 3 with 4 microbatches: F F | F B F B | B B."""
    schedule = zp.build("1f1b", ranks=3, microbatches=4)
    costs = {"f": 1, "b": 2, "p2p": 0.5}
    ends = spans(zp.simulate(schedule, zp.Costs(**costs, blocking_ends=True)))
    assert ends["0F1"][0] == 1.5  # 0F0 is warm-up: its send blocks
    assert ends["0F2"][0] == 3.0
    everywhere = spans(zp.simulate(schedule, zp.Costs(**costs, blocking=True)))
    assert ends["1F1"][1] == 4.0
    # the middle rank: F | F B F B F B | B. Its first B is steady, and its send does not delay the next F
    assert ends["1F2"][0] - ends["1B0"][1] == 0
    assert everywhere["1F2"][0] - everywhere["1B0"][1] == 0.5
    free, blocked = (zp.simulate(schedule, zp.Costs(**costs, blocking=b)).makespan for b in (False, True))
    assert free <= max(end for _, end in ends.values()) <= blocked


@pytest.mark.parametrize("name,ranks,microbatches", SIZES)
def test_blocking_at_the_ends_is_between_free_and_blocking_and_adds_up(name, ranks, microbatches):
    schedule = zp.build(name, ranks=ranks, microbatches=microbatches)
    free, ends, everywhere = (
        zp.simulate(schedule, zp.Costs(p2p=0.25, **more)) for more in ({}, {"blocking_ends": True}, {"blocking": True})
    )
    assert free.makespan <= ends.makespan <= everywhere.makespan
    for rank, causes in enumerate(idle_times(ends)):
        assert sum(causes) + ends.busy[rank] == pytest.approx(ends.makespan)
        assert causes.other == pytest.approx(0)
    assert zp.from_json(zp.to_json(ends)) == ends


@pytest.mark.parametrize(
    "row,steady",
    [
        ("0F0,0F1,0F2,0B0,0F3,0B1,0B2,0B3", "0F2,0B0,0F3,0B1"),
        ("0F0,0B0,0F1,0B1", "0F0,0B0,0F1,0B1"),
        ("0F0,0F1,0I0,0W0,0I1,0W1", "0F1,0I0"),
        ("0F0,0F1,(0F2;0B0)OVERLAP_F_B,0B1,0B2", "0F2,0B0"),
    ],
)
def test_the_steady_state_goes_from_the_last_forward_before_a_backward_to_the_first_backward_after_the_last_forward(
    row, steady
):
    deps = build_dependencies(Plain, zp.from_csv(row))
    [first], [last] = find_nonblocking_actions(Plain, deps, blocking=False, blocking_ends=True)
    assert ",".join(str(decode(code)) for code in deps.codes[first : last + 1]) == steady


@pytest.mark.parametrize("name,ranks,microbatches", SIZES)
def test_a_backward_needs_its_workspace_while_it_runs(name, ranks, microbatches):
    """An Overlap needs that of its F and that of its B; W needs none."""
    schedule = zp.build(name, ranks=ranks, microbatches=microbatches)
    stages = range(schedule.num_stages)
    activation, stash = [3.0 + stage for stage in stages], [1.0 + 3 * (stage % 3) for stage in stages]
    sizes = {
        Kind.F: [1.0 + stage % 3 for stage in stages],
        Kind.B: [4.0 + stage % 4 for stage in stages],
        Kind.I: [2.0 + stage % 5 for stage in stages],
    }
    costs = zp.Costs(
        activation=activation, stash=stash, f_workspace=sizes[Kind.F], workspace=sizes[Kind.B],
        i_workspace=sizes[Kind.I],
    )  # fmt: skip
    timeline = zp.simulate(schedule, costs)
    for rank in range(ranks):
        level, peak = 0.0, 0.0
        for step in timeline.steps(rank):
            level += sum(activation[span.action.stage] for span in step if span.action.kind is Kind.F)
            peak = max(peak, level + sum(sizes.get(s.action.kind, [0.0] * len(stages))[s.action.stage] for s in step))
            for span in step:
                a, s = activation[span.action.stage], stash[span.action.stage]
                level -= {Kind.F: 0.0, Kind.B: a, Kind.I: a - s, Kind.W: s}[span.action.kind]
            peak = max(peak, level)
        assert timeline.peak_memory[rank] == pytest.approx(peak)


def test_memory_counts_what_f_takes_and_i_and_w_free():
    schedule = zp.from_csv("0F0,0F1,0I0,0I1,0W1,0W0\n")
    timeline = zp.simulate(schedule, zp.Costs(activation=10, stash=4, weights=100))
    memory = timeline.memory
    assert list(memoryview(memory.during).cast("d")) == [110, 120, 120, 114, 108, 104]
    assert list(memoryview(memory.after).cast("d")) == [110, 120, 114, 108, 104, 100]
    assert timeline.peak_memory == (120,)


def test_gradients_are_there_from_the_first_b_or_w_on():
    """While that runs they take the place of what it frees."""
    costs = zp.Costs(activation=10, stash=4, weights=100, workspace=1, i_workspace=0, first_gradients=30)
    for row, during, after in [
        ("0F0,0F1,0I0,0W0,0I1,0W1", [80, 90, 90, 110, 110, 104], [80, 90, 84, 110, 104, 100]),
        ("0F0,0F1,0B0,0B1", [80, 90, 111, 111], [80, 90, 110, 100]),
    ]:
        memory = zp.simulate(zp.from_csv(f"{row}\n"), costs).memory
        assert list(memoryview(memory.during).cast("d")) == during
        assert list(memoryview(memory.after).cast("d")) == after
    smaller = replace(costs, first_gradients=6)  # a B frees more
    memory = zp.simulate(zp.from_csv("0F0,0B0\n"), smaller).memory
    assert list(memoryview(memory.during).cast("d")) == [104, 105]
    both = replace(costs, activation=0, stash=0, workspace=0, weights=[100] * 4, first_gradients=[30] * 4)
    dualpipe = zp.simulate(zp.build("dualpipe", ranks=4, microbatches=8), both)  # both copies have their own
    assert dualpipe.peak_memory == (200,) * 4
    with pytest.raises(zp.ConfigError, match=r"first_gradients=101 of stage 0 are part of its weights=100: must be"):
        zp.simulate(zp.from_csv("0F0,0B0\n"), replace(costs, first_gradients=101))


def test_a_rank_with_two_stages_holds_both_weights():
    timeline = zp.simulate(zp.build("zbv", ranks=2, microbatches=3), zp.Costs(activation=0, weights=[1, 2, 4, 8]))
    assert timeline.peak_memory == (9, 6)


def test_bubble_is_the_mean_over_ranks():
    timeline = zp.simulate(zp.build("gpipe", ranks=2, microbatches=1), zp.Costs(f=[1, 3], b=[1, 3]))
    assert timeline.rank_span == (8, 6)
    assert timeline.rank_bubble == (0.75, 0.25)
    assert timeline.bubble == 0.5


@pytest.mark.parametrize("rows", ["0F0,0B0,0B1,0F1\n", "0F0\n"])
def test_what_cannot_run_is_refused(rows):
    with pytest.raises(zp.ScheduleError):
        zp.simulate(zp.from_csv(rows))


def test_a_list_needs_one_entry_per_stage():
    with pytest.raises(zp.ConfigError, match="f has 3 entries, the schedule has 2 stages"):
        zp.simulate(zp.build("1f1b", ranks=2, microbatches=2), zp.Costs(f=[1, 2, 3]))
    with pytest.raises(
        zp.ConfigError, match="which 3 stages on 2 ranks cannot share: must be 1, 3 \\(one per stage\\)"
    ):
        zp.Costs(f=[1, 2]).regroup(zp.Problem(2, 3, 4))
    with pytest.raises(
        zp.ConfigError, match="which 2 stages on 2 ranks cannot share: must be 1, 2 \\(one per stage\\)"
    ):
        compare([zp.build("1f1b", ranks=2, microbatches=2)], zp.Costs(f=[1, 2, 3]))


def test_a_rank_without_work_does_not_stretch_a_run_that_starts_late():
    placement = zp.Placement(((0, 2),))
    schedule = zp.Schedule.of(zp.Problem(3, 2, 1), placement, zp.build("1f1b", ranks=2, microbatches=1).rows)
    rows = [schedule.rows[0], (), schedule.rows[1]]
    timeline = zp.simulate(zp.Schedule.of(schedule.problem, placement, rows))
    assert timeline.makespan == 6
    late = [array("d", (t + 100 for t in memoryview(times).cast("d"))) for times in (timeline.start, timeline.end)]
    measured = replace(timeline, start=late[0].tobytes(), end=late[1].tobytes(), measured=True)
    assert measured.makespan == 6
    assert measured.first_start == 100
    assert measured.rank_span == (6, 0, 3)
    assert measured.bubble == timeline.bubble == pytest.approx(2 / 3)
    assert [causes.total for causes in idle_times(measured)] == [3, 6, 3]


def test_blocking_serial_links_and_overlaps_together():
    """An Overlap sends its F's and its B's result one after the other; each waits for its own link."""
    rows = "0F0,0F1,0B0,0B1\n1F0,(1F1;1B0)OVERLAP_F_B,1B1\n2F0,2B0,2F1,2B1\n"
    costs = zp.Costs(f=1, b=2, overlap=2, p2p=0.5, blocking=True, serial_links=True)
    times = spans(zp.simulate(zp.from_csv(rows), costs))
    assert times["1F0"] == (1.5, 2.5)
    assert times["2F0"] == (3, 4)
    assert times["2B0"] == (4, 6)
    assert times["1F1"] == times["1B0"] == (6.5, 8.5)  # 2B0's message ends at 6.5
    assert times["2F1"] == (9, 10)  # 8.5 + 0.5
    assert times["0B0"] == (9.5, 11.5)  # the gradient leaves when the activation is out
    assert times["2B1"] == (10, 12)
    assert times["1B1"] == (12.5, 14.5)
    assert times["0B1"] == (15, 17)


def test_an_overlap_with_i_saves_what_one_with_b_saves():
    rows = "0F0,(0F1;0I0)OVERLAP_F_B,0W0,0I1,0W1\n"
    timeline = zp.simulate(zp.from_csv(rows), zp.Costs(f=2, i=3, w=1, overlap=5, activation=4, stash=1))
    assert timeline.makespan == 2 + (2 + 3 - 1) + 1 + 3 + 1
    assert list(memoryview(timeline.memory.after).cast("d")) == [4, 5, 5, 4, 1, 0]
    assert timeline.peak_memory == (8,)
    zp.check(timeline.schedule)
