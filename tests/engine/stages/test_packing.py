"""Packed samples have the logits that each has alone, whatever rotary embeddings a model has."""

from __future__ import annotations

import copy

import pytest
import torch
from family_models import EXACT, TABLE, tiny
from weights_cases import all_stages

import zeropipe as zp
from zeropipe.engine import hf_model
from zeropipe.errors import ConfigError

LENGTHS = (5, 9, 3, 12)  # below and above the length where factors change
LIMIT = 6
CUT = zp.build("1f1b", ranks=2, microbatches=2)
KEPT = ("rope_theta", "partial_rotary_factor", "llama_4_scaling_beta")
KINDS = ("default", "linear", "dynamic", "yarn", "llama3", "longrope")
QUICK = [("llama", "dynamic"), ("gemma3_text", "longrope")]


def frequencies(config):
    """How many a model's rotary embeddings have; None without such embeddings."""
    model = hf_model(config)
    found = [buffer for name, buffer in model.named_buffers() if name.endswith("inv_freq")]
    return found[0].numel() if found else None


def rope(kind, number):
    tables = {
        "default": {},
        "linear": {"factor": 2.0},
        "dynamic": {"factor": 3.0},
        "yarn": {"factor": 4.0, "original_max_position_embeddings": LIMIT},
        "llama3": {
            "factor": 4.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": LIMIT,
        },
        "longrope": {
            "factor": 4.0, "original_max_position_embeddings": LIMIT, "short_mscale": 1.1, "long_mscale": 1.3,
            "short_factor": [1.0 + 0.1 * index for index in range(number)],
            "long_factor": [2.0 + 0.3 * index for index in range(number)],
        },
    }  # fmt: skip
    return {"rope_type": kind, **tables[kind]}


def with_rope(model_type, kind):
    """A small config with such rotary embeddings; skipped where the type has none."""
    config = tiny(model_type)
    tables, number = getattr(config, "rope_parameters", None), frequencies(config)
    if not tables or number is None:
        pytest.skip("it has no rotary embeddings")

    def changed(table):
        return {name: value for name, value in table.items() if name in KEPT} | rope(kind, number)

    nested = all(isinstance(table, dict) for table in tables.values())
    config.rope_parameters = {k: changed(table) for k, table in tables.items()} if nested else changed(tables)
    if kind == "dynamic":
        config.max_position_embeddings = LIMIT
    if kind == "longrope" and hasattr(config, "original_max_position_embeddings"):
        config.original_max_position_embeddings = LIMIT
    return config


def drawn(config):
    """A model without equal scores, as long as tokens differ: of equal ones another may be chosen in a longer row."""
    model, generator = hf_model(config, seed=1).eval(), torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn(parameter.shape, generator=generator), alpha=0.05)
    return model


def alone(model, ids):
    """Each sample in a model that has seen nothing else: some remember the longest sequence."""
    return torch.cat(
        [copy.deepcopy(model)(input_ids=part, use_cache=False).logits for part in ids.split(LENGTHS, 1)], 1
    )


def run(stages, batch):
    inputs = ()
    for stage in stages:
        output = stage.eval()(*inputs, **stage.pick(batch))
        inputs = output if isinstance(output, tuple) else (output,)
    return inputs[0]


def assert_apart(model_type, kind, is_runnable=True):
    config = with_rope(model_type, kind)
    ids = 5 + torch.randperm(55, generator=torch.Generator().manual_seed(0))[None, : sum(LENGTHS)]
    try:
        model = drawn(config)
        with torch.no_grad():
            wanted = alone(model, ids)
    except Exception as error:
        if is_runnable:
            raise
        pytest.skip(f"transformers has no such model: {error}")
    stages = all_stages(model, CUT)
    batch = {"input_ids": ids, "cu_seqlens": torch.tensor([0, *LENGTHS]).cumsum(0)}
    if not stages[0].family.can_pack:
        with pytest.raises(ConfigError, match="does not keep packed sequences apart"):
            stages[0].pick(batch)
        return
    rows = torch.cat([ids, ids.flip(1)])  # a second row with other borders
    backwards = torch.tensor([0, *LENGTHS[::-1]]).cumsum(0)
    both = {"input_ids": rows, "cu_seqlens": torch.cat([batch["cu_seqlens"], sum(LENGTHS) + backwards[1:]])}
    both["position_ids"] = torch.cat([torch.arange(n) for n in (*LENGTHS, *LENGTHS[::-1])]).view(rows.shape)
    with torch.no_grad():
        for microbatch in (batch, both, batch):
            found = run(stages, microbatch)[:1]
            assert (found - wanted).abs().max() <= 1e-4 * wanted.abs().max()


@pytest.mark.parametrize(("model_type", "kind"), QUICK)
def test_samples_do_not_change_each_others_rotation(model_type, kind):
    assert_apart(model_type, kind)


@pytest.mark.full
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("model_type", [one for one in EXACT if TABLE[one.values[0]].packed != "no"])
def test_every_type_with_every_kind_of_rotation(model_type, kind):
    assert_apart(model_type, kind, is_runnable=False)


def test_rows_that_a_model_reads_by_their_own_positions_are_limited():
    """llama4 scales queries, and cuts attention into chunks, by positions in the row: the same up to these lengths."""
    stages = all_stages(tiny("llama4_text", attention_chunk_size=16, floor_scale=20), CUT)
    assert stages[0].family.max_packed_row == 16
    batch = {"input_ids": torch.zeros(1, 16, dtype=torch.long), "cu_seqlens": torch.tensor([0, 10, 16])}
    assert stages[0].pick(batch)["is_packed"]
    batch = {"input_ids": torch.zeros(1, 17, dtype=torch.long), "cu_seqlens": torch.tensor([0, 10, 17])}
    with pytest.raises(
        ConfigError, match=r"cu_seqlens with rows of 17 tokens: must be at most 16, .*; use shorter rows"
    ):
        stages[0].pick(batch)
