"""LoRA across a pipeline: the oracle is peft on the plain model."""

from __future__ import annotations

import copy
import json
import os
import sys

import peft
import pytest
import torch
from engine_helpers import ranks
from peft import LoraConfig, PeftModel
from safetensors.torch import load_file
from stage_models import CONFIGS, microbatches
from torch import nn
from transformers import AutoModelForCausalLM
from weights_cases import all_stages, lora_model, plain_tokens, run, seeded, train_adapter

import zeropipe as zp
from zeropipe.engine import hf_model, hf_stages, save_stages
from zeropipe.errors import ConfigError, MissingExtra

TWO = zp.build("1f1b", ranks=2, microbatches=2)
BATCHES = microbatches(lengths=(9, 12, 7, 10))
TOKENS = BATCHES[0]["input_ids"]
QV = LoraConfig(r=3, lora_alpha=7, target_modules=["q_proj", "v_proj"])


def save_all(stages: list[nn.Module], directory, **options) -> None:
    for rank in range(2):
        save_stages({rank: stages[rank]}, TWO.placement, rank, directory, **options)


def names_of(stages: list[nn.Module]) -> dict[str, tuple]:
    return {
        f"base_model.model.{s.full_name(name)}": (tuple(p.shape), p.dtype, p.requires_grad)
        for s in stages
        for name, p in s.named_parameters()
    }


RULES = {
    "all-linear": LoraConfig(target_modules="all-linear"),
    "regex": LoraConfig(target_modules=r".*layers\.[13]\.mlp\.(up|down)_proj"),
    "some layers": LoraConfig(target_modules=["q_proj"], layers_to_transform=[0, 3]),
    "ranks": LoraConfig(target_modules=["q_proj", "k_proj"], rank_pattern={r"layers\.2.*q_proj": 5}, use_rslora=True),
    "others too": LoraConfig(
        target_modules=["k_proj"], exclude_modules=r".*layers\.1.*", modules_to_save=["lm_head", "norm"]
    ),
    "embedding": LoraConfig(target_modules=["embed_tokens", "lm_head"]),
    "last only": LoraConfig(target_modules=["q_proj"], layers_to_transform=[3]),
}  # fmt: skip


@pytest.mark.parametrize("rule", RULES)
def test_rules_mean_the_same_as_in_the_whole_model(rule):
    base = hf_model(CONFIGS["qwen3"](), dtype=torch.float64 if rule == "regex" else torch.bfloat16)
    plain = peft.get_peft_model(copy.deepcopy(base), copy.deepcopy(RULES[rule]))
    stages = all_stages(base, TWO, adapter=RULES[rule])
    assert names_of(stages) == {
        name: (tuple(p.shape), p.dtype, p.requires_grad) for name, p in plain.named_parameters()
    }
    torch.testing.assert_close(run(stages, BATCHES[0]), base(TOKENS).logits)  # a new adapter adds nothing


def test_experts_have_adapters_too():
    lora = LoraConfig(
        target_parameters=["mlp.experts.gate_up_proj", "mlp.experts.down_proj"], target_modules=["q_proj"]
    )
    plain = lora_model(hf_model(CONFIGS["qwen3-moe"]()), lora)
    stages = all_stages(plain, TWO)
    assert names_of(stages).keys() == {name for name, _ in plain.named_parameters()}
    torch.testing.assert_close(run(stages, BATCHES[0]), plain(TOKENS).logits)


@pytest.mark.parametrize("rule", ["others too", "last only"])
def test_a_pipeline_trains_an_adapter_as_peft_does(tmp_path, rule):
    config, lora = CONFIGS["qwen3"](), RULES[rule]
    schedule = zp.build("zb-h1", ranks=4, microbatches=4)
    assert max(ranks().run(train_adapter, schedule, config, lora, BATCHES, str(tmp_path))) < 1e-10
    plain = lora_model(hf_model(config, dtype=torch.float64), lora)
    plain_tokens(plain, BATCHES)
    torch.optim.SGD([p for p in plain.parameters() if p.requires_grad], lr=0.5).step()
    back = PeftModel.from_pretrained(hf_model(config, dtype=torch.float64), tmp_path, autocast_adapter_dtype=False)
    torch.testing.assert_close(back.double()(TOKENS).logits, plain(TOKENS).logits)


