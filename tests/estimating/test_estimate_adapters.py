"""Estimates of LoRA beside peft: which weights are trained, and the bytes of weights, gradients and optimizer."""

from __future__ import annotations

import json

import pytest

import zeropipe as zp
from zeropipe.core.model.configs import BUILT_IN, CONFIGS_BY_SHAPE
from zeropipe.errors import ConfigError
from zeropipe.estimating.estimate import can_estimate_adapters
from zeropipe.estimating.families import FAMILIES
from zeropipe.estimating.model import open_model
from zeropipe.sim.layer_file import from_layer_data, to_layer_json
from zeropipe.train.loop.metrics import count_flops

FEW = {
    "num_hidden_layers": 4, "hidden_size": 64, "intermediate_size": 96, "num_attention_heads": 4, "head_dim": 16,
    "vocab_size": 128, "pad_token_id": 0,
    "num_experts_per_tok": 2,
}  # fmt: skip
KINDS = [kind for kind in FAMILIES if can_estimate_adapters(open_model({"model_type": kind, **FEW}))]
LORA = {"target_modules": "all-linear", "task_type": "CAUSAL_LM"}


def whole(costs):
    """The layers of the whole model."""
    kinds = costs.settings[0].kinds
    return [kinds[kind] for kind in (*costs.before, *costs.layers, *costs.after)]


def test_which_types_have_estimates():
    assert {"llama", "qwen2", "qwen3", "mistral", "gemma", "gemma3_text"} <= set(KINDS)
    assert not {"phi3", "glm4", "qwen3_moe", "deepseek_v3", "qwen2_vl_text"} & set(KINDS)


@pytest.mark.parametrize("kind", KINDS)
def test_adapters_are_those_of_peft(kind):
    torch, peft = pytest.importorskip("torch"), pytest.importorskip("peft")
    transformers = pytest.importorskip("transformers")
    config = {"model_type": kind, **FEW}
    with torch.device("meta"):
        model = transformers.AutoModelForCausalLM.from_config(transformers.AutoConfig.for_model(**config))
        model = peft.get_peft_model(model, peft.LoraConfig(r=3, **LORA))
    trained = sum(parameter.numel() for parameter in model.parameters() if parameter.requires_grad)
    costs = zp.estimate(config, lora=3, sequence=8)
    assert sum(layer.num_trained for layer in whole(costs)) == trained
    assert costs.num_parameters == sum(parameter.numel() for parameter in model.parameters())


@pytest.mark.parametrize("dtype", [pytest.param("float32", marks=pytest.mark.full), "bfloat16"])
def test_bytes_are_those_of_the_engines_stages_and_of_adamw(dtype):
    """Two stages as the engine builds them; one step of torch's AdamW."""
    torch, peft = pytest.importorskip("torch"), pytest.importorskip("peft")
    transformers = pytest.importorskip("transformers")
    from zeropipe.engine import hf_stages

    costs = zp.estimate("tiny-qwen3", lora=4, sequence=64, dtype=dtype)
    schedule = zp.build("1f1b", ranks=2, microbatches=4)
    stages = costs.stage_layers([4, 4])
    config = transformers.AutoConfig.for_model(**BUILT_IN["tiny-qwen3"])
    for rank, layers in enumerate(stages):
        built = hf_stages(
            config, schedule, rank, dtype=getattr(torch, dtype), adapter=peft.LoraConfig(r=4, **LORA), layers=[4, 4]
        )[rank]
        trained = [parameter for parameter in built.parameters() if parameter.requires_grad]
        for parameter in trained:
            parameter.grad = torch.zeros_like(parameter)
        optimizer = torch.optim.AdamW(trained)
        optimizer.step()
        moments = [value for state in optimizer.state.values() for value in state.values() if value.ndim]
        real = [
            sum(one.nbytes for one in tensors) for tensors in (built.parameters(), [p.grad for p in trained], moments)
        ]
        number = sum(layer.num_trained for layer in layers)
        frozen = sum(layer.parameters for layer in layers) - number
        state = costs.state
        assert real == [
            number * state.weights + frozen * state.frozen, number * state.gradients, number * state.optimizer
        ]  # fmt: skip


def test_a_frozen_model_has_no_weight_gradients():
    full, adapted = (zp.estimate("qwen3-8b", lora=lora) for lora in (None, 16))
    ends = [adapted.settings[0].kinds[kind] for kind in ("embedding", "head")]
    assert [(end.w, end.stash, end.num_trained) for end in ends] == [(0, 0, 0)] * 2
    assert ends[0].i == 0
    assert whole(adapted)[1].w < 0.5 * whole(full)[1].w, "only those of the adapters"
    done = sum(3 * layer.flops - layer.frozen_flops for layer in whole(adapted))
    assert done == pytest.approx(count_flops(open_model("qwen3-8b"), 4096, is_frozen=True)), "as a run counts its MFU"


def test_a_larger_rank_takes_more():
    one, two = (zp.estimate("qwen3-8b", lora=rank).settings[0].kinds["dense"] for rank in (8, 4096))
    assert two.num_trained == 512 * one.num_trained
    assert two.f > one.f
    assert two.w > one.w
    assert two.activation > one.activation
    assert two.stash > one.stash


def test_costs_of_adapters_make_a_round_trip():
    costs = zp.estimate("qwen3-0.6b", lora=8, ac=["none", "full"])
    assert from_layer_data(json.loads(to_layer_json(costs))) == costs
    plain = json.loads(to_layer_json(zp.estimate("qwen3-0.6b")))
    assert "lora_rank" not in plain, "files without adapters are those of before"


@pytest.mark.parametrize(
    "model,more,message",
    [
        ("qwen3-8b", {"lora": 0}, r"lora=0: must be a positive integer"),
        ("qwen3-8b", {"tp": 2}, r"tp=2: costs of adapters \(lora\) are not known with tp; leave out one of them"),
        ("qwen3-30b-a3b", {}, r"lora=8: adapters of qwen3-30b-a3b cannot be estimated: must be a dense text model"),
        ({**CONFIGS_BY_SHAPE["llama-3-8b"], "model_type": "phi3"}, {}, "cannot be estimated"),
    ],
)
def test_what_cannot_be_estimated_is_refused(model, more, message):
    with pytest.raises(ConfigError, match=message):
        zp.estimate(model, **{"lora": 8, **more})
