"""Slices of sequences on the engine: equal to the un-pipelined model."""

from __future__ import annotations

import re
from math import prod
from typing import Any

import pytest

pytest.importorskip("transformers")

import slice_cases as cases
import torch
from engine_helpers import TOLERANCE, largest, ranks
from family_models import tiny

import zeropipe as zp
from zeropipe.engine.mesh.slice_check import find_difference
from zeropipe.engine.stages.skeleton import build_on_meta
from zeropipe.engine.stages.verify import find_family

FAMILIES = ("gpt_oss", "deepseek_v3", "gemma2")
PP2 = {"pp": 2}
BATCHES: dict[str, dict[str, Any]] = {"plain": {}, "packed": {"packed": True}, "padded": {"padded": True}}


def build(name: str, slices: int, ranks: int = 2, **options: Any) -> zp.Schedule:
    return zp.build(name, ranks=ranks, microbatches=4, slices=slices, **options)


QUICK = [("seq1f1b", 4, "plain", {}), ("zb-h1", 3, "packed", {"slice_sizes": (5, 2, 1)}), ("seq1f1b", 2, "padded", {})]
STEPS = [
    *QUICK,
    *(
        pytest.param(name, slices, batches, {"slice_sizes": tuple(range(slices, 0, -1))}, marks=pytest.mark.full)
        for name in ("seq1f1b", "slimpipe", "zb-h1") for slices in (1, 2, 4) for batches in BATCHES
        if slices > 1
    ),
]  # fmt: skip


@pytest.mark.parametrize(("name", "slices", "batches", "options"), STEPS)
def test_steps_equal_one_process(name, slices, batches, options):
    changes = {"tie_word_embeddings": True, "num_hidden_layers": 4}
    job = (cases.train_in_slices, build(name, slices), PP2, "qwen3", changes, BATCHES[batches], options, 5)
    seen = largest(ranks(2).run(*job, timeout=280))
    assert max(seen.values()) < TOLERANCE, seen


@pytest.mark.parametrize("kind", ["gemma3_text", *(pytest.param(k, marks=pytest.mark.full) for k in FAMILIES)])
def test_families(kind):
    """Windows, sinks, soft-caps, latent attention; with all blocks computed again."""
    job = (cases.train_in_slices, build("zb-h1", 3), PP2, kind, {}, {}, {"ac": "full", "slice_sizes": (3, 2, 2)}, 2)
    seen = largest(ranks(2).run(*job, timeout=280))
    # gradients of gemma's norms and of deepseek's router add up in float32, here in another order
    assert seen["loss"] < 1e-9, seen
    near = {"gemma3_text": 1e-5, "gemma2": 1e-4, "deepseek_v3": 1e-4}
    assert max(seen.values()) < near.get(kind, TOLERANCE), seen


@pytest.mark.parametrize(
    ("sizes", "options"),
    [
        ({"pp": 2, "dp_shard": 2}, {"ac": "full"}),
        pytest.param({"pp": 2, "tp": 2}, {"ac": "selective:op"}, marks=pytest.mark.full),
        pytest.param({"pp": 2, "dp_replicate": 2}, {"dynamic_weights": True}, marks=pytest.mark.full),
        pytest.param({"pp": 2, "dp_shard": 2}, {"regather": True}, marks=pytest.mark.full),
        pytest.param({"pp": 2, "dp_shard": 2}, {"gradients": "rolling"}, marks=pytest.mark.full),
        pytest.param({"pp": 2}, {"split": "whole", "direct_gradients": True}, marks=pytest.mark.full),
    ],
    ids=str,
)
def test_meshes_and_options(sizes, options):
    job = (cases.train_in_slices, build("zb-h1", 2), sizes, "llama", {}, {}, options, 2)
    seen = largest(ranks(prod(sizes.values())).run(*job, timeout=280))
    assert max(seen.values()) < TOLERANCE, seen


COMPILED = [
    ("seq1f1b", "llama", {"slice_sizes": (3, 2, 2)}),
    *(
        pytest.param(name, kind, {"ac": ac, "slice_sizes": sizes}, marks=pytest.mark.full)
        for name, kind, ac, sizes in (
            ("seq1f1b", "qwen3", "full", None), ("zb-h1", "qwen3", "none", (3, 2, 2)),
            ("slimpipe", "llama", "none", None), ("zb-h1", "llama", "selective:2", None),
            ("zb-h1", "llama", "memory_budget:0.5", (3, 2, 2)), ("zb-h1", "gemma3_text", "full", None),
            ("zb-h1", "gpt_oss", "none", (3, 2, 2)), ("zb-h1", "deepseek_v3", "full", None),
            ("seq1f1b", "deepseek_v3", "none", (3, 2, 2)),
        )
    ),
]  # fmt: skip


@pytest.mark.parametrize(("name", "kind", "options"), COMPILED)
def test_compiled_steps_equal_one_process(name, kind, options):
    """Blocks are compiled around attention: before it, after it, and the rest, once per length of a slice."""
    job = (cases.train_compiled, build(name, 3), kind, options, 2)
    results = ranks(2).run(*job, timeout=280)
    seen = largest([found for found, _ in results])
    near = {"gemma3_text": 1e-5, "deepseek_v3": 1e-4}
    assert max(seen.values()) < near.get(kind, TOLERANCE), seen
    assert all(4 <= graphs <= 32 for _, graphs in results), results


@pytest.mark.parametrize("kind", ["llama", "gpt_oss", "deepseek_v3", "gemma2"])
def test_small_copies_are_exact(kind):
    config = tiny(kind)
    assert find_difference(config, find_family(build_on_meta(config, torch.float32))) is None


@pytest.mark.parametrize(
    ("kind", "changes", "reason"),
    [
        ("qwen3_next", {}, "Qwen3NextGatedDeltaNet mixes or counts tokens outside"),
        ("falcon", {}, "its attention is not called through transformers' attention interface"),
        ("mixtral", {"output_router_logits": True}, "load-balancing loss is of whole sequences"),
    ],
)
def test_models_that_cannot_run_in_slices_are_named(kind, changes, reason):
    config = tiny(kind)
    for name, value in changes.items():
        setattr(config, name, value)
    found = find_difference(config, find_family(build_on_meta(config, torch.float32)))
    assert found is not None
    assert re.search(reason, found)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"compile": True, "ac": "selective:op"}, "use 'full', 'selective:2' or 'none', or leave out compile"),
        ({"slice_sizes": (1, 2)}, "must be 4 numbers, one for each slice"),
    ],
)
def test_engine_refuses(options, message):
    assert message in ranks(1).run(cases.refusal_of, build("seq1f1b", 4, ranks=1), options)[0]


def test_losses_of_whole_rows_and_short_rows_are_refused():
    found = ranks(1).run(cases.refusals_of_steps, build("seq1f1b", 4, ranks=1))[0]
    assert "takes logits of whole rows, and the schedule has slices" in found["loss"]
    assert "too short for 4 slices" in found["short"]
    assert "run() takes no schedule with slices" in found["run"]


def test_activations_fall_as_simulated():
    """Of the first rank, which keeps two whole microbatches, or five slices and the keys of two microbatches."""
    whole, sliced = (ranks(2).run(cases.peak_activations, build("seq1f1b", n))[0] for n in (1, 4))
    keys = cases.KEY_BYTES
    costs = zp.Costs(activation=whole / 2 - keys, keys=keys, key_gradients=0.75 * keys)  # of all slices but the last
    simulated = zp.simulate(build("seq1f1b", 4), costs).peak_memory[0]
    assert sliced == pytest.approx(simulated, rel=0.05)
    assert sliced < 0.75 * whole