def test_random_adapters_do_not_depend_on_the_cut():
    base = hf_model(CONFIGS["llama"]())

    def values(schedule, **options):
        return {
            s.full_name(n): p
            for s in all_stages(base, schedule, adapter=QV, **options)
            for n, p in s.named_parameters()
        }

    two, four = values(TWO, seed=3), values(zp.build("1f1b", ranks=4, microbatches=4), seed=3)
    assert two.keys() == four.keys()
    assert all(torch.equal(two[name], four[name]) for name in two)
    other = values(TWO, seed=4)
    name = "model.layers.2.self_attn.q_proj.lora_A.default.weight"
    assert not torch.equal(two[name], other[name])
    assert not torch.equal(two[name], two[name.replace("2", "1")])


@pytest.fixture
def trained(tmp_path):
    """A base directory and stages with an adapter that is not zero."""
    base = seeded(hf_model(CONFIGS["qwen3"]()))
    base.save_pretrained(tmp_path / "base")
    stages = all_stages(tmp_path / "base", TWO, adapter=QV)
    with torch.no_grad():
        for stage in stages:
            for parameter in stage.parameters():
                if parameter.requires_grad:
                    parameter.add_(torch.randn_like(parameter) * 0.1)
    return stages, tmp_path


def test_saved_adapters_load_with_plain_peft_and_in_stages(trained):
    stages, where = trained
    want = run(stages, BATCHES[0])
    save_all(stages, where / "adapter")
    assert {path.name for path in (where / "adapter").iterdir()} == {"adapter_config.json", "adapter_model.safetensors"}
    theirs = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(where / "base"), where / "adapter")
    torch.testing.assert_close(theirs(TOKENS).logits, want)
    auto = AutoModelForCausalLM.from_pretrained(where / "adapter")  # finds the base by itself
    torch.testing.assert_close(auto(TOKENS).logits, want)
    for source, options in ((where / "base", {"adapter": where / "adapter"}), (where / "adapter", {})):
        again = all_stages(source, TWO, **options)
        torch.testing.assert_close(run(again, BATCHES[0]), want)
        assert names_of(again) == names_of(stages)


def test_merged_adapters_load_as_a_plain_model(trained):
    stages, where = trained
    want, before = run(stages, BATCHES[0]), copy.deepcopy(stages[0].state_dict())
    save_all(stages, where / "merged", merge=True)
    model = AutoModelForCausalLM.from_pretrained(where / "merged")
    torch.testing.assert_close(model(TOKENS).logits, want)
    assert all(torch.equal(before[name], tensor) for name, tensor in stages[0].state_dict().items())
    save_all(stages, where / "base", merge=True)
    torch.testing.assert_close(AutoModelForCausalLM.from_pretrained(where / "base")(TOKENS).logits, want)


def test_an_adapter_is_replaced_in_one_step_by_one_of_its_kind(trained, monkeypatch):
    stages, where = trained
    save_all(stages, where / "adapter")
    first = run(stages, BATCHES[0])
    for stage in stages:
        for parameter in stage.parameters():
            parameter.data.mul_(2 if parameter.requires_grad else 1)
    second = run(stages, BATCHES[0])
    seen, original, left = [], os.replace, [0]

    def replace(*args, **kwargs):
        left[0] -= 1
        if left[0] < 0:
            raise KeyboardInterrupt
        return original(*args, **kwargs)

    monkeypatch.setattr(os, "replace", replace)
    for steps in range(100):
        left[0] = steps
        try:
            save_all(stages, where / "adapter")
        except KeyboardInterrupt:
            left[0] = 100
            now = run(all_stages(where / "adapter", TWO), BATCHES[0])
            seen.append([torch.allclose(now, want) for want in (first, second)])
        else:
            break
    assert seen[0] == [True, False]
    assert seen[-1] == [False, True]
    assert all(sum(one) == 1 for one in seen)
    assert not list((where / "adapter").glob(".*"))
    other = all_stages(where / "base", TWO, adapter=LoraConfig(r=2, lora_alpha=7, target_modules=["q_proj", "v_proj"]))
    with pytest.raises(ConfigError, match=r"has another adapter \(r is 3, here 2\)"):
        save_all(other, where / "adapter")
    with pytest.raises(ConfigError, match="has an adapter"):
        save_all(stages, where / "adapter", merge=True)


