"""Hugging Face models are cut where that is verified on a small copy of them; others are refused in one line."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from family_models import tiny
from stage_models import CONFIGS
from torch import nn
from transformers import DbrxConfig, Gemma3nTextConfig, LlamaConfig, XLMConfig
from transformers.masking_utils import create_causal_mask
from transformers.modeling_outputs import BaseModelOutputWithPast
from transformers.models.dbrx.configuration_dbrx import DbrxAttentionConfig
from transformers.models.llama.modeling_llama import LlamaModel

from zeropipe.engine.stages import cut, families, small_model, verify
from zeropipe.engine.stages.skeleton import build_on_meta, find_decoder_config
from zeropipe.engine.stages.verify import find_family
from zeropipe.errors import ConfigError


@pytest.fixture(autouse=True)
def _proven_anew(monkeypatch):
    monkeypatch.setattr(verify, "_cache", {})


def look(config):
    return find_family(build_on_meta(find_decoder_config(config), torch.float32))


def refused(config, reason):
    with pytest.raises(ConfigError) as caught:
        look(config)
    text = str(caught.value)
    assert reason in text
    assert repr(config.model_type) in text
    assert "module_stages" in text
    assert "\n" not in text


def test_the_common_shape_is_found():
    family = look(CONFIGS["llama"](num_hidden_layers=7))
    assert (family.layers, family.num_layers) == ("model.layers", 7)
    assert family.before == {"model.embed_tokens.weight"}
    assert family.carried == (("args", 0),)
    assert family.can_pack
    assert family.allows_empty_ends


def test_homes_of_parameters():
    family = look(CONFIGS["llama"]())
    parts = (range(2), range(2, 4), range(4, 4))
    homes = [
        family.stage_of(name, parts) for name in ("model.embed_tokens.weight", "model.layers.2.x", "model.norm.weight")
    ]
    assert homes == [0, 1, 2]


def test_a_cut_is_verified_once(monkeypatch):
    look(CONFIGS["llama"]())
    monkeypatch.setattr(verify, "verify_cut", None)
    look(CONFIGS["llama"]())


def test_a_cut_is_verified_once_for_models_of_several_lengths(monkeypatch):
    """They have the same small copy; what decides how a model runs makes another one."""
    short, mixed = look(CONFIGS["llama"]()), CONFIGS["qwen3-mixed"]()
    monkeypatch.setattr(verify, "verify_cut", None)
    assert look(CONFIGS["llama"](num_hidden_layers=9)) == dataclasses.replace(short, num_layers=9)
    refused(CONFIGS["llama"](tie_word_embeddings=True), "does not run")
    refused(mixed, "does not run")


def test_verification_restores_the_callers_state(capfd):
    torch.manual_seed(3)
    state = torch.random.get_rng_state()
    with torch.no_grad():
        look(CONFIGS["qwen3"]())
    assert torch.equal(state, torch.random.get_rng_state())
    assert capfd.readouterr() == ("", "")


# Cuts that are wrong, made by breaking what makes them right


def test_embeddings_that_are_not_replaced_are_seen(monkeypatch):
    monkeypatch.setattr(cut.StageStart, "enter", lambda self, layer, args, kwargs: None)
    refused(CONFIGS["llama"](), "other logits")


def test_a_position_embedding_that_is_left_out_is_seen(monkeypatch):
    before = families._find_before
    monkeypatch.setattr(families, "_find_before", lambda *args: before(*args) - {"transformer.wpe.weight"})
    refused(CONFIGS["gpt2"](), "other logits")


def test_a_layers_number_that_shifts_is_seen(monkeypatch):
    """As if layers were dropped and the config's list of layer types was not."""
    cut_layers = verify.HFStage._remove_other_stages

    def shifted(stage, parameters):
        cut_layers(stage, parameters)
        types = stage.lm.config.layer_types
        stage.lm.config.layer_types = types[1:] + types[:1]

    monkeypatch.setattr(verify.HFStage, "_remove_other_stages", shifted)
    refused(CONFIGS["qwen3-mixed"](), "other logits")


def test_a_gradient_that_is_lost_is_seen(monkeypatch):
    enter = cut.StageStart.enter

    def detached(self, layer, args, kwargs):
        self.received = [tensor.detach() for tensor in self.received]
        return enter(self, layer, args, kwargs)

    monkeypatch.setattr(cut.StageStart, "enter", detached)
    refused(CONFIGS["llama"](), "gradient of")


# Models that have another shape


def odd_forward(oddity):
    """Llama's forward with something that most models do not do."""

    def forward(self, input_ids, attention_mask=None, position_ids=None, use_cache=None, **kwargs):
        hidden = self.embed_tokens(input_ids)
        if oddity == "scaled embedding":
            hidden = hidden * 7.0
        if position_ids is None:
            position_ids = torch.arange(hidden.shape[1])[None]
        mask = create_causal_mask(self.config, hidden, attention_mask, None, position_ids)
        shared = {"position_embeddings": self.rotary_emb(hidden, position_ids), "attention_mask": mask}
        first = None
        for index, layer in enumerate(self.layers):
            if oddity == "doubled between layers":
                hidden = hidden * 2.0
            if oddity == "weight between layers":
                hidden = hidden * self.norm.weight
            if oddity == "residual across layers" and index == 2:
                hidden = hidden + first
            hidden = layer(hidden, **shared)
            if oddity == "run twice":
                hidden = layer(hidden, **shared)
            first = hidden if first is None else first
        if oddity == "backwards":
            for layer in reversed(self.layers):
                hidden = layer(hidden, **shared)
        return BaseModelOutputWithPast(last_hidden_state=self.norm(hidden))

    return forward


