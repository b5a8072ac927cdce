"""Layers to stages: the dynamic programs against all cuts, for every placement, with and without memory limits."""

from dataclasses import replace
from itertools import combinations, pairwise
from random import Random

import pytest

import zeropipe as zp
from zeropipe.balancing.balance import balance_task, best_counts, peak_in_flight
from zeropipe.balancing.heuristics import even_start, local_search
from zeropipe.errors import ConfigError
from zeropipe.estimating.estimate import estimate
from zeropipe.schedules.registry import build_entry, entries
from zeropipe.sim.layer_costs import LayerCost, LayerCosts, Setting


def model(times, first=0.3, last=1.4, sizes=None):
    """A toy model: a kind for each layer."""
    sizes = sizes or [1.0] * len(times)
    kinds = {
        f"l{n}": LayerCost(t / 3, t / 3, t / 3, activation=size, stash=size, parameters=1)
        for n, (t, size) in enumerate(zip(times, sizes))
    }
    ends = {"embedding": LayerCost(first, 0, 0, parameters=3), "head": LayerCost(0, last, 0, activation=0.5)}
    names = tuple(kinds)
    return LayerCosts("toy", "estimate", names, (Setting({**kinds, **ends}),), after=("head",))


def task_of(costs, schedule):
    return balance_task(costs, schedule.problem, schedule.placement, peak_in_flight(schedule))


def all_cuts(task):
    n, s = task.num_layers, task.num_stages
    for places in combinations(range(n + s - 1), s - 1):
        bars = [-1, *places, n + s - 1]
        counts = tuple(b - a - 1 for a, b in pairwise(bars))
        if all(count >= task.min_layers(stage) for stage, count in enumerate(counts)) and task.fits(counts):
            yield counts


def best_of_all(task):
    return min((task.objective(counts)[0] for counts in all_cuts(task)), default=None)


SCHEDULES = [
    ("1f1b", 3, None), ("interleaved", 2, 2), ("interleaved", 3, 2), ("zbv", 2, None), ("zbv", 3, None),
    ("dualpipe", 4, None), ("dualpipev", 2, None), ("hanayo", 2, 4), ("interleaved", 2, 3),
]  # fmt: skip


@pytest.mark.parametrize("name,ranks,per_rank", SCHEDULES)
def test_no_cut_is_better(name, ranks, per_rank):
    schedule = zp.build(name, ranks=ranks, microbatches=8, stages_per_rank=per_rank)
    random = Random(f"{name}{ranks}")
    tight = 0
    for _ in range(6):
        num_layers = random.randint(max(4, schedule.num_stages - 2), 8)
        alike = random.random() < 0.3
        times = [1.0] * num_layers if alike else [random.choice([0.5, 1, 1.5, 2.5]) for _ in range(num_layers)]
        sizes = [random.choice([1.0, 2.0]) for _ in times]
        costs = model(times, random.choice([0, 0.3]), random.choice([0.2, 1.4, 4]), sizes)
        task = task_of(costs, schedule)
        if random.random() < 0.6:
            least = min(max(task.rank_loads(counts)[1]) for counts in all_cuts(task))
            task = replace(task, memory=tuple(least * random.choice([0.98, 1.0, 1.3]) for _ in task.memory))
            tight += 1
        if random.random() < 0.4:
            task = replace(task, speed=tuple(speed * random.choice([1, 0.5, 2]) for speed in task.speed))
        wanted, (counts, exact) = best_of_all(task), best_counts(task)
        if wanted is None:
            assert counts is None
            continue
        if schedule.problem.stages_per_rank <= 2:
            assert exact
        if counts is None:
            assert not exact
            continue
        assert sum(counts) == num_layers
        assert task.fits(counts)
        found = task.objective(counts)[0]
        assert found >= wanted * (1 - 1e-12)
        if exact:
            assert found == pytest.approx(wanted, rel=1e-9), (times, counts)
    assert tight


@pytest.mark.parametrize("entry", entries(), ids=str)
def test_every_schedule_can_be_balanced(entry):
    schedule = build_entry(entry, ranks=4, microbatches=12)
    costs = estimate("qwen3-8b", sequence=1024)
    found = zp.balance(costs, schedule)
    assert found.exact
    assert sum(found.counts) == 36
    assert found.slowest <= found.less_slowest * (1 + 1e-12)  # sums are rounded
    assert found.less_slowest <= found.even_slowest
    assert len(found.rank_times) == 4
    zp.simulate(schedule, costs.costs(found.counts, placement=schedule.placement))


