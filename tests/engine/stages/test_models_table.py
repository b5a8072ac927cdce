"""Every decoder type of transformers is exact or refused in one line, and docs/models.md says which."""

from __future__ import annotations

import re

import pytest
from family_models import IS_OF_TABLE, PROMISED, TABLE, VERSION, models_table
from full_marker import mark_rest_full

TYPES = sorted(models_table.CAUSAL_TYPES)


@pytest.mark.parametrize("model_type", mark_rest_full(TYPES, TYPES[::6]))
def test_every_type_is_exact_or_refused_in_one_line(model_type):
    """Proven again; anything but one line raises here. Another transformers may have what the table does not."""
    row = models_table.row(model_type, divides=False)
    assert not IS_OF_TABLE or row == TABLE[model_type]._replace(divided=""), "run `make models`"


WITH_EXPERTS = [name for name, row in TABLE.items() if row.divided]
SAMPLE = ("qwen3_moe", "gpt_oss", "ernie4_5_moe", "llama4_text")


@pytest.mark.parametrize("model_type", mark_rest_full(WITH_EXPERTS, lambda it: it in SAMPLE))
def test_experts_of_every_type_are_divided_exactly_or_refused(model_type):
    assert models_table.row(model_type).divided == TABLE[model_type].divided or not IS_OF_TABLE, "run `make models`"


@pytest.mark.skipif(not IS_OF_TABLE, reason=f"the table is about transformers {VERSION}")
def test_how_many_are_exact(record_property):
    exact = {model_type for model_type, row in TABLE.items() if row.cut == "exact"}
    record_property("says", f"{len(exact)} of {len(TABLE)} decoder types of transformers are exact, the others refused")
    assert TABLE.keys() == set(models_table.CAUSAL_TYPES)
    assert exact >= set(PROMISED)
    assert len(exact) >= 140
    readme = (models_table.FILE.parent.parent / "README.md").read_text()
    assert set(re.findall(r"\[(\d+) types\]", readme)) == {str(len(exact))}