@pytest.mark.parametrize("oddity", ["none", "scaled embedding", "doubled between layers"])
def test_what_is_harmless_is_exact(monkeypatch, oddity):
    monkeypatch.setattr(LlamaModel, "forward", odd_forward(oddity))
    assert look(CONFIGS["llama"](num_hidden_layers=3)).num_layers == 3


@pytest.mark.parametrize(
    "oddity,reason",
    [
        ("weight between layers", "other logits"),
        ("residual across layers", "other logits"),
        ("run twice", "run more than once"),
        ("backwards", "run more than once"),
    ],
)
def test_what_spans_layers_is_refused(monkeypatch, oddity, reason):
    monkeypatch.setattr(LlamaModel, "forward", odd_forward(oddity))
    refused(CONFIGS["llama"](num_hidden_layers=3), reason)


def own_mask(hidden, position_ids=None):
    """A mask function of a family's own: causal, and packed sequences are told apart by their positions."""
    length = hidden.shape[1]
    sample = torch.zeros(1, length) if position_ids is None else (position_ids == 0).cumsum(-1)
    mask = torch.ones(length, length).tril().bool() & (sample[:, :, None] == sample[:, None])
    return mask[:, None]


def forward_with_own_mask(self, input_ids, attention_mask=None, position_ids=None, use_cache=None, **kwargs):
    hidden = self.embed_tokens(input_ids)
    positions = torch.arange(hidden.shape[1])[None] if position_ids is None else position_ids
    mask = own_mask(hidden)  # without position ids, as gpt_oss calls those of transformers
    if attention_mask is not None:
        mask = mask & attention_mask[:, None, None].bool()
    rotary = self.rotary_emb(hidden, positions)
    for layer in self.layers:
        hidden = layer(hidden, position_embeddings=rotary, attention_mask=mask)
    return BaseModelOutputWithPast(last_hidden_state=self.norm(hidden))


@pytest.mark.parametrize("mask_functions", [(), (f"{__name__}.own_mask",)])
def test_a_mask_function_of_its_own_is_named_in_quirks(monkeypatch, mask_functions):
    monkeypatch.setattr(LlamaModel, "forward", forward_with_own_mask)
    monkeypatch.setitem(families.QUIRKS, "llama", families.Quirk(mask_functions=mask_functions))
    assert look(CONFIGS["llama"](num_hidden_layers=3)).can_pack == bool(mask_functions)
    assert own_mask.__defaults__ == (None,)


def test_weights_shared_between_layers_are_refused(monkeypatch):
    init = LlamaModel.__init__

    def shared(self, config):
        init(self, config)
        self.layers[2].mlp = self.layers[0].mlp

    monkeypatch.setattr(LlamaModel, "__init__", shared)
    refused(CONFIGS["llama"](num_hidden_layers=3), "shared between layers")


