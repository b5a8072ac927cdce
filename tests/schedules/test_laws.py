"""The laws every schedule obeys, over the whole registry and a grid of sizes."""

from collections import Counter
from dataclasses import replace
from itertools import product

import pytest
from full_marker import mark_rest_full

import zeropipe as zp
from zeropipe.core.action import actions_of
from zeropipe.core.needs import needs
from zeropipe.core.packed import PackedRows
from zeropipe.schedules.registry import build_entry, entries, find

RANKS = (1, 2, 3, 4, 5, 8)
MICROBATCHES = (1, 2, 3, 5, 7, 8, 10, 16, 17)
GRID = [
    pytest.param(entry, stages_per_rank, id=f"{entry}-{stages_per_rank}")
    for entry in entries()
    for stages_per_rank in entry.stages_per_rank
]


def legal(name, ranks, microbatches):
    """Sizes an algorithm is defined for: all of them, but for DeepSeek's two."""
    if name == "dualpipe":
        return ranks % 2 == 0 and microbatches % 2 == 0 and microbatches >= 2 * ranks - 2
    return name != "dualpipev" or microbatches >= 2 * ranks - 1


def sizes(entry, stages_per_rank, every):
    for ranks, microbatches in list(product(RANKS, MICROBATCHES))[::every]:
        if legal(entry.name, ranks, microbatches):
            yield zp.build(entry.name, ranks=ranks, microbatches=microbatches, stages_per_rank=stages_per_rank)


@pytest.mark.parametrize(
    "every", mark_rest_full([2, 1], [2])
)  # a chessboard: every number of ranks and of microbatches
@pytest.mark.parametrize(("entry", "stages_per_rank"), GRID)
def test_every_schedule_is_proven_at_every_size(entry, stages_per_rank, every):
    for schedule in sizes(entry, stages_per_rank, every):
        zp.check(schedule)  # complete, placed, live, and live under rendezvous
        assert schedule.problem.stages_per_rank == stages_per_rank


@pytest.mark.parametrize(("entry", "stages_per_rank"), GRID)
def test_every_schedule_survives_text(entry, stages_per_rank):
    for schedule in sizes(entry, stages_per_rank, every=4):
        assert zp.from_csv(zp.to_csv(schedule)) == schedule
        assert zp.from_json(zp.to_json(schedule)) == schedule


@pytest.mark.parametrize("entry", entries(), ids=str)
@pytest.mark.parametrize(("ranks", "microbatches"), [(1, 3), (2, 4), (3, 7), (4, 8), (6, 26)])
def test_the_laws_without_the_checker(entry, ranks, microbatches):
    """The same laws, written down a second time in the plainest way."""
    if not legal(entry.name, ranks, microbatches):
        pytest.skip("not a size of this algorithm")
    schedule = zp.build(entry.name, ranks=ranks, microbatches=microbatches)
    rows = [list(row) for row in schedule.rows]
    found = Counter(action for row in rows for action in actions_of(row))
    assert set(found.values()) == {1}
    for stage, microbatch in product(range(schedule.num_stages), range(microbatches)):
        kinds = "".join(k.name for k in zp.Kind if zp.Action(stage, k, microbatch) in found)
        assert kinds in ("FB", "FIW")
    for rank, row in enumerate(rows):
        for step in row:
            assert {schedule.placement.rank_of(a.stage, a.microbatch) for a in actions_of([step])} == {rank}
    done = set()
    moved = True
    while moved:
        moved = False
        for row in rows:
            while row and all(met(need, done) for a in actions_of(row[:1]) for need in needs(a, schedule.num_stages)):
                done.update(actions_of([row.pop(0)]))
                moved = True
    assert not any(rows)


def met(need, done):
    return need in done or (need.kind is zp.Kind.I and need._replace(kind=zp.Kind.B) in done)


@pytest.mark.parametrize("entry", entries(), ids=str)
def test_only_forbidden_sizes_are_refused_and_in_one_line(entry):
    refused = 0
    for ranks, microbatches in product(range(1, 9), range(1, 20)):
        if legal(entry.name, ranks, microbatches):
            zp.build(entry.name, ranks=ranks, microbatches=microbatches)
        else:
            refused += 1
            with pytest.raises(zp.ConfigError) as error:
                zp.build(entry.name, ranks=ranks, microbatches=microbatches)
            assert "\n" not in str(error.value)
            assert str(ranks) in str(error.value) or str(microbatches) in str(error.value)
    assert bool(refused) == bool(entry.require and not entry.options)


@pytest.mark.parametrize("entry", entries(), ids=str)
def test_the_facts_of_an_entry_are_true(entry):
    schedule = zp.build(entry.name, ranks=4, microbatches=16)
    text = zp.to_csv(schedule)
    assert ("I" in text) == entry.splits_backward
    assert ("OVERLAP" in text) == entry.overlaps
    assert entry.paper.startswith("https://")
    assert 20 < len(entry.summary) < 120
    assert bool(entry.limits) == bool(entry.require)
    for alias in (entry.name.upper(), entry.name.replace("-", "_"), *entry.aliases):
        assert find(alias) is entry


