"""Schedule search: results are valid, fit, are no worse than registered schedules and not below the bound."""

from dataclasses import replace
from itertools import pairwise
from random import Random

import numpy as np
import pytest
from full_marker import mark_rest_full

import zeropipe as zp
from zeropipe.core.jit import compiled
from zeropipe.core.placement import Problem
from zeropipe.errors import ConfigError, ZeropipeError
from zeropipe.schedules.registry import build_entry, entries
from zeropipe.searching.bounds.lower_bound import lower_bound
from zeropipe.searching.candidates.registered import sequential_rows
from zeropipe.searching.candidates.rules import dispatched_candidates, stretch_rows
from zeropipe.searching.evaluator import Evaluator
from zeropipe.searching.local_search_kernel import find_critical_path
from zeropipe.searching.row_kernels import NEVER, simulate_rows
from zeropipe.searching.solver import solve
from zeropipe.searching.tables import row_buffers
from zeropipe.searching.task import SearchTask, pass_starts, schedule_passes

PLACEMENTS = [(1, zp.linear), (2, zp.vee), (2, zp.loop), (3, zp.vee)]


def some_costs(random: Random, num_stages: int, least: int) -> zp.Costs:
    """Small integers, equal for all stages or not; a memory limit from `least` to 11, or none."""
    alike = random.random() < 0.5

    def column(low: int, high: int):
        return random.randint(low, high) if alike else [random.randint(low, high) for _ in range(num_stages)]

    return zp.Costs(
        f=column(1, 4), i=column(1, 4), w=column(0, 4), p2p=random.choice((0, 0, 1, 3)),
        message=random.choice((0, 2)), bandwidth=2, blocking=random.random() < 0.2,
        activation=random.choice((1, 2, column(1, 3))), stash=random.choice((None, None, 0, 1)),
        memory_limit=random.choice((None, *range(least, 12))),
    )  # fmt: skip


def some_task(random: Random, ranks=(1, 2, 3), microbatches=(1, 2, 3, 4), least: int = 6) -> SearchTask:
    per_rank, rule = random.choice(PLACEMENTS[:3])
    p, m = random.choice(ranks), random.choice(microbatches)
    problem = Problem(
        p, p * per_rank, min(m, 3) if per_rank > 1 and max(microbatches) < 5 else m, random.choice((1, 1, 2))
    )
    return SearchTask(problem, rule(problem), some_costs(random, problem.num_stages, least), random.random() < 0.3)


def value_of(task: SearchTask, timeline: zp.Timeline) -> float:
    return max(timeline.rank_span) if task.minimizes_span else timeline.makespan


def optimum(task: SearchTask, value: float) -> float:
    """Return the optimum of the solver, without hints."""
    return solve(task, None, value, 0.0, seconds=60, workers=1).bound


@pytest.mark.parametrize("seed", range(24))
def test_row_kernel_agrees_with_the_simulator(seed):
    random = Random(seed)
    task = some_task(random, (1, 2, 4), (1, 3, 7))
    if seed % 2:  # as Megatron-LM sends
        task = replace(task, costs=replace(task.costs, p2p=2, blocking=False, blocking_ends=True))
    evaluator = Evaluator(task)
    for candidate in [*dispatched_candidates(task, 3), evaluator.best_fit(sequential_rows(task))]:
        if candidate is None:
            continue
        timeline = zp.simulate(task.to_schedule(candidate.rows, candidate.min_fit), task.costs)
        assert value_of(task, timeline) == pytest.approx(candidate.value, rel=1e-12)
        assert not timeline.over_limit


def test_search_accounts_for_sends_that_block_at_the_ends():
    """A schedule searched for other sends is worse with these."""
    costs = zp.Costs(f=1, i=1.2, w=0.7, p2p=0.6, memory_limit=4)
    ends = replace(costs, blocking_ends=True)
    options = {"ranks": 4, "microbatches": 8, "steps": 3000}
    found, other = (zp.search(costs=given, **options) for given in (ends, costs))
    assert found.value < zp.simulate(other.schedule, ends).makespan
    assert found.value <= found.registered.makespan
    assert found.timeline == zp.simulate(found.schedule, ends)