def test_adapters_that_users_put_into_stages_are_saved(trained):
    _, where = trained
    stages = all_stages(where / "base", TWO)
    for stage in stages:
        torch.manual_seed(stage.stage)
        peft.inject_adapter_in_model(LoraConfig(target_modules=["up_proj"], init_lora_weights=False), stage)
    save_all(stages, where / "adapter")
    theirs = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(where / "base"), where / "adapter")
    torch.testing.assert_close(theirs(TOKENS).logits, run(stages, BATCHES[0]))


def test_adapters_that_start_from_the_weights_are_kept():
    lora = LoraConfig(target_modules=["q_proj"], use_dora=True, init_lora_weights="olora")
    plain = lora_model(hf_model(CONFIGS["llama"]()), lora)
    torch.testing.assert_close(run(all_stages(plain, TWO), BATCHES[0]), plain(TOKENS).logits)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_adapters_on_a_gpu(trained):
    stages, where = trained
    save_all(stages, where / "adapter")
    for adapter in (where / "adapter", QV):
        on_gpu = all_stages(where / "base", TWO, adapter=adapter, device="cuda")
        assert {p.device.type for stage in on_gpu for p in stage.parameters()} == {"cuda"}
        save_all(on_gpu, where / "again")
        save_all(on_gpu, where / f"merged {adapter is QV}", merge=True)


def test_an_unloaded_adapter_is_none():
    plain = lora_model(hf_model(CONFIGS["llama"]()), QV)
    want = plain(TOKENS).logits
    stages = all_stages(plain.merge_and_unload(), TWO)
    torch.testing.assert_close(run(stages, BATCHES[0]), want)
    assert not any("lora" in name for stage in stages for name, _ in stage.named_parameters())


def two_adapters(model):
    model = lora_model(model, QV)
    model.add_adapter("second", QV)
    return model


def merged(model):
    model = lora_model(model, QV)
    model.merge_adapter()
    return model


def switched_off(model):
    model = lora_model(model, QV)
    model.base_model.disable_adapter_layers()
    return model


def prompts(model):
    return peft.get_peft_model(model, peft.PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=3))


def scales(model):
    return peft.get_peft_model(model, peft.IA3Config(target_modules=["k_proj"], feedforward_modules=[]))


@pytest.mark.parametrize(
    "change,match",
    [(two_adapters, "2 adapters"), (merged, "is merged"), (switched_off, "is disabled"), (prompts, "PROMPT_TUNING"),
     (scales, "ia3_l")],
)  # fmt: skip
def test_adapters_that_cannot_be_kept_are_refused(change, match):
    model = change(hf_model(CONFIGS["llama"]()))
    for rank in range(2):
        with pytest.raises(ConfigError, match=match) as raised:
            hf_stages(model, TWO, rank)
        assert "\n" not in str(raised.value)


@pytest.mark.parametrize(
    "config,adapter,match",
    [
        ({}, "no/such", "is not an adapter directory"),
        ({}, 3, "must be a peft.LoraConfig"),
        ({}, LoraConfig(target_modules=["nothing"]), "peft cannot add this adapter"),
        ({}, LoraConfig(target_modules=["q_proj"], use_dora=True), "use_dora=True depends on the weights"),
        ({}, LoraConfig(target_modules=["q_proj"], init_lora_weights="pissa"), "'pissa'"),
        ({}, peft.IA3Config(target_modules=["k_proj"], feedforward_modules=[]), "peft_type=IA3"),
        ({}, LoraConfig(target_modules=["q_proj"], modules_to_save=["layers.1"]), "transformer layer|cannot add"),
        ({}, LoraConfig(target_modules=["q_proj"], alora_invocation_tokens=[1]), "alora_invocation_tokens is not"),
        ({"tie_word_embeddings": True}, LoraConfig(target_modules=["lm_head"]), "they are tied"),
        ({"tie_word_embeddings": True}, LoraConfig(target_modules=["embed_tokens"]), "they are tied"),
    ],
)  # fmt: skip
def test_wrong_adapters_are_refused(config, adapter, match):
    with pytest.raises(ConfigError, match=match) as raised:
        all_stages(CONFIGS["llama"](**config), TWO, adapter=adapter)
    assert "\n" not in str(raised.value)