@pytest.mark.parametrize(
    ("theirs", "ours"),
    [
        ("interleave", "interleaved"), ("1f1b_interleave", "interleaved"),
        ("1f1b_interleave_overlap", "interleaved-overlap"), ("dualpipe_v", "dualpipev"),
        ("ScheduleGPipe", "gpipe"), ("Schedule1F1B", "1f1b"), ("ScheduleLoopedBFS", "looped-bfs"),
        ("ScheduleInterleaved1F1B", "interleaved"), ("ScheduleInterleavedZeroBubble", "interleaved-zb"),
        ("ScheduleZBVZeroBubble", "zbv"), ("ScheduleDualPipeV", "dualpipev"),
    ],
)  # fmt: skip
def test_names_that_others_use_are_known(theirs, ours):
    assert find(theirs).name == ours


def test_all_names_are_there():
    plain = {"gpipe", "1f1b", "interleaved", "looped-bfs", "1f1b-overlap", "interleaved-overlap", "hanayo", "chimera"}
    split = {"zb-h1", "zb-h2", "interleaved-zb", "zbv", "v-half", "v-min", "dualpipe", "dualpipev"}
    assert set(zp.names()) >= plain | split


@pytest.mark.parametrize("ranks", [1, 2, 4, 7])
@pytest.mark.parametrize("name", ["interleaved", "interleaved-overlap"])
def test_a_group_size_is_refused_where_its_order_would_hang_and_only_there(name, ranks):
    """From PipeOffload's least on, which is half the ranks; an order of Overlaps needs a microbatch per rank."""
    entry = find(name)
    least = ranks if entry.overlaps else (ranks + 1) // 2
    refused = 0
    for per_rank, microbatches in product((1, 2, 3), (1, 4, 7, 9, 13)):
        for group_size in range(1, 14):
            size = {"ranks": ranks, "microbatches": microbatches, "stages_per_rank": per_rank, "group_size": group_size}
            order = build_entry(replace(entry, require=None), **size)
            if group_size < min(least, microbatches) or hangs(order):
                refused += 1
                with pytest.raises(zp.ConfigError, match=f"group_size={group_size}"):
                    zp.build(name, **size)
            else:
                assert zp.build(name, **size) == order
    assert (refused > 0) == (least > 1)


def hangs(schedule):
    try:
        zp.check(schedule)
    except zp.DeadlockError:
        return True
    return False


@pytest.mark.parametrize(("group_size", "makespan", "peak"), [(None, 93, 27), (6, 101, 21), (5, 97, 19), (3, 109, 11)])
def test_a_short_last_group_saves_memory(group_size, makespan, peak):
    schedule = zp.build("interleaved", ranks=5, microbatches=9, stages_per_rank=3, group_size=group_size)
    timeline = zp.simulate(schedule)
    assert (timeline.makespan, max(timeline.peak_memory)) == (makespan, peak)


@pytest.mark.parametrize(
    ("name", "ranks", "microbatches", "options", "words"),
    [
        ("1f1b", 0, 1, {}, "ranks=0"),
        ("1f1b", 2, 2, {"stages_per_rank": 2}, "needs 1 stage per rank"),
        ("hanayo", 2, 2, {"stages_per_rank": 3}, "needs 2, 4, 6 or 8 stages per rank"),
        ("interleaved", 2, 2, {"stages_per_rank": 9}, "needs 1 to 8 stages per rank"),
        ("interleavd", 2, 2, {}, "did you mean interleaved"),
        ("zbv", 2, 2, {"group_size": 2}, "no option 'group_size'"),
        ("interleaved", 2, 4, {"group_size": "a"}, "group_size='a'"),
        ("zb-h2", 4, 4, {"extra": 4}, "extra=4"),
        ("v-half", 4, 4, {"extra": -1}, "extra=-1"),
        ("dualpipe", 3, 6, {}, "ranks=3: use dualpipev"),
        ("dualpipev", 4, 6, {}, "use 7 or more"),
        ("dualpipe", 4, 4, {}, "use 6"),
    ],
)
def test_a_mistake_names_value_rule_and_way_out(name, ranks, microbatches, options, words):
    with pytest.raises(zp.ConfigError, match=words):
        zp.build(name, ranks=ranks, microbatches=microbatches, **options)


def test_a_lane_explains_a_pattern_that_cannot_be():
    problem = zp.Problem(2, 4, 3)
    lane = zp.Lane(1, problem, zp.loop(problem))
    lane.f(1)
    lane.i(1)
    with pytest.raises(zp.ScheduleError, match="rank 1 writes a W of stage 3, but there is no I"):
        lane.w(3)
    lane.w()
    with pytest.raises(zp.ScheduleError, match="rank 1 writes a W, but there is no I"):
        lane.w()
    with pytest.raises(zp.ScheduleError, match="rank 1 writes stage 4: stages are 0 to 3"):
        lane.f(4)


def test_w_takes_the_oldest_i_of_its_stage_or_of_all():
    problem = zp.Problem(1, 2, 3)
    lane = zp.Lane(0, problem, zp.loop(problem))
    lane.f(0, times=3)
    lane.i(1)
    lane.i(0, times=2)
    lane.w(0)
    lane.i(1)
    lane.w(times=3)
    assert lane.pending_w() == 0
    with pytest.deprecated_call(match="use pending_w"):
        assert lane.owed() == 0
    assert str(zp.Schedule(problem, zp.loop(problem), PackedRows.of([lane.codes]))) == (
        "0F0 0F1 0F2 1I0 0I0 0I1 0W0 1I1 1W0 0W1 1W1"
    )