def test_the_head_of_a_small_model_takes_layers_from_its_rank():
    costs = estimate("qwen3-0.6b", sequence=4096, microbatch_size=4)
    found = zp.balance(costs, zp.build("1f1b", ranks=4, microbatches=8))
    assert found.counts[-1] < min(found.counts[:-1])
    assert found.gain > 0.1
    assert found.slowest <= found.less_slowest < found.even_slowest
    assert found.less[-1] < found.less[1]
    in_a_vee = zp.balance(costs, zp.build("zbv", ranks=4, microbatches=8))
    assert in_a_vee.counts[0] + in_a_vee.counts[-1] < 28 / 4, "rank 0 has embedding and head"


def test_memory_moves_layers_where_there_is_room():
    schedule = zp.build("1f1b", ranks=2, microbatches=4)  # rank 0 keeps two microbatches alive, rank 1 one
    costs = model([1.0] * 6, first=0, last=0)
    assert zp.balance(costs, schedule).counts == (3, 3)
    each = costs.state.with_full_weights(1)
    limit = 2 * (each + 2) + 3 * each + 0.01  # two layers and the embedding on rank 0
    assert zp.balance(costs, schedule, memory=(limit, 1e9)).counts == (2, 4)
    with pytest.raises(ConfigError, match=r"10 B beside the workspace is too little for every .* rank 0 needs \d+ B;"):
        zp.balance(costs, schedule, memory=10)
    with pytest.raises(ConfigError, match="memory='80GB': must be a number, or one number per rank"):
        zp.balance(costs, schedule, memory="80GB")


def test_slow_gpus_get_fewer_layers():
    schedule = zp.build("1f1b", ranks=3, microbatches=4)
    assert zp.balance(model([1.0] * 9, 0, 0), schedule, speeds=(1, 0.5, 1.5)).counts == (3, 1, 5)
    for wrong in ((1, 2), (1, 0, 1), (1, "x", 1)):
        with pytest.raises(ConfigError, match="speeds has"):
            zp.balance(model([1.0] * 9), schedule, speeds=wrong)


def test_microbatches_alive_are_counted_until_their_last_w():
    assert peak_in_flight(zp.build("1f1b", ranks=4, microbatches=8)) == [4, 3, 2, 1]
    assert peak_in_flight(zp.build("gpipe", ranks=2, microbatches=5)) == [5, 5]
    assert max(peak_in_flight(zp.build("zb-h1", ranks=4, microbatches=8))) == 4


def test_steps_to_better_cuts_are_near_the_best():
    random = Random(5)
    schedule = zp.build("interleaved", ranks=2, microbatches=8, stages_per_rank=4)
    for _ in range(10):
        task = task_of(model([random.choice([1.0, 2.0, 3.0]) for _ in range(9)]), schedule)
        assert task.objective(local_search(task, even_start(task)))[0] <= 1.15 * best_of_all(task)


def test_what_every_stage_has_counts():
    costs = model([1.0] * 6, 0, 0)
    kinds = {**costs.settings[0].kinds, "stage": LayerCost(0.5, 0.25, 0.25, activation=3.0)}
    costs = replace(costs, settings=(Setting(kinds),), each=("stage",))
    schedule = zp.build("1f1b", ranks=2, microbatches=4)
    found = zp.balance(costs, schedule)
    assert found.rank_times == pytest.approx((4, 4))
    stages = costs.costs(found.counts)
    assert [f + b for f, b in zip(stages.f, stages.b)] == pytest.approx(found.rank_times)
    task = task_of(costs, schedule)
    assert task.rank_loads((3, 3))[1][0] == pytest.approx(6 * 16 + 2 * (3 + 3)), "two microbatches of rank 0 are alive"


def test_too_many_stages_are_refused():
    with pytest.raises(ConfigError, match="8 stages for 4 layers: each stage between"):
        zp.balance(model([1.0] * 4), zp.build("zbv", ranks=4, microbatches=8))


def test_layers_of_two_kinds_are_cut_exactly_in_no_time():
    """62 layers, every sixth without a window, on a loop: every place in the middle is tried."""
    costs = zp.estimate("gemma-3-27b")
    found = zp.balance(costs, zp.build("interleaved", ranks=4, microbatches=8, stages_per_rank=2))
    assert found.exact
    assert sum(found.counts) == 62
    assert found.slowest < 1.05 * sum(found.rank_times) / 4 < found.even_slowest


def test_many_layers_of_two_kinds_are_cut_well_in_no_time():
    """An exact cut of them would take hours."""
    costs = zp.estimate("gemma-3-27b")
    costs = replace(costs, layers=(costs.layers * 9)[:500])
    found = zp.balance(costs, zp.build("interleaved", ranks=8, microbatches=16, stages_per_rank=2))
    assert sum(found.counts) == 500
    assert found.slowest < 1.01 * sum(found.rank_times) / 8 < found.even_slowest