@pytest.mark.parametrize("targets", [["embed_tokens", "q_proj"], ["lm_head"]])
def test_a_directory_of_pefts_has_the_weights_of_embeddings_too(tmp_path, targets):
    base = hf_model(CONFIGS["qwen3"]())
    base.save_pretrained(tmp_path / "base")
    theirs = peft.get_peft_model(base, LoraConfig(target_modules=targets, init_lora_weights=False))
    theirs.save_pretrained(tmp_path / "adapter")
    assert any(".base_layer." in name for name in load_file(tmp_path / "adapter" / "adapter_model.safetensors"))
    stages = all_stages(tmp_path / "base", TWO, adapter=tmp_path / "adapter")
    torch.testing.assert_close(run(stages, BATCHES[0]), theirs.eval()(TOKENS).logits)
    hf_model(CONFIGS["qwen3"](), seed=1).save_pretrained(tmp_path / "other")
    with pytest.raises(ConfigError, match=r"has other weights of .* than the model: pass the model of PeftModel"):
        all_stages(tmp_path / "other", TWO, adapter=tmp_path / "adapter")


def test_a_saved_adapter_that_changes_biases_is_refused(tmp_path):
    LoraConfig(target_modules=["q_proj"], bias="lora_only").save_pretrained(tmp_path)
    with pytest.raises(ConfigError, match=r"bias='lora_only' also changes biases of the model; load it with PeftModel"):
        all_stages(CONFIGS["llama"](), TWO, adapter=tmp_path)


def test_what_the_adapter_does_not_hold_is_not_lost(trained):
    stages, where = trained
    stages[1].lm.model.norm.weight.requires_grad_(True)
    save_stages({0: stages[0]}, TWO.placement, 0, where / "adapter")
    with pytest.raises(ConfigError, match=r"model\.norm\.weight is trained but would not be saved"):
        save_stages({1: stages[1]}, TWO.placement, 1, where / "adapter")
    assert list((where / "adapter").iterdir()) == []


def test_adapters_of_some_stages_only_are_refused(trained):
    stages, where = trained
    plain = all_stages(where / "base", TWO)
    save_stages({0: stages[0]}, TWO.placement, 0, where / "adapter")
    with pytest.raises(ConfigError):
        save_stages({1: plain[1]}, TWO.placement, 1, where / "adapter")


def test_a_broken_adapter_directory_is_refused(trained):
    stages, where = trained
    save_all(stages, where / "adapter")
    config = json.loads((where / "adapter" / "adapter_config.json").read_text())
    config["target_modules"] = ["q_proj"]
    (where / "adapter" / "adapter_config.json").write_text(json.dumps(config))
    with pytest.raises(ConfigError, match="which its config does not have"):
        hf_stages(where / "base", TWO, 0, adapter=where / "adapter")
    (where / "adapter" / "adapter_model.safetensors").write_bytes(b"x")
    with pytest.raises(ConfigError, match="cannot read"):
        hf_stages(where / "base", TWO, 0, adapter=where / "adapter")
    (where / "adapter" / "adapter_config.json").write_text("{")
    with pytest.raises(ConfigError, match="cannot read"):
        hf_stages(where / "base", TWO, 0, adapter=where / "adapter")


def test_peft_is_needed_for_adapters_alone(monkeypatch, tmp_path):
    monkeypatch.setitem(sys.modules, "peft", None)
    stages = all_stages(CONFIGS["llama"](), TWO)
    save_all(stages, tmp_path / "plain")
    with pytest.raises(MissingExtra, match=r"zeropipe\[peft\]"):
        hf_stages(CONFIGS["llama"](), TWO, 0, adapter="anything")
