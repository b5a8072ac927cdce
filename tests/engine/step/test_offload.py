"""OFFLOAD and RELOAD in the engine: gradients bit for bit as without them, and memory that is really freed."""

from __future__ import annotations

from functools import partial

import pytest

pytest.importorskip("torch")

import offload_cases as cases
from engine_helpers import TOLERANCE, largest, ranks

import zeropipe as zp
from zeropipe.errors import EngineError


def pair(name, num_ranks=2, microbatches=4, share=1.0, **options):
    plain = zp.build(name, ranks=num_ranks, microbatches=microbatches, **options)
    return plain, zp.with_offload(plain, offload=share)


def run(num_ranks, *arguments, case=cases.hf_with_and_without, **keywords):
    return ranks(num_ranks).run(partial(case, **keywords), *arguments)


def require_equal(results, at_least=1):
    assert all(result["equal"] for result in results)
    assert sum(result["copies"] for result in results) >= at_least
    assert not any(result["held"] for result in results)  # what is copied is freed


def full(*values):
    return [pytest.param(value, marks=pytest.mark.full, id=str(value)) for value in values]


@pytest.mark.parametrize("name", ["interleaved", "dualpipev", *full("1f1b", "gpipe", "zb-h1", "zbv")])
def test_schedules(name):
    require_equal(run(2, *pair(name), "llama"), at_least=20)


OPTIONS = {"ac": "full"}, {"ac": "selective:op"}, {"overlap": "turns"}
OTHERS = {"ac": "selective:2"}, {"split": "whole"}, {"direct_gradients": True}, {"fused_head": False}


@pytest.mark.parametrize("options", [*OPTIONS, *full(*OTHERS)], ids=str)
def test_options(options):
    name = "dualpipev" if "overlap" in options else "zb-h1"
    require_equal(run(2, *pair(name), "qwen3", options=options), at_least=4)


@pytest.mark.full
@pytest.mark.parametrize("ac", ["none", "full", "selective:op"])
def test_compiled_blocks(ac):
    options = {"compile": True, "ac": ac}
    require_equal(run(2, *pair("zb-h1"), "llama", options=options, case=cases.hf_compiled), at_least=4)


def test_packed_rows():
    require_equal(run(2, *pair("1f1b"), "qwen3", packed=True), at_least=4)


@pytest.mark.parametrize("family", ["gpt2", *full("gemma3", "qwen3-moe", "phi")])
def test_families(family):
    require_equal(run(2, *pair("1f1b"), family), at_least=4)


@pytest.mark.parametrize("shard", ["dp_shard", *full("tp", "cp", "dp_replicate")])
def test_mesh(shard):
    require_equal(run(4, *pair("zb-h1"), "llama", shard), at_least=4)


def test_weights_that_are_gathered_again_stay():
    require_equal(run(4, *pair("zb-h1"), "llama", "dp_shard", options={"regather": True}), at_least=4)


def test_memory_that_others_use_stays_and_views_stay_views():
    results = ranks(2).run(cases.modules_with_and_without, *pair("gpipe"), cases.sharing, 6)
    require_equal(results, at_least=4)


def test_a_tensor_that_was_modified_is_refused():
    plain, offloaded = pair("gpipe")
    for schedule in (plain, offloaded):
        with pytest.raises(EngineError, match="was modified in place after the forward"):
            ranks(2).run(cases.modules_with_and_without, schedule, schedule, cases.modifying, 6)


def test_against_the_plain_model():
    results = ranks(4).run(cases.train, pair("zbv", 4, 8)[1], 2)
    assert max(largest(results).values()) < TOLERANCE


def test_a_rank_that_cannot_copy_ends_all():
    results = ranks(2).run(cases.failing_copy, pair("gpipe")[1], 0)
    assert all("rank 0" in text and "no memory left on the host" in text for text in results)
    assert any("0OFFLOAD0" in text for text in results)
