"""Checkpoints are read and written as their families are published; the oracle is transformers' own loading and saving.

These tests also notice when a private name of transformers has changed.
"""

from __future__ import annotations

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, Mxfp4Config
from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from weights_cases import seeded

from zeropipe.engine.stages.quantized import find_format
from zeropipe.engine.stages.reader import SafetensorsReader
from zeropipe.engine.transformers_private import (
    classifier_name,
    conversions,
    kept_in_float32,
    tied_names,
    to_published,
    unexpected_names,
)

_SIZES = {
    "vocab_size": 61, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "pad_token_id": None, "bos_token_id": None, "eos_token_id": None, "head_dim": 8,
}  # fmt: skip
_EXPERTS = {"num_local_experts": 4, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24}
_DEEPSEEK = {
    "num_key_value_heads": 4, "n_routed_experts": 4, "n_shared_experts": 1, "num_experts_per_tok": 2, "n_group": 2,
    "topk_group": 1, "kv_lora_rank": 8, "q_lora_rank": 8, "qk_rope_head_dim": 8, "v_head_dim": 8, "qk_nope_head_dim": 8,
    "first_k_dense_replace": 1, "moe_intermediate_size": 24, "head_dim": 8,
}  # fmt: skip
_MODELS = {
    "mixtral": _EXPERTS,
    "qwen2_moe": _EXPERTS | {"shared_expert_intermediate_size": 24},
    "qwen3_moe": _EXPERTS,
    "olmoe": _EXPERTS,
    "phimoe": _EXPERTS,
    "gpt_oss": _EXPERTS,
    "granitemoe": _EXPERTS,
    "glm4_moe": _DEEPSEEK,
    "deepseek_v3": _DEEPSEEK,
    "dots1": _DEEPSEEK,
    "minimax": _EXPERTS,
    "ernie4_5_moe": _EXPERTS | {"moe_num_experts": 4, "moe_k": 2},
    "jamba": _EXPERTS | {"mamba_dt_rank": 4, "use_mamba_kernels": False},
    "qwen3_next": _EXPERTS | {"linear_num_key_heads": 2, "linear_num_value_heads": 2},
    "gpt_neox": {},
    "llama": {},
}


@pytest.fixture(params=_MODELS)
def saved(request, tmp_path):
    """A small model of a family with random weights, saved by transformers in the family's to_published form."""
    config = CONFIG_MAPPING[request.param](**_SIZES | _MODELS[request.param])
    model = seeded(AutoModelForCausalLM.from_config(config))
    model.save_pretrained(tmp_path)
    with torch.device("meta"):
        empty = AutoModelForCausalLM.from_config(config)
    return model, empty, tmp_path


def test_every_tensor_is_made_of_the_stored_ones(saved):
    model, empty, directory = saved
    stored = SafetensorsReader(directory)
    found, unused = conversions(empty, stored.names)
    assert not unused
    made = {}
    for conversion in found:
        values = conversion.run(empty, stored.read)
        assert values.keys() == set(conversion.targets)
        made |= values
    want = model.state_dict()
    assert made.keys() == want.keys() - tied_names(empty).keys()
    assert all(torch.equal(made[name], want[name]) for name in made)


def test_every_stored_tensor_is_made_of_the_models(saved):
    model, empty, directory = saved
    want = load_file(directory / "model.safetensors")
    state = {name: tensor for name, tensor in model.state_dict().items() if name not in tied_names(empty)}
    made = to_published(empty, state)
    assert made.keys() == want.keys()
    assert all(torch.equal(made[name], want[name]) for name in made)


def test_names_that_differ_are_known():
    with torch.device("meta"):
        neox = AutoModelForCausalLM.from_config(CONFIG_MAPPING["gpt_neox"](**_SIZES))
        deepseek = AutoModelForCausalLM.from_config(CONFIG_MAPPING["deepseek_v3"](**_SIZES | _DEEPSEEK))
        tied = AutoModelForCausalLM.from_config(CONFIG_MAPPING["llama"](**_SIZES, tie_word_embeddings=True))
    ((head,), strangers) = conversions(neox, ["embed_out.weight", "nothing.weight"])
    assert head.targets == ("lm_head.weight",)
    assert strangers == {"nothing.weight"}
    bias = "model.layers.1.mlp.gate.e_score_correction_bias"
    assert kept_in_float32(deepseek, torch.bfloat16, deepseek.state_dict()) == {bias}
    assert kept_in_float32(deepseek, torch.float64, deepseek.state_dict()) == set()
    assert unexpected_names(deepseek, ["model.layers.61.mlp.gate.weight", "strange"]) == {"strange"}
    assert tied_names(tied) == {"lm_head.weight": "model.embed_tokens.weight"}
    assert classifier_name(tied.config) == "LlamaForSequenceClassification"


def test_experts_in_float4_are_read_as_transformers_reads_them(tmp_path):
    """gpt-oss is to_published in mxfp4 only."""
    config = CONFIG_MAPPING["gpt_oss"](**_SIZES | _EXPERTS | {"hidden_size": 64, "intermediate_size": 32})
    model = seeded(AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16))
    tensors = {}
    generator = torch.Generator().manual_seed(0)
    for name, tensor in model.state_dict().items():
        if name.endswith(("experts.gate_up_proj", "experts.down_proj")):
            experts, columns, rows = tensor.shape
            shape = (experts, rows, columns // 32)
            tensors[f"{name}_blocks"] = torch.randint(256, (*shape, 16), generator=generator, dtype=torch.uint8)
            tensors[f"{name}_scales"] = torch.randint(110, 130, shape, generator=generator, dtype=torch.uint8)
        else:
            tensors[name] = tensor
    quantization = {"quant_method": "mxfp4", "modules_to_not_convert": ["model.layers.*.self_attn"]}
    config.quantization_config = quantization
    config.save_pretrained(tmp_path)
    save_file(tensors, tmp_path / "model.safetensors", {"format": "pt"})
    theirs = AutoModelForCausalLM.from_pretrained(
        tmp_path, dtype=torch.bfloat16, quantization_config=Mxfp4Config(dequantize=True)
    ).state_dict()
    stored = SafetensorsReader(tmp_path, find_format(quantization, tmp_path))
    assert set(stored.names) == theirs.keys()
    for name, tensor in theirs.items():
        assert torch.equal(stored.read(name).bfloat16(), tensor), name
