"""Whole weights for other programs: exact, on the ranks that ask, one at a time."""

from __future__ import annotations

import pytest

pytest.importorskip("torch")

import checkpoint_cases as cases
import torch
from engine_helpers import ranks
from safetensors.torch import load_file
from stage_models import CONFIGS

import zeropipe as zp
from zeropipe.engine import hf_model
from zeropipe.engine.checkpoint.named_weights import _parse_ranks
from zeropipe.errors import ConfigError

BLOCKS, TIED, LLAMA = cases.Model(False), cases.Model(True), cases.Model(False, {"num_hidden_layers": 2})


@pytest.mark.parametrize(
    "name, sizes, model, tensors",
    [
        ("zbv", {"pp": 2, "dp_shard": 2}, TIED, 25),
        ("1f1b", {"pp": 2, "tp": 2}, LLAMA, 21),
        ("dualpipe", {"pp": 4}, TIED, 25),
        ("1f1b", {"dp_replicate": 2, "dp_shard": 2}, BLOCKS, 32),
    ],
    ids=["sharded, tied", "tensor parallel", "mirrored, tied", "replicated shards"],
)
def test_weights_are_the_plain_models(name, sizes, model, tensors):
    schedule = zp.build(name, ranks=sizes.get("pp", 1), microbatches=8)
    every = ranks(4).run(cases.weights_of, schedule, sizes, model, None)
    for number, difference, memory in every:
        assert number == tensors
        assert difference == 0.0
        assert 1.0 <= memory < 2.5, "one whole weight at a time, and what it is gathered from"


def test_only_those_who_ask_get_weights():
    schedule = zp.build("1f1b", ranks=2, microbatches=8)
    every = ranks(4).run(cases.weights_of, schedule, {"pp": 2, "dp_replicate": 2}, BLOCKS, [1])
    assert [number for number, _, _ in every] == [0, 32, 0, 0]


def test_a_rank_that_stops_early_does_not_leave_the_others_alone():
    schedule = zp.build("1f1b", ranks=4, microbatches=8)
    every = ranks(4).run(cases.weights_of, schedule, {"pp": 4}, BLOCKS, None, True)
    assert [number for number, _, _ in every] == [32, 1, 32, 32]


def test_ranks_that_are_not_there_are_refused():
    for first, second in ranks(4).run(cases.wrong_ranks, zp.build("1f1b", ranks=4, microbatches=4)):
        assert first == "rank 0: ranks=[7]: must be a list of ranks from 0 to 3, or None for all"
        assert second == "rank 1 has ranks=(1,), rank 0 has ranks=(0,): every rank must have the same value"
    with pytest.raises(ConfigError, match="ranks=0: must be a list of ranks from 0 to 3, or None for all"):
        _parse_ranks(0, 4)


def test_published_forms_and_merged_adapters(tmp_path):
    peft = pytest.importorskip("peft")
    config = CONFIGS["qwen3-moe"]()
    lora = peft.LoraConfig(r=2, target_modules=["q_proj", "v_proj"], init_lora_weights=False)
    schedule = zp.build("1f1b", ranks=2, microbatches=2)
    (published, merged), *others = ranks(2).run(cases.published_and_merged, schedule, config, lora)
    assert others == [({}, {})]
    hf_model(config).save_pretrained(tmp_path)
    wanted = load_file(tmp_path / "model.safetensors")
    assert published.keys() == wanted.keys()
    assert all(torch.equal(published[name], wanted[name]) for name in wanted)
    plain, adapted = hf_model(config).state_dict(), dict(hf_model(config, adapter=lora).named_parameters())
    assert merged.keys() == plain.keys()
    changed = 0
    for name, weight in plain.items():
        layer = name.removesuffix(".weight")
        if f"{layer}.lora_A.default.weight" in adapted:
            b, a = (adapted[f"{layer}.lora_{side}.default.weight"].detach() for side in "BA")
            weight = weight + (lora.lora_alpha / lora.r) * b @ a
            changed += 1
        torch.testing.assert_close(merged[name], weight)
    assert changed == 8