@pytest.mark.parametrize("seed", range(6))
def test_passes_of_the_critical_path_start_when_the_previous_one_ends(seed):
    task = replace(some_task(Random(seed), (2, 4), (3, 7)), minimizes_span=False)
    task = replace(task, costs=replace(task.costs, w=0, b=None, message=0, blocking=False))
    buffers, candidate = row_buffers(task.tables), dispatched_candidates(task, 1)[0]
    compiled(simulate_rows)(task.tables, buffers, candidate.rows, candidate.min_fit, np.zeros(0, np.int64))
    path = buffers.critical[: compiled(find_critical_path)(task.tables, buffers, candidate.rows, False)]
    begins = pass_starts(zp.simulate(task.to_schedule(candidate.rows, candidate.min_fit), task.costs))
    passes, numbers = candidate.rows[path], buffers.microbatch[path]
    times, lasts = begins[passes, numbers], task.tables.duration[passes]
    assert times[0] + lasts[0] == pytest.approx(candidate.value)
    assert times[-1] == 0
    other = task.tables.rank[passes[1:]] != task.tables.rank[passes[:-1]]  # then there is a message between them
    assert times[:-1] == pytest.approx(times[1:] + lasts[1:] + np.where(other, task.tables.lag[passes[1:]], 0))


def test_rows_that_exceed_memory_or_deadlock_are_refused():
    problem = Problem(2, 2, 3)
    task = SearchTask(problem, zp.linear(problem), zp.Costs(memory_limit=2), False)
    none = np.zeros(0, np.int64)
    greedy, stuck = np.array([0, 0, 0, 3, 3, 3, 1, 2] + [1, 2] * 2), np.array([3, 0, 0, 3, 0, 3] + [1, 2] * 3)
    for rows in (greedy, stuck):
        assert compiled(simulate_rows)(task.tables, row_buffers(task.tables), rows, np.ones(2), none) >= NEVER


@pytest.mark.parametrize("seed", range(16))
def test_search_reaches_the_optimum_and_bounds_do_not_exceed_it(seed):
    task = some_task(Random(1000 + seed))
    try:
        found = search(task, steps=3000)
    except ConfigError:
        return  # not even one microbatch fits
    best = optimum(task, found.value * 1.5)
    assert lower_bound(task) <= best * (1 + 1e-9)
    assert found.bound <= best * (1 + 1e-9)
    assert (
        found.value <= best * (1 + 1e-6) or task.minimizes_span
    )  # the solver may begin a rank later, for a shorter span
    if task.is_split_best and not task.minimizes_span:
        assert found.value == pytest.approx(best, rel=1e-6)
        assert found.gap == 0


def search(task: SearchTask, **options):
    return zp.search(
        ranks=task.num_ranks, microbatches=task.num_microbatches, costs=task.costs,
        stages_per_rank=task.problem.stages_per_rank, placement=lambda problem: task.placement,
        weight_parts=task.problem.num_weight_parts, objective="span" if task.minimizes_span else "makespan", **options,
    )  # fmt: skip


@pytest.mark.parametrize("entry", [entry for entry in entries() if entry.placement_name != "mirror"], ids=str)
@pytest.mark.parametrize("cases", mark_rest_full([6, 120], [6]))
def test_bounds_are_below_registered_schedules(entry, cases):
    random = Random(entry.name)
    for _ in range(cases):
        per_rank = random.choice(entry.stages_per_rank[:3])
        ranks, microbatches = random.choice((1, 2, 3, 4, 6)), random.choice((1, 2, 5, 8, 12))
        try:
            schedule = build_entry(entry, ranks=ranks, microbatches=microbatches, stages_per_rank=per_rank)
        except ZeropipeError:
            continue
        costs = some_costs(random, schedule.num_stages, 1)
        b = [x + y for x, y in zip(costs.column("i", schedule.num_stages), costs.column("w", schedule.num_stages))]
        costs = replace(costs, b=random.choice((None, [x * 0.8 for x in b])), overlap=random.choice((None, b)))
        peak = max(zp.simulate(schedule, replace(costs, memory_limit=None)).peak_memory)
        costs = replace(costs, memory_limit=random.choice((None, peak)))
        timeline = zp.simulate(schedule, costs)
        for span in (False, True):
            task = SearchTask(schedule.problem, schedule.placement, costs, span)
            assert lower_bound(task) <= value_of(task, timeline) * (1 + 1e-9)


