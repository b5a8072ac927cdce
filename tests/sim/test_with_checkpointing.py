"""Checkpointed F: their times and memory, and the rule that chooses them."""

import random
from dataclasses import replace
from itertools import combinations

import pytest
from reference_simulator import reference_simulate

import zeropipe as zp
from zeropipe.core.action import BACKWARD, Kind, actions_of
from zeropipe.core.jit import Compiled
from zeropipe.core.resize import resize
from zeropipe.errors import ConfigError
from zeropipe.sim.fit import fit


def every_f(schedule):
    problem = schedule.problem
    return [(stage, number) for stage in range(problem.num_stages) for number in range(problem.total_slices)]


def random_marks(schedule, seed):
    rng = random.Random(seed)
    return replace(schedule, checkpointed=frozenset(key for key in every_f(schedule) if rng.random() < 0.5))


def random_costs(num_stages, seed, **more):
    rng = random.Random(seed)
    some = lambda low, high: [round(rng.uniform(low, high), 2) for _ in range(num_stages)]  # noqa: E731
    return zp.Costs(
        f=some(0.5, 2), i=some(0.5, 2), w=some(0.2, 1), recompute=some(0.2, 1), activation=some(2, 3),
        checkpointed_activation=some(0.1, 1), stash=some(0.1, 0.9), f_workspace=some(0, 1), workspace=some(0, 2),
        i_workspace=some(0, 2), checkpointed_workspace=some(0, 3), checkpointed_i_workspace=some(0, 3), p2p=0.1, **more,
    )  # fmt: skip


def columns(costs, num_stages, *names):
    return [costs.column(name, num_stages) for name in names]


@pytest.mark.parametrize("seed", range(2))
@pytest.mark.parametrize("name", zp.names())
def test_times_and_memory_against_a_direct_computation(name, seed):
    plain = zp.build(name, ranks=4, microbatches=8)
    if plain.num_slices > 1:
        pytest.skip("slices are below")
    schedule, costs = random_marks(plain, seed), random_costs(plain.num_stages, seed)
    timeline, num = zp.simulate(schedule, costs), plain.num_stages
    f, b, i, w, again = columns(costs, num, "f", "b", "i", "w", "recompute")
    kept, less, stash = columns(costs, num, "activation", "checkpointed_activation", "stash")
    spaces = columns(costs, num, "f_workspace", "workspace", "i_workspace")
    spaces += columns(costs, num, "checkpointed_workspace", "checkpointed_i_workspace")
    is_marked = lambda action: (action.stage, action.microbatch) in schedule.checkpointed  # noqa: E731

    def lasts(action):
        time = {Kind.F: f, Kind.B: b, Kind.I: i, Kind.W: w}[action.kind][action.stage]
        return time + again[action.stage] * (action.kind in BACKWARD and is_marked(action))

    times = reference_simulate(plain, lambda actions: sum(map(lasts, actions)), lambda *_: 0.1)
    for rank in range(4):
        spans = list(timeline.spans(rank))
        assert [x for span in spans for x in (span.start, span.end)] == pytest.approx(
            [x for span in spans for x in times[span.action._replace(checkpointed=False)]]
        )
        level, during, after = 0.0, [], []
        for step in timeline.steps(rank):
            actions = [span.action for span in step]
            level += sum((less if is_marked(a) else kept)[a.stage] for a in actions if a.kind is Kind.F)
            space = 0.0
            for a in actions:
                own = {Kind.F: 0, Kind.B: 1 + 2 * is_marked(a), Kind.I: 2 + 2 * is_marked(a)}.get(a.kind)
                space += 0.0 if own is None else spaces[own][a.stage]
            during += [level + space] * len(actions)
            for a in actions:
                allocated = (less if is_marked(a) else kept)[a.stage]
                level -= {Kind.F: 0.0, Kind.B: allocated, Kind.I: allocated - stash[a.stage], Kind.W: stash[a.stage]}[
                    a.kind
                ]
            after += [level] * len(actions)
        entries = list(schedule.packed.entries(rank, *timeline.memory))
        assert [one for _, one, _ in entries] == pytest.approx(during)
        assert [one for _, _, one in entries] == pytest.approx(after, abs=1e-9)


