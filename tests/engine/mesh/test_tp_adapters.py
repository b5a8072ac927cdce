"""LoRA with layers sharded over `tp`, and with experts divided over `ep`: equal to peft on one process."""

from __future__ import annotations

import math
from itertools import product

import pytest

pytest.importorskip("peft")

import adapter_cases as cases
from checkpoint_chain import chain
from engine_helpers import TOLERANCE, largest, ranks
from full_marker import mark_rest_full

import zeropipe as zp

TWO, BOTH, WITH_PP = {"tp": 2}, {"dp_shard": 2, "tp": 2}, {"pp": 2, "tp": 2}
ALL: dict = {}
ATTENTION = {"target_modules": ["q_proj", "o_proj"], "lora_bias": True}
OTHERS = {"target_modules": ["k_proj", "lm_head"], "modules_to_save": ["o_proj", "up_proj", "norm"]}
LATENT = {"target_modules": ["q_b_proj", "kv_a_proj_with_mqa", "o_proj", "shared_experts.down_proj"]}
CASES = [
    ("1f1b", BOTH, "qwen3", ATTENTION, {}, {}),
    ("1f1b", TWO, "starcoder2", ALL, {"sequence_parallel": True}, {}),
    ("zbv", WITH_PP, "qwen3", OTHERS, {}, {"ac": "selective:op"}),
    *product(
        ("zb-h1", "dualpipev"), (WITH_PP,), ("qwen3", "starcoder2"), (ALL, ATTENTION),
        ({}, {"sequence_parallel": True}), ({}, {"ac": "full"}, {"split": "whole"}),
    ),
    *product(("zb-h1",), (WITH_PP,), ("mixtral", "qwen2_moe"), (ATTENTION,), ({}, {"sequence_parallel": True}), ({},)),
    *product(("zbv",), (WITH_PP, BOTH), ("deepseek_v3",), (LATENT,), ({}, {"sequence_parallel": True}), ({},)),
    *product(
        ("1f1b",), (BOTH, {"tp": 2, "dp_replicate": 2}), ("qwen3", "gemma2"), (ALL, ATTENTION, OTHERS), ({},), ({},),
    ),
]  # fmt: skip


def check(name, sizes, *args, **more):
    schedule = zp.build(name, ranks=sizes.get("pp", 1), microbatches=4)
    seen = largest(ranks(math.prod(sizes.values())).run(cases.train_on_mesh, schedule, sizes, *args, **more))
    assert seen.pop("trained") == 1
    assert max(seen.values()) < TOLERANCE, seen


@pytest.mark.parametrize(
    "name, sizes, kind, changes, spreading, options", mark_rest_full(CASES, lambda it: it == CASES[2]), ids=str
)
def test_training_equals_peft(name, sizes, kind, changes, spreading, options):
    check(name, sizes, kind, changes, spreading, options)


@pytest.mark.full
@pytest.mark.parametrize("name", ["1f1b", "zbv"])
def test_compiled(name):
    check(name, WITH_PP if name == "zbv" else TWO, "qwen3", ALL, {}, {"compile": True})


@pytest.mark.parametrize(
    "sizes, kind, ep",
    mark_rest_full(
        [({"dp_shard": 2}, "qwen3_moe", 2), ({"dp_shard": 4}, "mixtral", 2), (BOTH, "deepseek_v3", 2)], lambda it: False
    ),
    ids=str,
)  # fmt: skip
def test_adapters_beside_divided_experts(sizes, kind, ep):
    check("1f1b", sizes, kind, LATENT if kind == "deepseek_v3" else ATTENTION, {"ep": ep}, {})


ONLY_UP = {"target_modules": ["q_proj"], "target_parameters": ["mlp.experts.gate_up_proj"]}
ON_BIAS = {"target_modules": ["q_proj"], "target_parameters": ["mlp.experts.down_proj_bias"]}
ON_EXPERTS = [
    ("1f1b", {"dp_shard": 2}, "qwen3_moe", ALL, {"ep": 2}, {}),
    ("zb-h1", {"pp": 2}, "gpt_oss", ONLY_UP, {}, {"ac": "selective:op"}),
    *product(
        ("1f1b", "zbv"),
        ({"pp": 2, "dp_shard": 2}, {"pp": 2, "dp_replicate": 2}),
        ("mixtral", "qwen3_moe", "gpt_oss"),
        (ALL, ONLY_UP),
        ({"ep": 2}, {"ep": 2, "dispatch": "process"}),
        ({}, {"ac": "full"}),
    ),
    *product(("1f1b",), (TWO, {"dp_shard": 4}), ("mixtral", "qwen3_moe"), (ALL, ONLY_UP), ({},), ({},)),
    ("1f1b", {"dp_shard": 4}, "mixtral", ALL, {"ep": 2}, {}),
    ("1f1b", BOTH, "mixtral", ALL, {"ep": 2}, {}),
    ("1f1b", {"tp": 2, "dp_replicate": 2}, "mixtral", ALL, {"ep": 2}, {}),
    ("zb-h1", {"pp": 2}, "mixtral", ONLY_UP, {}, {"compile": True}),
]


@pytest.mark.parametrize(
    "name, sizes, kind, changes, spreading, options",
    mark_rest_full(ON_EXPERTS, lambda it: it == ON_EXPERTS[0]),
    ids=str,
)
def test_adapters_on_experts_equal_peft(name, sizes, kind, changes, spreading, options):
    """What peft adds to the weights of all experts, each row gets from two products."""
    check(name, sizes, kind, changes, spreading, options)


@pytest.mark.parametrize(
    "kind, changes, sizes, spreading, words",
    [
        ("qwen3", {"use_dora": True}, TWO, {}, "the adapter on model.layers.0.mlp.down_proj is more than a product"),
        ("qwen3", {"lora_dropout": 0.1}, TWO, {}, "the adapter has lora_dropout=0.1: processes of tp would draw"),
        ("gpt_oss", ON_BIAS, {"dp_shard": 2}, {"ep": 2}, "an adapter on more of experts than their weights: leave it"),
    ],
)  # fmt: skip
def test_what_cannot_be_sharded_is_refused(kind, changes, sizes, spreading, words):
    for said in ranks(2).run(cases.refused, kind, changes, sizes, spreading):
        assert said.startswith(words)


@pytest.mark.full
def test_checkpoints_of_any_layout(tmp_path):
    layouts = [("1f1b", TWO), ("zbv", WITH_PP), ("1f1b", {"pp": 2}), ("1f1b", BOTH), ("1f1b", {"dp_shard": 2})]
    seen = chain(tmp_path, cases.AdaptedModel(), layouts)
    assert max(seen) < TOLERANCE, seen