@pytest.mark.parametrize(
    "per_rank,rule,ranks,microbatches",
    mark_rest_full(
        [(*placement, *size) for placement in PLACEMENTS for size in ((1, 3), (2, 1), (2, 5), (4, 7))],
        lambda case: case[2] < 4 or case[:2] in PLACEMENTS[:2],
    ),
    ids=lambda x: getattr(x, "__name__", x),
)
def test_result_is_valid_fits_and_is_no_worse_than_registered_schedules(per_rank, rule, ranks, microbatches):
    random = Random(ranks * 100 + per_rank)
    for limit in (None, ranks * per_rank, ranks * per_rank // 2 + per_rank):
        costs = replace(some_costs(random, ranks * per_rank, 1), activation=1, stash=None, memory_limit=limit)
        found = zp.search(
            ranks=ranks, microbatches=microbatches, stages_per_rank=per_rank, placement=rule, costs=costs, steps=60
        )
        zp.check(found.schedule)
        assert not found.timeline.over_limit
        assert found.timeline == zp.simulate(found.schedule, costs)
        assert found.bound <= found.value * (1 + 1e-9)
        assert found.gap == max(0.0, found.value / found.bound - 1) or found.gap == 0
        for entry in entries():
            try:
                named = build_entry(entry, ranks=ranks, microbatches=microbatches, stages_per_rank=per_rank)
            except ZeropipeError:
                continue
            timeline = zp.simulate(named, costs)
            if named.placement == rule(named.problem) and not timeline.over_limit:
                assert found.value <= timeline.makespan * (1 + 1e-12)


@pytest.mark.parametrize("per_rank,rule", PLACEMENTS[:3], ids=lambda x: getattr(x, "__name__", x))
@pytest.mark.parametrize("limits", [(1, 1.5, 3, 7), pytest.param((1, 1.5, 2, 3, 4, 5, 7), marks=pytest.mark.full)])
def test_more_memory_is_never_worse(per_rank, rule, limits):
    costs = zp.Costs(f=1, i=1.2, w=0.7, p2p=0.15, activation=1, stash=0.4)
    values = [
        zp.search(
            ranks=4, microbatches=7, stages_per_rank=per_rank, placement=rule,
            costs=replace(costs, memory_limit=limit * per_rank), steps=60,
        ).value
        for limit in limits
    ]  # fmt: skip
    assert all(more <= less * (1 + 1e-9) for less, more in pairwise(values))


def test_smaller_limits_need_equal_limits_of_all_ranks():
    problem = Problem(4, 4, 8)
    task = SearchTask(problem, zp.linear(problem), zp.Costs(memory_limit=4), False)
    assert task.smaller_limits() == [3, 2, 1]
    assert replace(task, rank_limits=(4.0, 4.0, 3.0, 4.0)).smaller_limits() == []


def test_a_search_leaves_room_for_the_workspace_of_every_backward():
    costs = zp.Costs(activation=2, stash=3, workspace=4, i_workspace=3, memory_limit=14)
    found = zp.search(ranks=3, microbatches=6, costs=costs, steps=200)
    assert found.timeline == zp.simulate(found.schedule, costs)
    assert max(found.timeline.peak_memory) <= 14
    assert max(zp.simulate(found.schedule, replace(costs, workspace=0, i_workspace=None)).peak_memory) <= 14 - 2
    with pytest.raises(ConfigError, match="memory_limit=6: rank 0 needs 7 for its weights and one microbatch"):
        zp.search(ranks=3, microbatches=6, costs=replace(costs, memory_limit=6), steps=1)
    filled = zp.fill_gaps(zp.build("zb-h1", ranks=3, microbatches=6), costs, weight_parts=2)
    assert max(zp.simulate(filled, costs).peak_memory) <= 14


def test_search_with_less_memory_than_any_built_in_schedule_needs():
    found = zp.search(ranks=8, microbatches=16, costs=zp.Costs(memory_limit=4), steps=500)
    assert max(found.timeline.peak_memory) <= 4
    assert found.schedule.name == "searched"


def test_rank_limits_are_kept():
    costs = zp.Costs(p2p=0.1, memory_limit=4)
    limits = (4, 4, 2, 3)
    found = zp.search(ranks=4, microbatches=8, costs=costs, rank_limits=limits, steps=200)
    assert all(peak <= limit for peak, limit in zip(found.timeline.peak_memory, limits))
    assert found.value >= zp.search(ranks=4, microbatches=8, costs=costs, steps=200).value


def test_seed_and_steps_determine_the_schedule_for_any_number_of_workers():
    options = {
        "ranks": 4,
        "microbatches": 9,
        "costs": zp.Costs(f=1, i=1.3, w=0.6, p2p=0.2, memory_limit=3),
        "steps": 4000,
    }
    one, two = zp.search(**options, workers=1), zp.search(**options, workers=3)
    assert one.schedule == two.schedule
    assert one.bound == two.bound


@pytest.mark.parametrize(
    "row,limit,rate",
    [  # of the Zero Bubble paper's tables: ZB-1p and ZB-2p
        ((24, 18.522, 18.086, 9.337, 0.601), 1, 0.1585),
        ((24, 18.522, 18.086, 9.337, 0.601), 2, 0.0436),
        ((32, 18.513, 18.086, 9.331, 0.626), 2, 0.0039),
    ],
)
def test_published_rates_are_reached(row, limit, rate):
    m, f, i, w, p2p = row
    activation, stash = 34 * 2304 + 5 * 24 * 1024, 32 * 2304
    costs = zp.Costs(f=f, i=i, w=w, p2p=p2p, activation=activation, stash=stash, memory_limit=limit * 8 * activation)
    found = zp.search(ranks=8, microbatches=m, costs=costs, objective="span", steps=0)
    assert found.timeline.bubble <= rate + 5e-5


def test_rows_are_stretched_to_more_microbatches():
    problem, costs = Problem(4, 8, 40), zp.Costs(memory_limit=8)
    short, task = (SearchTask(replace(problem, num_microbatches=m), zp.vee(problem), costs, False) for m in (16, 40))
    rows = schedule_passes(zp.build("zbv", ranks=4, microbatches=16))
    candidate = Evaluator(task).best_fit(stretch_rows(short, rows, task))
    assert candidate.value == 40 * 6 + 3  # as zbv itself: no bubble


def test_progress_is_reported_and_can_stop_the_search():
    told = []
    found = zp.search(
        ranks=8, microbatches=16, stages_per_rank=2, placement=zp.vee, costs=zp.Costs(p2p=0.15, memory_limit=8),
        seconds=60, progress=lambda p: told.append(p) or len(told) > 2,
    )  # fmt: skip
    assert found.interrupted
    assert found.seconds < 50
    assert [p.value for p in told] == sorted((p.value for p in told), reverse=True)
    assert told[-1].value >= found.value >= found.bound


def test_an_interrupt_returns_the_best_so_far():
    def interrupt(progress):
        raise KeyboardInterrupt

    found = zp.search(
        ranks=8, microbatches=16, stages_per_rank=2, placement=zp.vee, costs=zp.Costs(p2p=0.15, memory_limit=8),
        seconds=60, progress=interrupt,
    )  # fmt: skip
    assert found.interrupted
    zp.check(found.schedule)


@pytest.mark.parametrize(
    "options,message",
    [
        ({"ranks": 0}, "ranks=0: must be a positive integer"),
        ({"microbatches": 2.5}, "microbatches=2.5: must be a positive integer"),
        (
            {"stages_per_rank": 2, "placement": zp.linear},
            "linear has one stage per rank, not 2; use loop, vee or all",
        ),
        ({"placement": "spiral"}, "placement='spiral': must be linear, loop, vee or all"),
        ({"placement": zp.mirror}, "mirror keeps two copies of the model"),
        ({"objective": "time"}, "objective='time': must be"),
        ({"seconds": float("nan")}, "seconds=nan: must be a non-negative number"),
        ({"steps": -1}, "steps=-1: must be a non-negative integer"),
        ({"seed": "x"}, "seed='x': must be an integer"),
        ({"progress": 3}, "progress=3: must be a function or None"),
        ({"workers": 0}, "workers=0: must be a positive integer, or None for all cores"),
        ({"weight_parts": 0}, "weight_parts=0: must be an integer from 1 to 64"),
        (
            {"costs": zp.Costs(activation=2e9, memory_limit=1e9, memory_unit="B")},
            "memory_limit=1 GB: rank 0 needs 2 GB for its weights and one",
        ),
        ({"costs": zp.Costs(weights=3, memory_limit=3.5)}, "memory_limit=3.5: rank 0 needs 4 for its weights and one"),
        ({"costs": zp.Costs(f=(1, 2, 3))}, "f has 3 entries, the schedule has 4 stages"),
        ({"microbatches": 10**9}, "a search takes at most"),
        ({"rank_limits": [1, 2]}, "rank_limits has 2 entries: there are 4 ranks; use one entry for each"),
        ({"rank_limits": [4, 4, 0.5, 4]}, "memory_limit=0.5: rank 2 needs 1 for its weights and one microbatch"),
    ],
)
def test_bad_input_is_refused_in_one_line(options, message):
    with pytest.raises(ConfigError) as error:
        zp.search(**{"ranks": 4, "microbatches": 8, **options})
    assert message in str(error.value)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("per_rank", [1, 2])
def test_search_with_costs_of_zero(per_rank):
    """Makespan and bound are 0 then, or those of the messages."""
    nothing = zp.search(ranks=4, microbatches=4, costs=zp.Costs(f=0, i=0, w=0), stages_per_rank=per_rank, steps=3)
    assert (nothing.value, nothing.bound, nothing.gap) == (0, 0, 0)
    costs = zp.Costs(f=0, i=0, w=0, p2p=1)
    messages = zp.search(ranks=4, microbatches=4, costs=costs, stages_per_rank=per_rank, steps=3)
    assert 0 < messages.bound <= messages.value
