"""Searches that checkpoint some F, or copy some activations to the host, to keep a memory limit."""

import json
from contextlib import suppress
from dataclasses import replace
from itertools import chain, combinations, product

import pytest
from test_search_slices import orders

import zeropipe as zp
from zeropipe.errors import ConfigError, ZeropipeError
from zeropipe.schedules.registry import entries
from zeropipe.sim.layer_file import to_layer_json

TIMES = {"w": 0.7, "i": 1.2, "p2p": 0.05}
SMALL = zp.Costs(checkpointed_activation=0.1, checkpointed_workspace=0.2, **TIMES)
QUICK = {"steps": 20, "workers": 1}


@pytest.mark.parametrize("limit", [1, 2, 3, 8])
def test_a_search_keeps_the_limit_and_is_no_worse_than_registered_schedules(limit):
    costs = replace(SMALL, memory_limit=float(limit))
    found = zp.search(ranks=4, microbatches=8, costs=costs, checkpointing=True, **QUICK)
    zp.check(found.schedule)
    timeline = zp.simulate(found.schedule, costs)
    assert timeline.makespan == found.value
    assert max(timeline.peak_memory) <= limit * (1 + 1e-9)
    assert found.bound <= found.value
    assert bool(found.schedule.checkpointed) == (limit < 3)
    assert "some F checkpointed" in found.searched
    marked = []
    for entry in entries():
        if 1 not in entry.stages_per_rank or entry.sliced:
            continue
        schedule = zp.build(entry.name, ranks=4, microbatches=8, stages_per_rank=1)
        if schedule.placement.copies == zp.linear(schedule.problem).copies:
            with suppress(ConfigError):  # too large with all F checkpointed
                marked.append(zp.simulate(zp.with_checkpointing(schedule, costs), costs).makespan)
    assert found.registered.makespan == min(marked)
    assert found.value <= min(marked)
    if limit == 8:
        plain = zp.search(ranks=4, microbatches=8, costs=costs, **QUICK)
        assert found.value <= plain.value
        assert found.schedule.checkpointed == frozenset()


@pytest.mark.parametrize("limit", [1.0, 1.5, 2.0])
def test_no_bound_is_above_the_best_of_all_orders_and_marks(limit):
    """All schedules with full backwards of two ranks and two microbatches, with every choice of checkpointed F."""
    costs = replace(SMALL, f=[1.0, 1.5], memory_limit=limit)
    keys = list(product(range(2), repeat=2))
    choices = list(chain.from_iterable(combinations(keys, number) for number in range(5)))
    best = float("inf")
    for rows in product(orders(2, 1), repeat=2):
        text = "\n".join(",".join(f"{rank}{kind}{m}" for kind, m, _ in row) for rank, row in enumerate(rows))
        try:
            schedule = zp.from_csv(text)
            zp.check(schedule)
        except ZeropipeError:
            continue
        for choice in choices:
            timeline = zp.simulate(replace(schedule, checkpointed=frozenset(choice)), costs)
            if max(timeline.peak_memory) <= limit * (1 + 1e-9):
                best = min(best, timeline.makespan)
    found = zp.search(ranks=2, microbatches=2, costs=costs, checkpointing=True, **QUICK)
    assert 0.6 * best < found.bound <= best
    assert found.value <= best * (1 + 1e-9)  # which may split backwards


def test_activations_are_copied_to_the_host():
    costs = replace(SMALL, memory_limit=2.0, offload_bandwidth=1.0)
    found = zp.search(ranks=4, microbatches=8, costs=costs, offload=True, **QUICK)
    assert found.schedule.offloading is not None
    timeline = zp.simulate(found.schedule, costs)
    assert max(timeline.peak_memory) <= 2 * (1 + 1e-9)
    assert found.bound <= timeline.makespan == found.value
    assert found.value < zp.search(ranks=4, microbatches=8, costs=costs, **QUICK).value


@pytest.mark.parametrize(
    "arguments, message",
    [
        ({"checkpointing": True, "offload": True}, "checkpointing and offload both save activations: use one"),
        ({"checkpointing": True, "costs": SMALL}, "checkpointing without a limit to keep: set memory_limit"),
        ({"checkpointing": True, "slices": 2}, "slices with some F checkpointed: are not searched together"),
        ({"offload": True, "rank_limits": [2, 2]}, "rank_limits with activations copied to the host: are not"),
        ({"checkpointing": True, "objective": "span"}, "objective with some F checkpointed: are not searched"),
        ({"checkpointing": True, "costs": zp.Costs(memory_limit=0.5)}, "memory_limit=0.5: rank 0 needs 1 for"),
    ],
)
def test_what_is_refused(arguments, message):
    defaults = {"costs": replace(SMALL, memory_limit=2.0), **QUICK}
    with pytest.raises(ConfigError, match=message):
        zp.search(ranks=2, microbatches=2, **{**defaults, **arguments})


SIZES = ("--ranks", 4, "--microbatches", 8, "--memory-limit", 2, "--checkpointed-activation", 0.1)


def test_commands_checkpoint_as_few_as_keep_the_limit(run, tmp_path):
    status, out, err = run("search", *SIZES, "--checkpointing", "fit", "--search-steps", 20, "--json")
    assert status == 0, err
    found = json.loads(out)
    assert found["bound"] <= found["value"]
    status, out, err = run("simulate", "1f1b", *SIZES, "--checkpointing", "fit", "--json")
    costs = zp.Costs(memory_limit=2, checkpointed_activation=0.1)
    schedule = zp.with_checkpointing(zp.build("1f1b", ranks=4, microbatches=8), costs)
    assert json.loads(out)["makespan"] == zp.simulate(schedule, costs).makespan >= found["value"]
    assert run("draw", "1f1b", *SIZES, "--checkpointing", "fit", "-o", tmp_path / "marked.csv")[0] == 0
    assert zp.from_csv((tmp_path / "marked.csv").read_text()).checkpointed == schedule.checkpointed
    for name, rest, message in (
        ("simulate", ("1f1b", "--ranks", 2, "--microbatches", 2), "checkpointing=fit without a limit to keep: pass"),
        ("simulate", ("1f1b", "--ranks", 2, "--microbatches", 4, "--memory-limit", 1), "no F saves memory by being"),
    ):
        status, _, err = run(name, *rest, "--checkpointing", "fit")
        assert status == 2
        assert message in err
    status, _, err = run("search", *SIZES, "--offload", "0.5")
    assert status == 2
    assert "offload=0.5: a search takes fit only" in err


def test_costs_of_layers_know_checkpointed_f(run, tmp_path):
    file = tmp_path / "costs.json"
    file.write_text(to_layer_json(zp.estimate("qwen3-0.6b", gpu="h100", sequence=2048, ac=["none", "full"])))
    sizes = ("--costs", file, "--ranks", 4, "--microbatches", 8)
    plain = json.loads(run("simulate", "1f1b", *sizes, "--json")[1])
    limit = 0.8 * max(plain["peak_memory"])
    status, out, err = run(
        "simulate", "1f1b", *sizes, "--memory-limit", f"{limit}B", "--checkpointing", "fit", "--json"
    )
    assert status == 0, err
    found = json.loads(out)
    assert max(found["peak_memory"]) <= limit * (1 + 1e-9)
    assert found["makespan"] >= plain["makespan"]
    text = run("show", "1f1b", *sizes, "--memory-limit", f"{limit}B", "--checkpointing", "fit")[1]
    assert "c" in text
