"""Laws of the search: what it finds is valid, fits, is as good as any schedule with a name, and not below the bound."""

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
from zeropipe.searching.bound.bound import lower_bound
from zeropipe.searching.cpsat import prove
from zeropipe.searching.judge import Judge
from zeropipe.searching.kernels import FAR, play
from zeropipe.searching.model import Task, smaller_limits, starts_of
from zeropipe.searching.starts.rules import dispatched
from zeropipe.searching.starts.starts import one_by_one, passes_of
from zeropipe.searching.starts.stretch import stretched
from zeropipe.searching.walks import decide

PLACEMENTS = [(1, zp.linear), (2, zp.vee), (2, zp.loop), (3, zp.vee)]


def some_costs(random: Random, num_stages: int, least: int) -> zp.Costs:
    """Small whole numbers, for every stage alike or not; a memory limit from `least` on, or none."""
    alike = random.random() < 0.5

    def column(low: int, high: int):
        return random.randint(low, high) if alike else [random.randint(low, high) for _ in range(num_stages)]

    return zp.Costs(
        f=column(1, 4), i=column(1, 4), w=column(0, 4), p2p=random.choice((0, 0, 1, 3)),
        message=random.choice((0, 2)), bandwidth=2, blocking=random.random() < 0.2,
        activation=random.choice((1, 2, column(1, 3))), stash=random.choice((None, None, 0, 1)),
        memory_limit=random.choice((None, *range(least, 12))),
    )  # fmt: skip


def some_task(random: Random, ranks=(1, 2, 3), microbatches=(1, 2, 3, 4), least: int = 6) -> Task:
    per_rank, rule = random.choice(PLACEMENTS[:3])
    p, m = random.choice(ranks), random.choice(microbatches)
    problem = Problem(
        p, p * per_rank, min(m, 3) if per_rank > 1 and max(microbatches) < 5 else m, random.choice((1, 1, 2))
    )
    return Task(problem, rule(problem), some_costs(random, problem.num_stages, least), random.random() < 0.3)


def value_of(task: Task, timeline: zp.Timeline) -> float:
    return max(timeline.rank_span) if task.span else timeline.makespan


def optimum(task: Task, value: float) -> float:
    """The solver's own, with no help."""
    proof = prove(task, None, value, 0.0, seconds=60, workers=1)
    return proof.bound


@pytest.mark.parametrize("seed", range(24))
def test_what_the_kernel_plays_is_what_the_simulator_says(seed):
    random = Random(seed)
    task = some_task(random, (1, 2, 4), (1, 3, 7))
    if seed % 2:  # as Megatron-LM sends
        task = replace(task, costs=replace(task.costs, p2p=2, blocking=False, blocking_ends=True))
    judge = Judge(task)
    for start in [*dispatched(task, 3), judge.plays(one_by_one(task))]:
        if start is None:
            continue
        timeline = zp.simulate(task.schedule(start.rows, start.share), task.costs)
        assert value_of(task, timeline) == pytest.approx(start.value, rel=1e-12)
        assert not timeline.over_limit


def test_the_search_is_for_sends_that_block_at_the_ends():
    """It walks by what these sends cost: what it finds for others is worse here."""
    costs = zp.Costs(f=1, i=1.2, w=0.7, p2p=0.6, memory_limit=4)
    ends = replace(costs, blocking_ends=True)
    options = {"ranks": 4, "microbatches": 8, "steps": 3000}
    found, other = (zp.search(costs=given, **options) for given in (ends, costs))
    assert found.value < zp.simulate(other.schedule, ends).makespan
    assert found.value <= found.named.makespan
    assert found.timeline == zp.simulate(found.schedule, ends)


@pytest.mark.parametrize("seed", range(6))
def test_the_passes_that_decide_begin_when_the_ones_before_them_end(seed):
    task = replace(some_task(Random(seed), (2, 4), (3, 7)), span=False)
    task = replace(task, costs=replace(task.costs, w=0, b=None, message=0, blocking=False))
    work, start = task.work(), dispatched(task, 1)[0]
    compiled(play)(task.model, work, start.rows, start.share, np.zeros(0, np.int64))
    path = work.path[: compiled(decide)(task.model, work, start.rows, False)]
    begins = starts_of(zp.simulate(task.schedule(start.rows, start.share), task.costs))
    passes, numbers = start.rows[path], work.number_at[path]
    times, lasts = begins[passes, numbers], task.model.lasts[passes]
    assert times[0] + lasts[0] == pytest.approx(start.value)
    assert times[-1] == 0
    other = task.model.home[passes[1:]] != task.model.home[passes[:-1]]  # then there is a message between them
    assert times[:-1] == pytest.approx(times[1:] + lasts[1:] + np.where(other, task.model.lag[passes[1:]], 0))


def test_a_row_that_does_not_fit_or_never_ends_is_refused():
    problem = Problem(2, 2, 3)
    task = Task(problem, zp.linear(problem), zp.Costs(memory_limit=2), False)
    none = np.zeros(0, np.int64)
    greedy, stuck = np.array([0, 0, 0, 3, 3, 3, 1, 2] + [1, 2] * 2), np.array([3, 0, 0, 3, 0, 3] + [1, 2] * 3)
    for rows in (greedy, stuck):
        assert compiled(play)(task.model, task.work(), rows, np.ones(2), none) >= FAR


@pytest.mark.parametrize("seed", range(16))
def test_no_bound_is_above_the_optimum_and_the_search_reaches_it(seed):
    task = some_task(Random(1000 + seed))
    try:
        found = search(task, steps=3000)
    except ConfigError:
        return  # not even one microbatch fits
    best = optimum(task, found.value * 1.5)
    assert lower_bound(task) <= best * (1 + 1e-9)
    assert found.bound <= best * (1 + 1e-9)
    assert found.value <= best * (1 + 1e-6) or task.span  # the solver may begin a rank later, for a shorter span
    if task.plain and not task.span:
        assert found.value == pytest.approx(best, rel=1e-6)
        assert found.gap == 0