@pytest.mark.parametrize("name", ["1f1b", "zbv", "seq1f1b", "dualpipev"])
def test_all_marks_cost_what_costs_without_marks_do(name):
    plain = zp.build(name, ranks=4, microbatches=8)
    costs = random_costs(plain.num_stages, 1, f_attention=0.2, i_attention=0.3, keys=0.1, key_gradients=0.2)
    marked = replace(plain, checkpointed=frozenset(every_f(plain)))
    ones, others = zp.simulate(marked, costs), zp.simulate(plain, costs.with_all_checkpointed(plain.num_stages))
    assert (ones.start, ones.end, ones.memory) == (others.start, others.end, others.memory)
    assert ones.makespan > zp.simulate(plain, costs).makespan


def test_compiled_kernels_say_the_same(monkeypatch):
    schedule = random_marks(zp.build("seq1f1b", ranks=4, microbatches=8), 3)
    costs = random_costs(schedule.num_stages, 3)
    plain = zp.simulate(schedule, costs)
    monkeypatch.setattr("zeropipe.sim.simulate.arrays", lambda _: Compiled())
    compiled = zp.simulate(schedule, costs)
    assert (compiled.start, compiled.end, compiled.memory) == (plain.start, plain.end, plain.memory)


def test_by_default_the_backward_has_all_activations():
    one = zp.from_csv("0F0c,0F1,0B1,0B0")
    timeline = zp.simulate(one, zp.Costs(activation=4, checkpointed_activation=1, workspace=2))
    assert memoryview(timeline.memory.during).cast("d").tolist() == [1, 5, 7, 6]
    assert timeline.makespan == 2 + 2 + 2 + 1
    assert zp.simulate(one).peak_memory == (2.0,)  # nothing is saved unless the costs say so


def fewest_marks(plain, costs, rank):
    """The fewest marks of a rank that fit, by trying all of them."""
    own = [(a.stage, a.microbatch) for a in actions_of(plain.rows[rank]) if a.kind is Kind.F]
    for size in range(len(own) + 1):
        for marks in combinations(own, size):
            timeline = zp.simulate(replace(plain, checkpointed=frozenset(marks)), costs)
            if timeline.peak_memory[rank] <= costs.memory_limit * (1 + 1e-9):
                return size
    return None


@pytest.mark.parametrize("limit", [1.5, 2, 2.5, 3, 3.3, 4])
@pytest.mark.parametrize("name", ["1f1b", "zb-h1", "gpipe"])
def test_no_fewer_marks_fit(name, limit):
    plain = zp.build(name, ranks=3, microbatches=5)
    costs = zp.Costs(memory_limit=limit, checkpointed_activation=0.25, checkpointed_workspace=0.5, stash=0.3)
    fewest = [fewest_marks(plain, costs, rank) for rank in range(3)]
    if None in fewest:
        with pytest.raises(ConfigError, match=f"rank {fewest.index(None)} needs .* with all F checkpointed"):
            zp.with_checkpointing(plain, costs)
        return
    chosen = zp.with_checkpointing(plain, costs)
    assert [sum(stage == rank for stage, _ in chosen.checkpointed) for rank in range(3)] == fewest
    assert max(zp.simulate(chosen, costs).peak_memory) <= limit * (1 + 1e-9)


