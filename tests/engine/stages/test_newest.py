"""`make test-newest` says what changed."""

import re

import pytest

pytest.importorskip("torch")

from family_models import models_table
from newest import differences, version_lines
from paths import ROOT

Row = models_table.Row


def test_new_gone_and_changed_types_are_told():
    before = {"a": Row("a", "exact"), "b": Row("b", "exact", "yes"), "c": Row("c", "exact")}
    now = {"a": Row("a", "exact"), "b": Row("b", "refused", "no"), "d": Row("d", "exact")}
    assert list(differences(before, now)) == [
        "changed: b: cut 'exact' -> 'refused', tied 'yes' -> 'no'", "gone: c", "new: d: exact",
    ]  # fmt: skip


def test_versions_are_told():
    for line, name in zip(version_lines(), ("torch", "transformers"), strict=True):
        assert re.fullmatch(name + r" \S+, (as|\S+) in constraints\.txt", line)


def test_the_files_that_make_runs_are_there():
    named = re.findall(r"(?<= )tests(?:/\w+)+(?:\.\w+)?", (ROOT / "Makefile").read_text())
    assert "tests/engine" in named
    assert [name for name in named if not (ROOT / name).exists()] == []
