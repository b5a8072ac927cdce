"""Engines with float8: schedules, shards and activation checkpointing against one stage with the same layers."""

from __future__ import annotations

import pytest

pytest.importorskip("torch")

import float8_cases as cases
from engine_helpers import ranks
from full_marker import mark_rest_full

import zeropipe as zp

CASES = [
    ("zbv", {"pp": 2}, "tensor", {"ac": "full"}),
    ("1f1b", {"pp": 2}, "row", {}),
    ("dualpipev", {"pp": 2}, "row", {"ac": "selective:op"}),
    ("zb-h1", {"pp": 2}, "tensor", {"split": "whole"}),
    ("zb-h1", {"dp_shard": 2}, "row", {"regather": True}),
    ("1f1b", {"dp_shard": 2}, "tensor", {"direct_gradients": True}),
    ("1f1b", {"dp_replicate": 2}, "tensor", {}),
    ("zbv", {"dp_shard": 2}, "tensor", {"gradients": "rolling", "ac": "selective:2"}),
]


@pytest.mark.parametrize(
    "name, sizes, mode, options", mark_rest_full(CASES, lambda it: it in (CASES[0], CASES[4], CASES[5])), ids=str
)
def test_gradients_equal_those_of_one_stage(name, sizes, mode, options):
    schedule = zp.build(name, ranks=sizes.get("pp", 1), microbatches=4)
    for same, rounding in ranks(2).run(cases.gradient_differences, schedule, sizes, mode, options):
        assert same < 1e-5
        assert 1e-3 < rounding < 0.2


@pytest.mark.full
@pytest.mark.parametrize("mode", ["tensor", "row"])
def test_compiled_gradients_are_close(mode):
    """Other roundings in float32 change some roundings to float8."""
    schedule = zp.build("zbv", ranks=2, microbatches=4)
    for same, rounding in ranks(2).run(cases.gradient_differences, schedule, {"pp": 2}, mode, {"compile": True}):
        assert same < 0.05
        assert 1e-3 < rounding < 0.2


@pytest.mark.parametrize("mode", mark_rest_full(["tensor", "row"], ["tensor"]))
def test_training_ends_where_bfloat16_ends(mode):
    plain, found = (ranks(2).run(cases.losses, each, 40)[0] for each in ("none", mode))
    assert plain[0] > 4
    assert sum(plain[-5:]) / 5 < 1
    assert abs(sum(found[-5:]) - sum(plain[-5:])) / 5 < 0.1
    assert found != plain


def test_weights_are_converted_once_per_step_unless_they_are_gathered_again():
    number = 4 * 7  # linear layers
    for counts, kept, change in ranks(2).run(cases.count_conversions, {}):
        assert counts == [2 * number] * 2  # for F and for I
        assert kept == 0
        assert change > 1e-4
    for counts, kept, _ in ranks(2).run(cases.count_conversions, {"regather": True}):
        assert counts == [3 * 2 * number] * 2
        assert kept == 0
