"""Checkpointed F in the engine: gradients bit for bit as without marks, and the memory that the simulator says."""

from __future__ import annotations

import random
from dataclasses import replace
from functools import partial

import pytest

pytest.importorskip("torch")
pytest.importorskip("transformers")

import marked_cases as cases
import offload_cases
from engine_helpers import ranks

import zeropipe as zp
from zeropipe.sim.fit import fit


def marks(schedule, part=0.5):
    """The schedule with a part of its F checkpointed."""
    problem, rng = schedule.problem, random.Random(1)
    every = [(stage, number) for stage in range(problem.num_stages) for number in range(problem.total_slices)]
    return replace(schedule, checkpointed=frozenset(rng.sample(every, round(part * len(every)))), rebuild=None)


def pair(name, num_ranks=2, microbatches=4, **options):
    plain = zp.build(name, ranks=num_ranks, microbatches=microbatches, **options)
    return plain, marks(plain)


def require_equal(results):
    assert all(result["equal"] for result in results)


def run(num_ranks, *arguments, **keywords):
    require_equal(ranks(num_ranks).run(partial(offload_cases.hf_with_and_without, **keywords), *arguments))


def full(*values):
    return [pytest.param(value, marks=pytest.mark.full, id=str(value)) for value in values]


@pytest.mark.parametrize("name", ["zbv", *full("1f1b", "gpipe", "zb-h1", "interleaved", "dualpipev", "seq1f1b")])
def test_schedules(name):
    run(2, *pair(name), "llama")


@pytest.mark.parametrize(
    "options", [{"overlap": "turns"}, *full({"split": "whole"}, {"direct_gradients": True}, {"dynamic_weights": True})],
    ids=str,
)  # fmt: skip
def test_options(options):
    run(2, *pair("dualpipev" if "overlap" in options else "zb-h1"), "qwen3", options=options)


def test_packed_rows_with_copies_to_the_host():
    plain = zp.build("zb-h1", ranks=2, microbatches=4)
    copied = zp.with_offload(marks(plain), offload=0.5)
    assert copied.offloading is not None
    run(2, plain, copied, "qwen3", packed=True)


@pytest.mark.full
@pytest.mark.parametrize("family", ["gpt2", "gemma3", "qwen3-moe"])
def test_families(family):
    run(2, *pair("1f1b"), family)


@pytest.mark.parametrize("shard", ["dp_shard", *full("tp", "cp", "dp_replicate")])
def test_mesh(shard):
    run(4, *pair("zb-h1"), "llama", shard, options={"regather": True} if shard == "dp_shard" else {})


@pytest.mark.full
def test_compiled_blocks_have_two_graphs():
    for equal, one, two in ranks(2).run(cases.compiled_steps, *pair("zb-h1")):
        assert equal
        assert 1 <= one <= two <= 2 * one


def test_marked_blocks_are_computed_again():
    _, marked = pair("1f1b")
    results = ranks(2).run(cases.count_recomputed, marked, [4, 8])
    for rank, counts in enumerate(results):
        number = sum(stage == rank for stage, _ in marked.checkpointed)
        assert counts == [2 * number, 4 * number, 0]  # two layers of a rank; the marks are repeated with the rows


def test_memory_is_what_the_simulator_says():
    plain, marked = pair("1f1b", microbatches=6)
    record = partial(cases.record, family="llama", options={})
    (kept, *_), (less, *_), (measured, *_) = (
        ranks(2).run(partial(record, options=options), schedule)
        for schedule, options in ((plain, {}), (plain, {"ac": "full"}), (marked, {}))
    )
    costs = zp.Costs(activation=fit(kept).activation, checkpointed_activation=fit(less).activation)
    assert all(b < 0.5 * a for a, b in zip(costs.activation, costs.checkpointed_activation, strict=True))

    def levels(timeline):
        return memoryview(timeline.memory.after).cast("d").tolist()

    assert levels(measured) == pytest.approx(levels(zp.simulate(marked, costs)), abs=1)
    limit = 0.7 * max(kept.peak_memory)
    chosen = zp.with_checkpointing(plain, replace(costs, memory_limit=limit, checkpointed_workspace=0.0))
    assert 0 < len(chosen.checkpointed) < 12
    found = ranks(2).run(record, chosen)[0]
    assert max(levels(found)) <= limit < max(levels(kept))
    again = fit(measured)
    assert again.activation == pytest.approx(costs.activation)
    assert again.checkpointed_activation == pytest.approx(costs.checkpointed_activation)


def test_what_cannot_run_is_refused():
    plain, marked = pair("1f1b")
    for found in ranks(2).run(cases.refusals, plain, marked):
        assert "ac='full' with the checkpointed F of 1f1b: both choose what is computed again" in found["ac"]
        assert "names no blocks to compile or checkpoint" in found["blocks"]
        assert "rank 1 has another schedule than rank 0" in found["others"]
