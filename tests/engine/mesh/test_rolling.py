"""Rolling gradients: reduced after every microbatch, or after groups of them, and the same as whole ones."""

from __future__ import annotations

from typing import Any

import pytest

pytest.importorskip("torch")

import mesh_cases
from engine_helpers import TOLERANCE, largest, ranks

import zeropipe as zp

EXACT = 1e-12  # but for the order of additions in float64
SHARDED, HYBRID = {"pp": 2, "dp_shard": 2}, {"dp_replicate": 2, "dp_shard": 2}


def full(*values: Any) -> Any:
    return pytest.param(*values, marks=pytest.mark.full)


@pytest.mark.parametrize(
    "name, gradients, tied, sizes",
    [
        ("1f1b", "rolling", True, SHARDED),
        full("dualpipev", "rolling", False, SHARDED),
        ("1f1b", "rolling", False, HYBRID),
        *(full(name, gradients, False, SHARDED) for name in zp.names() for gradients in ("rolling", "rolling:1")),
        *(full(name, "rolling", True, SHARDED) for name in ("zbv", "interleaved")),
        full("zbv", "rolling", False, {"pp": 2, "dp_replicate": 2, "dp_shard": 2}),
    ],
    ids=str,
)
def test_training_equals_one_process(name, gradients, tied, sizes):
    """Two steps of AdamW with clipping; every pipeline has its own number of rows."""
    schedule = zp.build(name, ranks=sizes.get("pp", 1), microbatches=4)
    number = 8 if len(sizes) == 3 else 4
    args = (schedule, sizes, {"gradients": gradients}, 2, tied, ())
    seen = largest(ranks(number).run(mesh_cases.train_on_mesh, *args))
    assert max(seen.values()) < TOLERANCE, seen


LLAMA, MOE = "llama", "qwen3_moe"
OPTIONS: list[Any] = [
    full("zbv", SHARDED, LLAMA, {}, {}, "rolling", False),
    full("interleaved", SHARDED, LLAMA, {"ac": "full"}, {}, "rolling:1", False),
    full("1f1b", SHARDED, LLAMA, {"direct_gradients": True, "fused_head": False}, {}, "rolling", False),
    full("zb-h1", SHARDED, LLAMA, {"regather": True}, {}, "rolling", False),
    ("1f1b", SHARDED, LLAMA, {}, {"offload": True}, "rolling", False),
    ("1f1b", SHARDED, LLAMA, {}, {}, "rolling", True),
    full("dualpipev", SHARDED, MOE, {}, {"ep": 2}, "rolling", False),
    full("1f1b", {"dp_shard": 4}, MOE, {}, {"ep": 2}, "rolling", False),
    full("1f1b", {"dp_shard": 2, "cp": 2}, LLAMA, {}, {}, "rolling", False),
    ("zb-h1", {"dp_shard": 2, "tp": 2}, LLAMA, {}, {}, "rolling", False),
    full("1f1b", SHARDED, LLAMA, {"compile": True}, {}, "rolling", False),
    full("zbv", SHARDED, LLAMA, {"compile": True, "ac": "full"}, {}, "rolling", False),
    full("dualpipev", SHARDED, MOE, {"overlap": "turns"}, {"ep": 2}, "rolling", False),
    full("zbv", SHARDED, LLAMA, {"split": "whole"}, {}, "rolling", False),
    full("1f1b", SHARDED, LLAMA, {"regather": True, "ac": "full"}, {}, "rolling", False),
    full("zbv", SHARDED, LLAMA, {"check_finite": True, "record": True}, {}, "rolling", True),
    *(full(name, SHARDED, LLAMA, {}, {}, "rolling", False) for name in zp.names()),
    *(full(name, SHARDED, LLAMA, {}, {}, "rolling:1", False) for name in zp.names()),
]  # fmt: skip


@pytest.mark.parametrize("name, sizes, kind, options, spreading, gradients, adapter", OPTIONS, ids=str)
def test_the_same_as_whole_gradients(name, sizes, kind, options, spreading, gradients, adapter):
    """Two steps that add up, their norm and clipping; a rank has fewer bytes of whole gradients than before."""
    pytest.importorskip("transformers")
    import rolling_cases as cases

    schedule = zp.build(name, ranks=sizes.get("pp", 1), microbatches=4)
    changes = {"num_hidden_layers": 2 * schedule.num_stages}
    args = (schedule, sizes, kind, changes, spreading, options, gradients, adapter)
    for seen in ranks(4).run(cases.compare, *args):
        assert seen["error"] < EXACT, seen
        assert seen[f"{gradients} reduces"] >= seen["whole reduces"]
        assert seen[f"{gradients} peak"] <= seen["whole peak"]


@pytest.mark.parametrize(
    "name, options, gradients",
    [
        ("1f1b", {"direct_gradients": True}, "rolling"),
        full("zb-h1", {"regather": True}, "rolling"),
        full("interleaved", {"ac": "full", "direct_gradients": True}, "rolling:1"),
    ],
    ids=str,
)
def test_few_gradients_are_whole(name, options, gradients):
    """Of one block and the rest of its stage, or of one stage; what is being reduced counts twice."""
    pytest.importorskip("transformers")
    import rolling_cases as cases

    schedule = zp.build(name, ranks=2, microbatches=4)
    args = (schedule, SHARDED, LLAMA, {"num_hidden_layers": 4 * schedule.num_stages}, {}, options, gradients, False)
    for seen in ranks(4).run(cases.compare, *args):
        assert seen["error"] < EXACT, seen
        assert seen["whole peak"] >= seen["stages"]
        allowed = seen["largest stage"] if ":" in gradients else seen["outer"] + 1.05 * seen["unit"]
        assert seen[f"{gradients} peak"] <= allowed < 0.6 * seen["stages"], seen


@pytest.mark.parametrize("dtype, rounding", [("float32", 1e-6), ("bfloat16", 2e-2)])
def test_shards_add_up_in_float32(dtype, rounding):
    """Reduced in 16 bits they are half as large, and more exact than gradients that also add up in 16 bits."""
    import rolling_cases as cases
    import torch

    schedule = zp.build("1f1b", ranks=2, microbatches=8)
    for seen in ranks(4).run(cases.compare_dtypes, schedule, getattr(torch, dtype), "rolling"):
        assert seen["dtypes"] == {"torch.float32"}
        assert seen["error"] < rounding, seen
        if dtype == "bfloat16":
            assert seen["error"] < seen["whole error"]
        assert seen["rolling bytes"] * (2 if dtype == "bfloat16" else 1) == seen["float32 bytes"]


def test_what_cannot_roll_is_refused():
    import rolling_cases as cases

    for unknown, dynamic, unequal in ranks(4).run(cases.refused, zp.build("zbv", ranks=2, microbatches=4), (3, 5)):
        assert unknown == "rank 0: gradients='sometimes': must be 'whole', 'rolling', or 'rolling:N' with N from 1"
        assert dynamic.startswith(
            "rank 0: dynamic_weights=True cannot run gradients='rolling': a W that runs early has whole"
        )
        assert unequal == (
            "pipelines pass [3, 5] microbatches: with gradients='rolling' they reduce gradients together, so all must "
            "pass the same number; or leave out gradients"
        )
