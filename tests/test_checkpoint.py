"""A checkpoint of one layout goes on in any other, as if nothing had happened."""

from __future__ import annotations

import pytest

pytest.importorskip("torch")

import checkpoint_cases as cases
from engine_helpers import TOLERANCE, ranks

import zeropipe as zp

UNTIED = {"tie_word_embeddings": False, "num_key_value_heads": 4, "num_hidden_layers": 8}
TIED = {"tie_word_embeddings": True, "num_hidden_layers": 8}


def chain(tmp_path, model, layouts, asynchronous=False) -> list[float]:
    """Every layout loads what the one before it saved, built with another seed; differences from one process."""
    (tmp_path / "oracle").mkdir()
    cases.oracle(model, len(layouts), tmp_path / "oracle")
    seen = []
    for step, (name, sizes) in enumerate(layouts):
        schedule = zp.build(name, ranks=sizes.get("pp", 1), microbatches=8)
        args = (schedule, sizes, model, str(tmp_path / "checkpoint"), step, str(tmp_path / "oracle"), asynchronous)
        seen.append(max(ranks(4).run(cases.link, *args)))
    return seen


def test_from_layout_to_layout(tmp_path):
    layouts = [
        ("zbv", {"pp": 4}), ("1f1b", {"pp": 2, "dp_shard": 2}), ("dualpipe", {"pp": 4}), ("1f1b", {"pp": 2, "tp": 2}),
        ("zbv", {"pp": 2, "dp_replicate": 2}),
    ]  # fmt: skip
    seen = chain(tmp_path, UNTIED, layouts)
    assert max(seen) < TOLERANCE, seen
