"""Whole weights for other programs: exact, on the ranks that ask, one at a time."""

from __future__ import annotations

import pytest

pytest.importorskip("torch")

import checkpoint_cases as cases
from engine_helpers import ranks

import zeropipe as zp

BLOCKS, TIED, LLAMA = cases.Model(False), cases.Model(True), cases.Model(False, {})


@pytest.mark.parametrize(
    "name, sizes, model, tensors",
    [
        ("zbv", {"pp": 2, "dp_shard": 2}, TIED, 25),
        ("1f1b", {"pp": 2, "tp": 2}, LLAMA, 39),
        ("dualpipe", {"pp": 4}, TIED, 25),
        ("1f1b", {"dp_replicate": 2, "dp_shard": 2}, BLOCKS, 32),
    ],
    ids=["sharded, tied", "tensor parallel", "mirrored, tied", "replicated shards"],
)
def test_weights_are_the_plain_models(name, sizes, model, tensors):
    schedule = zp.build(name, ranks=sizes.get("pp", 1), microbatches=8)
    every = ranks(4).run(cases.weights_of, schedule, sizes, model, None)
    for number, difference, memory in every:
        assert number == tensors
        assert difference == 0.0
        assert 1.0 <= memory < 2.5, "one whole weight at a time, and what it is gathered from"


def test_only_those_who_ask_get_weights():
    schedule = zp.build("1f1b", ranks=2, microbatches=8)
    every = ranks(4).run(cases.weights_of, schedule, {"pp": 2, "dp_replicate": 2}, BLOCKS, [1])
    assert [number for number, _, _ in every] == [0, 32, 0, 0]


def test_a_rank_that_stops_early_does_not_leave_the_others_alone():
    schedule = zp.build("1f1b", ranks=4, microbatches=8)
    every = ranks(4).run(cases.weights_of, schedule, {"pp": 4}, BLOCKS, None, True)
    assert [number for number, _, _ in every] == [32, 1, 32, 32]


def test_ranks_that_are_not_there_are_refused():
    for first, second in ranks(4).run(cases.wrong_ranks, zp.build("1f1b", ranks=4, microbatches=4)):
        assert first == "rank 0: ranks=[7]: give some of 0 to 3, or None for all"
        assert second == "rank 1 has ranks=(1,), rank 0 has ranks=(0,): give every rank the same"