@pytest.mark.parametrize("seed", [1, 3])
@pytest.mark.parametrize("name", zp.names())
def test_the_result_fits_and_each_mark_is_needed(name, seed):
    plain = zp.build(name, ranks=4, microbatches=8)
    costs = random_costs(plain.num_stages, seed)
    peaks = zp.simulate(plain, costs).peak_memory
    least = zp.simulate(replace(plain, checkpointed=frozenset(every_f(plain))), costs).peak_memory
    limit = max(least) + random.Random(seed).random() * max(0.0, max(peaks) - max(least))
    costs = replace(costs, memory_limit=limit)
    chosen = zp.with_checkpointing(plain, costs)
    zp.check(chosen)
    assert not zp.simulate(chosen, costs).over_limit
    assert bool(chosen.checkpointed) == (max(peaks) > limit * (1 + 1e-9))
    for mark in random.Random(seed).sample(sorted(chosen.checkpointed), min(6, len(chosen.checkpointed))):
        without = replace(chosen, checkpointed=chosen.checkpointed - {mark})
        assert zp.simulate(without, costs).over_limit
    again = resize(chosen, 16)  # built and marked again, or repeated where that would need more
    assert again.num_microbatches == 16
    assert not zp.simulate(again, costs).over_limit


@pytest.mark.parametrize("policy", ["keep", "regather"])
def test_with_shards_and_copies(policy):
    plain = zp.build("interleaved", ranks=4, microbatches=8)
    costs = random_costs(plain.num_stages, 0, shards=policy, unshard=0.5, reduce=1.0, full_weights=1, full_gradients=2)
    copied = zp.with_offload(plain, zp.Costs(offload_bandwidth=2), offload=0.3)
    for one in (plain, copied):
        peak = max(zp.simulate(one, costs).peak_memory)
        marked = zp.with_checkpointing(one, replace(costs, memory_limit=0.8 * peak))
        assert max(zp.simulate(marked, costs).peak_memory) <= 0.8 * peak * (1 + 1e-9)
        assert 0 < len(marked.checkpointed) < len(every_f(plain))
        assert marked.offloading == one.offloading


def test_what_fits_is_not_marked():
    plain = zp.build("1f1b", ranks=4, microbatches=8)
    assert zp.with_checkpointing(plain, zp.Costs(memory_limit=4)) == plain
    marked = replace(plain, checkpointed=frozenset(every_f(plain)))
    assert zp.with_checkpointing(marked, zp.Costs(memory_limit=4)) == plain
    with pytest.raises(ConfigError, match="no limit to keep: set memory_limit in the costs"):
        zp.with_checkpointing(plain)
    with pytest.raises(ConfigError, match="no F saves memory by being checkpointed: set checkpointed_activation"):
        zp.with_checkpointing(plain, zp.Costs(memory_limit=3))  # a mark saves nothing by default
    with pytest.raises(ConfigError, match=r"rank 0 needs 2\.2 with all F checkpointed that can be, .* memory_limit=2;"):
        zp.with_checkpointing(plain, zp.Costs(memory_limit=2, checkpointed_activation=0.4))


@pytest.mark.parametrize("name", ["1f1b", "zb-h1", "zbv"])
def test_a_fit_gives_the_costs_back(name):
    plain = zp.build(name, ranks=4, microbatches=8)
    costs = random_costs(plain.num_stages, 2)
    costs = replace(
        costs, f_workspace=0.0, workspace=0.0, i_workspace=0.0, checkpointed_workspace=0.0,
        checkpointed_i_workspace=0.0,
    )  # fmt: skip
    found = fit(zp.simulate(random_marks(plain, 5), costs))
    for field in ("f", "i" if name != "1f1b" else "b", "recompute", "activation", "checkpointed_activation"):
        assert found.column(field, plain.num_stages) == pytest.approx(costs.column(field, plain.num_stages)), field
    every = replace(plain, checkpointed=frozenset(every_f(plain)))
    again = fit(zp.simulate(every, costs))
    assert zp.simulate(every, again).makespan == pytest.approx(zp.simulate(every, costs).makespan)


def test_costs_per_rank_are_divided():
    problem = zp.Problem(2, 4, 4)
    costs = zp.Costs(
        recompute=2, checkpointed_activation=[2, 4], checkpointed_workspace=3, checkpointed_i_workspace=[3, 5]
    )
    stages = costs.regroup(problem)
    assert columns(stages, 4, "recompute", "checkpointed_activation") == [[1] * 4, [1, 1, 2, 2]]
    assert columns(stages, 4, "checkpointed_workspace", "checkpointed_i_workspace") == [[3] * 4, [3, 3, 5, 5]]
