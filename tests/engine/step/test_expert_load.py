"""The rows of experts in a step, and biases that balance them: equal to one process."""

from __future__ import annotations

import gc
import math
from itertools import product

import pytest

pytest.importorskip("transformers")

import expert_load_cases as cases
import torch
from engine_helpers import TOLERANCE, largest, ranks
from full_marker import mark_rest_full
from torch import nn

import zeropipe as zp
from zeropipe.engine import ExpertLoad
from zeropipe.engine.step import expert_load

ONE = zp.build("1f1b", ranks=1, microbatches=2)
CASES = [
    ("zb-h1", {"dp_replicate": 2}, 2, "deepseek_v3", {"ac": "full"}),
    ("zbv", {"pp": 2, "dp_shard": 2}, 2, "deepseek_v3", {"ac": "full"}),
    ("1f1b", {"dp_replicate": 2}, 1, "deepseek_v3", {"compile": True, "ac": "selective:op", "direct_gradients": True}),
    *product(
        ("1f1b", "dualpipe", "dualpipev"), ({"pp": 2, "dp_replicate": 2},), (1, 2), ("deepseek_v3", "glm4_moe"),
        ({}, {"ac": "selective:op"}),
    ),
    *product(("1f1b",), ({"dp_shard": 2, "tp": 2}, {"dp_replicate": 2, "dp_shard": 2}), (1, 2), ("glm4_moe",), ({},)),
]  # fmt: skip


@pytest.mark.parametrize("name, sizes, ep, kind, options", mark_rest_full(CASES, lambda it: it == CASES[0]), ids=str)
def test_counts_and_biases_equal_one_process(name, sizes, ep, kind, options):
    schedule = zp.build(name, ranks=sizes.get("pp", 1), microbatches=4)
    seen = largest(ranks(math.prod(sizes.values())).run(cases.train_balanced, schedule, sizes, ep, kind, options))
    assert seen.pop("changed") > 0
    assert seen.pop("rows") == 0
    assert seen.pop("bias") == 0
    assert max(seen.values()) < TOLERANCE, seen


def test_models_without_such_biases_are_refused():
    (said,) = ranks(1).run(cases.without_bias, ONE)
    assert said.startswith("lm.model.layers.0.mlp.experts has no router with a bias (e_score_correction_bias)")
    ((said, loads),) = ranks(1).run(cases.without_experts, ONE)
    assert said == "rate=0.05 balances experts: the model has none with transformers' common interface"
    assert loads == {}


def test_numbers_of_a_load():
    even, one = ExpertLoad((5, 5, 5, 5)), ExpertLoad((0, 8, 0, 0))
    assert (even.max_over_mean, even.busiest, even.entropy) == (1.0, 0.25, pytest.approx(1.0))
    assert (one.max_over_mean, one.busiest, one.entropy) == (4.0, 1.0, 0.0)
    assert ExpertLoad((1, 1, 2, 0)).entropy == pytest.approx(0.75)  # 1.5 bits of 2
    assert ExpertLoad((0, 0)).max_over_mean == 0


class Experts(nn.Module):
    num_experts = 3

    def forward(self, x, index):
        return index


def test_counters_are_gone_with_those_who_count():
    """Engines come and go in one process: nothing of an engine is kept, and its experts run without a hook."""
    before, experts = len(expert_load._counters), Experts()
    one, other = (expert_load._Counter(experts) for _ in range(2))
    index = torch.tensor([[0, 2], [2, 1]])
    assert torch.equal(experts(index, index), index)
    assert (one.take(), other.take()) == ([1, 1, 2], [1, 1, 2])
    del one
    gc.collect()
    experts(index, index)
    assert other.take() == [1, 1, 2]
    assert len(expert_load._counters) == before + 1
    del other
    gc.collect()
    assert len(expert_load._counters) == before
    assert not experts._forward_pre_hooks
