"""Numbers of parameters against those of transformers' own models, for configs with anything in them."""

import itertools
import json
import random

import pytest
from full_marker import mark_rest_full
from test_estimate import CODE, NEEDED, transformers_model

from zeropipe.errors import ConfigError
from zeropipe.estimating import families, shapes
from zeropipe.estimating.families import FAMILIES
from zeropipe.estimating.model import ShapedModel, open_model

SMALL = {
    "num_hidden_layers": 3, "hidden_size": 32, "intermediate_size": 24, "num_attention_heads": 4, "vocab_size": 32,
    "pad_token_id": 0, "num_key_value_heads": 2,
}  # fmt: skip
# Values of fields, those that a type does not know among them. ABSENT: the type's own default.
ABSENT = object()
FLAG = (True, False, ABSENT)
CHOICES = {
    "num_hidden_layers": (1, 2, 4), "hidden_size": (16, 32), "intermediate_size": (0, 8, 20), "vocab_size": (16, 30),
    "num_attention_heads": (2, 4), "num_key_value_heads": (1, 2, None), "head_dim": (8, 16, None, ABSENT),
    "tie_word_embeddings": FLAG, "attention_bias": FLAG, "mlp_bias": FLAG, "qkv_bias": FLAG, "use_qk_norm": FLAG,
    "attention_out_bias": FLAG, "num_experts": (0, 2, 4, ABSENT, ABSENT), "n_routed_experts": (0, 2, 4, ABSENT, ABSENT),
    "num_local_experts": (0, 2, 4, ABSENT, ABSENT), "num_experts_per_tok": (1, 2), "moe_intermediate_size": (4, 12),
    "shared_expert_intermediate_size": (0, 4, 10, ABSENT), "n_shared_experts": (0, 1, 2),
    "first_k_dense_replace": (0, 1, 9), "decoder_sparse_step": (1, 2, ABSENT), "mlp_only_layers": ([], [1], ABSENT),
    "q_lora_rank": (None, 4, ABSENT), "kv_lora_rank": (4, 6), "qk_nope_head_dim": (4, 8), "qk_rope_head_dim": (4, 8),
    "v_head_dim": (4, 8), "sliding_window": (None, 4, ABSENT), "use_sliding_window": FLAG,
    "max_window_layers": (0, 1, ABSENT), "bias": FLAG, "use_bias": FLAG, "shared_intermediate_size": (0, 8, ABSENT),
}  # fmt: skip
VISION = tuple(kind for kind in FAMILIES if kind.endswith(("_vl_text", "_vl_moe_text")))


def ours(config):
    """None where the model has to be counted, or is refused in one line."""
    try:
        model = open_model(config)
    except ConfigError:
        return None
    return model.num_parameters()[0] if isinstance(model, ShapedModel) else None


def theirs(config):
    """None where transformers has no such model."""
    try:
        return transformers_model({**config, "pad_token_id": 0})[1]
    except Exception:
        return None


def drawn(kind, seed):
    randomly = random.Random(f"{kind} {seed}")
    found = {"model_type": kind, **{name: randomly.choice(values) for name, values in CHOICES.items()}}
    if kind in VISION:
        found["tie_word_embeddings"] = ABSENT  # the config around it says so
    return {name: value for name, value in found.items() if value is not ABSENT}


def compare(kind, number):
    """With so many drawn configs that both know."""
    for seed in range(20 * number):
        config = drawn(kind, seed)
        mine = ours(config)
        if mine is not None and (wanted := theirs(config)) is not None:
            number -= 1
            assert mine == wanted, json.dumps(config)
        if number == 0:
            return
    pytest.fail("almost all configs have to be counted, or are refused")


@pytest.mark.parametrize("kind", FAMILIES)
def test_drawn_configs(kind):
    compare(kind, 1)


@pytest.mark.full
@pytest.mark.parametrize("kind", FAMILIES)
def test_many_drawn_configs(kind):
    compare(kind, 100)


@pytest.mark.parametrize(
    "change",
    [{"qkv_bias": False}, {"shared_expert_intermediate_size": 0}, {"num_experts": 0}, {"intermediate_size": 0}],
    ids=str,
)
def test_options_of_qwen2_moe(change):
    config = {"model_type": "qwen2_moe", **SMALL, "num_experts": 4, "num_experts_per_tok": 2}
    assert ours({**config, **change}) == theirs({**config, **change})


@pytest.mark.full
@pytest.mark.parametrize("kind", FAMILIES)
def test_no_other_field_of_a_type_changes_the_number(kind):
    """Each field of its config class, one by one: what changes transformers' number changes ours, or is counted."""
    base = {"model_type": kind, **SMALL, **NEEDED.get(kind, {})}
    own = CODE.get(kind, kind.removesuffix("_text") if kind in VISION else kind)
    fields = around(own).get_text_config().to_dict()
    before = theirs(base)
    assert ours(base) == before
    for name, value in fields.items():
        if name in (
            "model_type",
            "dtype",
            "id2label",
            "label2id",
            *(["tie_word_embeddings"] if kind in VISION else []),
        ):
            continue
        for other in others(value):
            config = {**base, name: other}
            if (wanted := theirs(config)) is not None and (mine := ours(config)) is not None:
                assert mine == wanted, (name, other)
                assert wanted == before or name in FAMILIES[kind].fields


def others(value):
    if isinstance(value, bool):
        return [not value]
    if isinstance(value, int) or value is None:
        return [one for one in (True, None, 0, 1, 2, 4, 8) if one != value or type(one) is not type(value)]
    return [[], [0]] if isinstance(value, list) else []


def around(kind, **fields):
    """A config of transformers, of a model around a text part say."""
    import transformers

    return transformers.AutoConfig.for_model(kind, **json.loads(json.dumps(fields)))


AROUND = (*families.TIED_BY_DEFAULT, *families.UNTIED_BY_DEFAULT, *families.TIED_BY_EITHER)


@pytest.mark.parametrize("kind", mark_rest_full(AROUND, AROUND[::2]))
def test_models_around_say_whether_their_head_is_tied(kind):
    text = around(kind).text_config.model_type
    for outer, inner in itertools.product((None, True, False), repeat=2):
        tie = {"tie_word_embeddings": outer} if outer is not None else {}
        part = {"model_type": text} | ({"tie_word_embeddings": inner} if inner is not None else {})
        found = shapes._text_config({"model_type": kind, "text_config": part, **tie})["tie_word_embeddings"]
        assert found == around(kind, text_config=part, **tie).tie_word_embeddings, (outer, inner)


@pytest.mark.parametrize("kind", FAMILIES)
def test_other_names_of_fields_are_those_of_transformers(kind):
    fields, aliases = FAMILIES[kind].fields, FAMILIES[kind].aliases
    own = CODE.get(kind, kind.removesuffix("_text") if kind in VISION else kind)
    known = type(around(own).get_text_config()).attribute_map
    assert aliases == {other: name for other, name in known.items() if name in fields}
