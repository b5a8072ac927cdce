"""Hugging Face models on every schedule, beside the same model in one piece, in float64."""

from __future__ import annotations

import pytest

pytest.importorskip("torch")
pytest.importorskip("transformers")

import engine_hf_cases as cases
from engine_helpers import TOLERANCE, largest, ranks

import zeropipe as zp
from zeropipe.schedules.registry import entries

NAMES = [entry.name for entry in entries()]


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("family, options", [("llama", {}), ("qwen3", {"tie_word_embeddings": True})])
def test_every_schedule_trains_like_the_whole_model(name, family, options):
    """Loss, gradients, norm and weights over two steps; a Llama, and a Qwen3 with tied embeddings."""
    schedule = zp.build(name, ranks=4, microbatches=8)
    differences = largest(ranks().run(cases.train_hf, schedule, family, 2, options))
    assert max(differences.values()) < TOLERANCE, differences


@pytest.mark.parametrize("name", ["1f1b", "zbv", "dualpipev", "dualpipe"])
@pytest.mark.parametrize("family", ["qwen3", "qwen3-mixed", "qwen3-moe", "gemma3"])
def test_other_families(name, family):
    schedule = zp.build(name, ranks=4, microbatches=8)
    differences = largest(ranks().run(cases.train_hf, schedule, family, 1, {}))
    assert max(differences.values()) < TOLERANCE, differences


@pytest.mark.parametrize("name", ["1f1b", "zbv", "dualpipe"])
def test_packed_sequences(name):
    assert max(ranks().run(cases.packed, zp.build(name, ranks=4, microbatches=8))) < TOLERANCE