def search(task: Task, **options) -> "zp.search.search.Found":
    return zp.search(
        ranks=task.num_ranks, microbatches=task.num_microbatches, costs=task.costs,
        stages_per_rank=task.problem.stages_per_rank, placement=lambda problem: task.placement,
        weight_parts=task.problem.num_weight_parts, objective="span" if task.span else "makespan", **options,
    )  # fmt: skip


@pytest.mark.parametrize("entry", [entry for entry in entries() if entry.placement_name != "mirror"], ids=str)
@pytest.mark.parametrize("cases", mark_rest_full([6, 120], [6]))
def test_no_bound_is_above_a_schedule_with_a_name(entry, cases):
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
            task = Task(schedule.problem, schedule.placement, costs, span)
            assert lower_bound(task) <= value_of(task, timeline) * (1 + 1e-9)


@pytest.mark.parametrize(
    "per_rank,rule,ranks,microbatches",
    mark_rest_full(
        [(*placement, *size) for placement in PLACEMENTS for size in ((1, 3), (2, 1), (2, 5), (4, 7))],
        lambda case: case[2] < 4 or case[:2] in PLACEMENTS[:2],
    ),
    ids=lambda x: getattr(x, "__name__", x),
)
def test_what_is_found_is_valid_fits_and_is_not_worse_than_what_has_a_name(per_rank, rule, ranks, microbatches):
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


def test_limits_below_are_those_of_ranks_that_have_the_same():
    problem = Problem(4, 4, 8)
    task = Task(problem, zp.linear(problem), zp.Costs(memory_limit=4), False)
    assert smaller_limits(task) == [3, 2, 1]
    assert smaller_limits(replace(task, rank_limits=(4.0, 4.0, 3.0, 4.0))) == []


def test_less_memory_than_any_schedule_with_a_name_needs_is_served():
    found = zp.search(ranks=8, microbatches=16, costs=zp.Costs(memory_limit=4), steps=500)
    assert max(found.timeline.peak_memory) <= 4
    assert found.schedule.name == "searched"


def test_each_rank_may_have_a_limit_of_its_own():
    costs = zp.Costs(p2p=0.1, memory_limit=4)
    limits = (4, 4, 2, 3)
    found = zp.search(ranks=4, microbatches=8, costs=costs, rank_limits=limits, steps=200)
    assert all(peak <= limit for peak, limit in zip(found.timeline.peak_memory, limits))
    assert found.value >= zp.search(ranks=4, microbatches=8, costs=costs, steps=200).value


def test_the_same_seed_and_steps_give_the_same_schedule_on_any_number_of_workers():
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
    short, task = (Task(replace(problem, num_microbatches=m), zp.vee(problem), costs, False) for m in (16, 40))
    rows = passes_of(zp.build("zbv", ranks=4, microbatches=16))
    start = Judge(task).plays(stretched(short, rows, task))
    assert start.value == 40 * 6 + 3  # as zbv itself: no bubble


def test_progress_is_told_and_can_stop():
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
            "linear has one stage per rank, not 2: choose loop, vee or all",
        ),
        ({"placement": "spiral"}, "placement='spiral': choose linear, loop, vee or all"),
        ({"placement": zp.mirror}, "mirror keeps two copies of the model"),
        ({"objective": "time"}, "objective='time': choose"),
        ({"seconds": float("nan")}, "seconds=nan: a number from 0 on"),
        ({"steps": -1}, "steps=-1: a whole number from 0 on"),
        ({"seed": "x"}, "seed='x': a whole number"),
        ({"progress": 3}, "progress=3: a function is needed, or None"),
        ({"workers": 0}, "workers=0: a whole number from 1 on is needed, or None for all cores"),
        ({"weight_parts": 0}, "weight_parts=0: a W is cut into 1 to 64 parts"),
        (
            {"costs": zp.Costs(activation=2e9, memory_limit=1e9, memory_unit="B")},
            "memory_limit=1 GB: rank 0 needs 2 GB for its weights and one",
        ),
        ({"costs": zp.Costs(weights=3, memory_limit=3.5)}, "memory_limit=3.5: rank 0 needs 4 for its weights and one"),
        ({"costs": zp.Costs(f=(1, 2, 3))}, "f has 3 entries, the schedule has 4 stages"),
        ({"microbatches": 10**9}, "are too many to search"),
        ({"rank_limits": [1, 2]}, "rank_limits has 2 entries: there are 4 ranks, give one for each"),
        ({"rank_limits": [4, 4, 0.5, 4]}, "memory_limit=0.5: rank 2 needs 1 for its weights and one microbatch"),
    ],
)
def test_bad_input_is_refused_in_one_line(options, message):
    with pytest.raises(ConfigError) as error:
        zp.search(**{"ranks": 4, "microbatches": 8, **options})
    assert message in str(error.value)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("per_rank", [1, 2])
def test_work_that_takes_no_time_is_searched(per_rank):
    """Costs may be 0: then so are makespan and bound, or messages are all there is."""
    nothing = zp.search(ranks=4, microbatches=4, costs=zp.Costs(f=0, i=0, w=0), stages_per_rank=per_rank, steps=3)
    assert (nothing.value, nothing.bound, nothing.gap) == (0, 0, 0)
    costs = zp.Costs(f=0, i=0, w=0, p2p=1)
    messages = zp.search(ranks=4, microbatches=4, costs=costs, stages_per_rank=per_rank, steps=3)
    assert 0 < messages.bound <= messages.value
