"""Hugging Face models on every schedule, beside the same model in one piece, in float64."""

from __future__ import annotations

import pytest

pytest.importorskip("torch")
pytest.importorskip("transformers")

import engine_hf_cases as cases
from engine_helpers import TOLERANCE, largest, ranks
from family_models import tiny

import zeropipe as zp
from zeropipe.schedules.registry import entries

# Every schedule runs stages of plain modules in test_engine.py: here one of each shape, and all in `make test-full`.
# Tied ends are on one rank (zbv, dualpipev), on two, or there are two copies of them.
SHAPES = {
    "llama": ("1f1b", "zb-h1", "dualpipev", "chimera"),
    "qwen3": ("interleaved", "zbv", "dualpipe"),
}
OPTIONS: dict[str, dict[str, bool]] = {"llama": {}, "qwen3": {"tie_word_embeddings": True}}


def sometimes(*values, rare):
    return pytest.param(*values, marks=pytest.mark.full if rare else ())


@pytest.mark.parametrize(
    "family, name",
    [sometimes(family, entry.name, rare=entry.name not in SHAPES[family]) for family in SHAPES for entry in entries()],
)
def test_every_schedule_trains_like_the_whole_model(family, name):
    """Loss, gradients, norm and weights; a Llama, and two steps of a Qwen3 with tied embeddings."""
    schedule = zp.build(name, ranks=4, microbatches=8 if "dual" in name else 5)
    differences = largest(ranks().run(cases.train_hf, schedule, family, 2 if OPTIONS[family] else 1, OPTIONS[family]))
    assert max(differences.values()) < TOLERANCE, differences


@pytest.mark.parametrize(
    "family, name",
    [
        sometimes(family, name, rare=name == "dualpipe" and family != "gemma3")
        for family in ("qwen3-mixed", "qwen3-moe", "gemma3")
        for name in ("zbv", "dualpipe")
    ],
)
def test_other_families(family, name):
    schedule = zp.build(name, ranks=2, microbatches=4)
    differences = largest(ranks(2).run(cases.train_hf, schedule, family, 1, {}))
    assert max(differences.values()) < TOLERANCE, differences


@pytest.mark.parametrize("name", ["zbv", pytest.param("1f1b", marks=pytest.mark.full)])
@pytest.mark.parametrize(
    "model_type, options",
    [("gpt2", {}), ("falcon", {}), ("zaya", {}), ("phi3", {"tie_word_embeddings": True})],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_other_shapes(name, model_type, options):
    """Positions that are added once, tuples from layers, two tensors between stages, an embedding tied to its head."""
    schedule = zp.build(name, ranks=2, microbatches=4)
    differences = largest(ranks(2).run(cases.train_config, schedule, tiny(model_type, **options), 1))
    assert max(differences.values()) < TOLERANCE, differences


@pytest.mark.parametrize("name", ["zbv", "dualpipe", pytest.param("1f1b", marks=pytest.mark.full)])
def test_losses_of_routers(name):
    """Summed in float32, as transformers has it."""
    schedule = zp.build(name, ranks=2, microbatches=4)
    options = {"output_router_logits": True, "router_aux_loss_coef": 0.1}
    differences = largest(ranks(2).run(cases.train_config, schedule, tiny("mixtral", **options), 1))
    assert max(differences.values()) < 1e-5, differences


@pytest.mark.parametrize("name", ["zbv", "dualpipe", pytest.param("1f1b", marks=pytest.mark.full)])
def test_packed_sequences(name):
    assert max(ranks(2).run(cases.packed, zp.build(name, ranks=2, microbatches=4))) < TOLERANCE