def test_keys_and_values_of_other_layers_are_refused(monkeypatch):
    """Refused by the config, and found by the verification if it were not."""
    sizes = {"num_hidden_layers": 4, "num_kv_shared_layers": 2, "hidden_size": 32, "intermediate_size": 32}
    sizes |= {"layer_types": ["sliding_attention", "full_attention"] * 2, "activation_sparsity_pattern": [0.0] * 4}
    sizes |= {"num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 16, "altup_num_inputs": 2}
    config = Gemma3nTextConfig(**sizes)
    refused(config, "keys and values of others (num_kv_shared_layers=2)")
    monkeypatch.setattr(verify, "UNSUPPORTED_FIELDS", {})
    monkeypatch.setattr(verify, "_cache", {})
    refused(config, "cannot be cut into stages")


def test_inputs_of_each_layer_are_refused():
    refused(tiny("gemma4_text", hidden_size_per_layer_input=8), "of the embeddings (hidden_size_per_layer_input=8)")
    assert look(tiny("gemma4_text", hidden_size_per_layer_input=0)).can_pack


def test_lists_side_by_side_are_refused():
    refused(XLMConfig(n_layers=3, emb_dim=32, n_heads=2, vocab_size=61), "cannot be cut")


def test_random_layers_are_refused():
    from transformers import OPTConfig

    refused(OPTConfig(layerdrop=0.1, num_hidden_layers=2), "layerdrop=0.1")


def test_every_kind_of_layer_is_in_the_small_copy():
    """Of the first layers and the last ones, as few as have every kind: one that is far from both makes it longer."""
    own, other = "sliding_attention", "full_attention"
    types = {(other, *[own] * 6): 3, (*[own] * 6, other): 3, (own, own, own, other, own, own, own): 4}
    for some, number in types.items():
        config = CONFIGS["qwen3-mixed"](num_hidden_layers=7, layer_types=list(some))
        small = small_model.build_small_model(build_on_meta(config, torch.float32), "model.layers")
        assert len(small.model.layers) == number
        found = small.config.layer_types
        assert set(found) == {own, other}
        assert any(tuple(found) == some[:first] + some[7 - number + first :] for first in range(1, number + 1))
        assert [layer.self_attn.layer_type for layer in small.model.layers] == found


def test_a_pattern_that_a_short_copy_does_not_have_makes_it_as_long_as_the_first_one():
    """Which layers have experts is counted from the first layer, and said by no list."""
    from transformers import DeepseekV3Config

    model = build_on_meta(DeepseekV3Config(num_hidden_layers=9, first_k_dense_replace=4), torch.float32)
    small = small_model.build_small_model(model, "model.layers")
    assert small_model.layer_kinds(small, "model.layers", []) == [0, 0, 0, 0, 1]


def test_kinds_of_a_copy_are_counted_as_they_come_up_in_it():
    """Of the first layer and the last three of [0, 1, 1, 1, 2, 1, 1] a copy says [0, 1, 2, 2]."""
    assert (0, 4, 5, 6) in small_model._choices([0, 1, 1, 1, 2, 1, 1])
    assert small_model._renumber([0, 2, 1, 1]) == [0, 1, 2, 2]


def test_parts_of_a_small_config_have_no_fields_that_they_may_refuse(monkeypatch):
    """The parts of dbrx refuse these in some versions of transformers."""
    create = DbrxAttentionConfig.__init__

    def create_strictly(self, **fields):
        assert not {"_name_or_path", "output_attentions"} & fields.keys()
        create(self, **fields)

    monkeypatch.setattr(DbrxAttentionConfig, "__init__", create_strictly)
    small = small_model.small_config(DbrxConfig(attn_config={"kv_n_heads": 4, "clip_qkv": 3.0}), range(2), 24)
    assert (small.n_layers, small.attn_config.clip_qkv) == (2, 3.0)


def test_weights_of_a_small_copy_are_drawn_once(monkeypatch):
    """None is left as its constructor made it, and none is 0."""
    drawn = []
    fill = nn.init._no_grad_normal_
    monkeypatch.setattr(nn.init, "_no_grad_normal_", lambda tensor, *rest: drawn.append(tensor) or fill(tensor, *rest))
    model = build_on_meta(CONFIGS["llama"](), torch.float32)
    small = small_model.build_small_model(model, "model.layers")
    assert not drawn
    assert all((parameter != 0).float().mean() > 0.99 for parameter in small.parameters())
    assert all(parameter.std() > 0 for parameter in small.parameters())


def test_what_rounding_leaves_of_a_gradient_is_not_compared():
    """Where all experts of a token are the same one, the gradient of the router is 0, or 1e-7 of the others."""
    noise, other, large = torch.tensor([3e-7]), torch.tensor([-1e-7]), torch.tensor([10.0, -2.0])
    assert not verify.is_close(noise, other)
    assert verify.is_close(noise, other, verify.rounding_error([large, None]))
    assert not verify.is_close(torch.tensor([1e-3]), other, verify.rounding_error([large, None]))
    assert not verify.is_close(None, torch.tensor([1e-3]), verify.rounding_error([large]))


def test_a_last_layer_of_another_kind_needs_no_copy_as_long_as_the_model():
    """The last layer of gpt_neox_japanese has a bias that no other one has."""
    from transformers import GPTNeoXJapaneseConfig

    model = build_on_meta(GPTNeoXJapaneseConfig(num_hidden_layers=9), torch.float32)
    assert small_model.layer_kinds(model, "gpt_neox_japanese.layers", []) == [0] * 8 + [1]
    small = small_model.build_small_model(model, "gpt_neox_japanese.layers")
    assert small_model.layer_kinds(small, "gpt_neox_japanese.layers", []) == [0, 0, 1]


@pytest.mark.parametrize("name", ["gemma3", "mistral3"])
def test_the_text_part_of_a_multimodal_model(name):
    from transformers import AutoConfig

    whole = AutoConfig.for_model(name)
    assert find_decoder_config(whole).model_type == whole.text_config.model_type
    assert isinstance(build_on_meta(find_decoder_config(whole), torch.float32).get_input_embeddings(), nn.Embedding)


def test_a_model_that_is_no_decoder_is_refused():
    from transformers import ViTConfig

    with pytest.raises(ConfigError, match=r"model_type='vit'.*no causal language model") as caught:
        find_decoder_config(ViTConfig())
    assert "\n" not in str(caught.value)


def test_a_config_that_transformers_cannot_build_is_named():
    with pytest.raises(ConfigError, match="cannot build a model of this config") as caught:
        build_on_meta(dataclasses.replace(LlamaConfig(), hidden_act="nothing"), torch.float32)
    assert "\n" not in str(caught.value)
