"""Bounds and searches with slices of sequences, against an exact solver."""

import json
import random
from dataclasses import replace
from itertools import product

import pytest
from exact_slices import ExactModel

import zeropipe as zp
from zeropipe.cli.main import main
from zeropipe.core.placement import Problem
from zeropipe.errors import ConfigError, ZeropipeError
from zeropipe.searching.bounds.lower_bound import lower_bound
from zeropipe.searching.bounds.slice_bound import slice_bound
from zeropipe.searching.task import SearchTask

HORIZON = 400


def whole_costs(seed, num_stages):
    """Costs of stages in whole units, also of each of two slices, of which the second attends to the first."""
    some = random.Random(seed)
    times = {name: [4 * some.randint(1, 4) for _ in range(num_stages)] for name in ("f", "i", "w")}
    return zp.Costs(
        **times, f_attention=[time / 2 for time in times["f"]], i_attention=[time / 2 for time in times["i"]],
        activation=2.0,
    )  # fmt: skip


@pytest.mark.parametrize("name,ranks,per_rank", [("seq1f1b", 2, 1), ("seq1f1b", 3, 1), ("slimpipe", 2, 2)])
@pytest.mark.parametrize("seed", range(2))
def test_no_bound_of_slices_is_above_the_optimum(name, ranks, per_rank, seed):
    pytest.importorskip("ortools")
    schedule = zp.build(name, ranks=ranks, microbatches=2, stages_per_rank=per_rank, slices=2)
    costs = whole_costs(seed, ranks * per_rank)
    optimum = ExactModel(schedule, costs, HORIZON, None, None).solve()
    bound = slice_bound(schedule, costs)
    assert 0.7 * optimum < bound <= optimum
    assert zp.simulate(schedule, costs).makespan >= optimum
    found = zp.search(
        ranks=ranks, microbatches=2, stages_per_rank=per_rank, slices=2, costs=costs, steps=300,
        placement="loop" if per_rank > 1 else None,
    )  # fmt: skip
    assert optimum <= found.value <= zp.simulate(schedule, costs).makespan
    assert found.bound == bound


@pytest.mark.parametrize("slices,limit", [(2, 3), (1, 1)])
def test_no_bound_is_above_the_optimum_with_offload_and_a_limit(slices, limit):
    """With copies to the host only a bound without the limit holds: they may beat every schedule without them."""
    pytest.importorskip("ortools")
    schedule = zp.build("seq1f1b", ranks=2, microbatches=2, slices=slices)
    costs = replace(whole_costs(1, 2), activation=float(slices), stash=0.0)
    copied, kept = (ExactModel(schedule, costs, HORIZON, limit, offload).solve() for offload in (1, None))
    free = ExactModel(schedule, costs, HORIZON, None, None).solve()
    assert slice_bound(schedule, costs) <= free <= copied <= kept
    if slices == 1:
        task = SearchTask(schedule.problem, schedule.placement, costs, minimizes_span=False)
        assert lower_bound(task) <= free
        assert copied < lower_bound(replace(task, costs=replace(costs, memory_limit=limit))) <= kept


def orders(num_microbatches, num_slices):
    """Every order of F and B of a stage: of a microbatch F of its slices, then B of them in the opposite order."""
    chains = [
        [("F", m, x) for x in range(num_slices)] + [("B", m, x) for x in reversed(range(num_slices))]
        for m in range(num_microbatches)
    ]

    def merge(left):
        if not any(left):
            yield []
        for number, chain in enumerate(left):
            if chain:
                rest = [other[1:] if number == n else other for n, other in enumerate(left)]
                yield from ([chain[0], *more] for more in merge(rest))

    return list(merge(chains))


@pytest.mark.parametrize("slices,gradients", [(1, "rolling"), (1, "whole"), (2, None)])
def test_no_bound_is_above_the_best_of_all_orders(slices, gradients):
    """All schedules of two ranks and two microbatches, with rolling gradients and copies to the host too."""
    sharded = {} if gradients is None else {
        "shards": "keep", "unshard": 1.0, "reduce": 2.0, "full_weights": 2.0, "full_gradients": 4.0,
        "gradients": gradients,
    }  # fmt: skip
    costs = zp.Costs(f=[4, 6], b=[8, 6], i=8, w=4, f_attention=2, activation=2, offload_bandwidth=2, **sharded)
    problem, best = Problem(2, 2, 2, num_slices=slices), float("inf")
    placement = zp.linear(problem)
    for rows in product(orders(2, slices), repeat=2):
        texts = [
            ",".join(f"{rank}{kind}{m}" + (f".{x}" if slices > 1 else "") for kind, m, x in row)
            for rank, row in enumerate(rows)
        ]
        try:
            schedule = zp.from_csv("\n".join(texts))
            plain = zp.simulate(schedule, costs)
        except ZeropipeError:
            continue
        best = min(best, plain.makespan)
        if slices == 1:
            copied = zp.simulate(zp.with_offload(schedule, costs, 1.0), costs)
            assert copied.makespan >= plain.makespan - 1e-9
            best = min(best, copied.makespan)
    schedule = zp.build("seq1f1b", ranks=2, microbatches=2, slices=slices)
    bound = slice_bound(schedule, costs)
    assert 0.6 * best < bound <= best
    if slices == 1:
        task = SearchTask(problem, placement, costs.without_sharding(), minimizes_span=False)
        assert lower_bound(task) <= best


def test_a_search_over_slices_is_as_good_as_each_number():
    each = [zp.search(ranks=4, microbatches=4, slices=number, steps=200).value for number in (1, 2, 4)]
    found = zp.search(ranks=4, microbatches=4, slices=[1, 2, 4], steps=200)
    assert found.value == min(each)
    assert found.schedule.num_slices == 4
    assert found.bound <= found.value
    assert found.searched.endswith("1 or 2 or 4 slices and one copy of the model")
    zp.check(found.schedule)


def test_a_search_keeps_the_memory_and_beats_the_registered_ones():
    found = zp.search(ranks=4, microbatches=8, slices=4, stages_per_rank=2, placement="loop", steps=300)
    assert found.value < found.registered.makespan
    costs = zp.Costs(memory_limit=2.75)
    limited = zp.search(ranks=4, microbatches=8, slices=4, stages_per_rank=2, placement="loop", steps=300, costs=costs)
    assert limited.registered is None
    assert max(limited.timeline.peak_memory) <= 2.75
    assert limited.gap == 0


@pytest.mark.parametrize(
    "values,says",
    [
        ({"slices": 0}, "slices=0: must be an integer from 1"),
        ({"slices": 2, "weight_parts": 2}, "weight_parts=2 with slices=2: use one of them"),
        ({"slices": [1, 2], "objective": "span"}, "objective='span' with slices=2: must be 'makespan'"),
        ({"slices": 2, "stages_per_rank": 2, "placement": "vee"}, "are searched in the placements linear and loop"),
        ({"slices": 2, "costs": zp.Costs(memory_limit=0.5)}, "no schedule with so many fits into the memory"),
    ],
)
def test_what_cannot_be_searched_is_refused(values, says):
    with pytest.raises(ConfigError, match=says):
        zp.search(ranks=2, microbatches=2, steps=10, **values)


def test_the_command_searches_numbers_of_slices(capsys, tmp_path):
    out = str(tmp_path / "x.json")
    main(["search", "-p", "4", "-m", "4", "--slices", "2,4", "--search-steps", "20", "--json", "-o", out])
    shown = json.loads(capsys.readouterr().out)
    assert shown["slices"] == 4
    assert zp.from_json((tmp_path / "x.json").read_text()).schedule.num_slices == 4
