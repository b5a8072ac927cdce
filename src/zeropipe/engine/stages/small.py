"""A small copy of a transformers config: a few layers, narrow, and alike in everything that decides how it runs."""

from __future__ import annotations

import copy
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from zeropipe.engine.stages.chance import is_chance

_VOCABULARY, _INNER_WIDTH = 64, 48
_LAYERS = r"(num_|n_)?(hidden_|decoder_|encoder_)?(layers?|blocks)(_per_stack)?"
# Divided by one number, so that a width stays its heads' number times their width. The width of a head stays as it is:
# tables of rotary factors belong to it.
_HEADS = (
    r"(.*_)?(num|n)_(key_value_|kv_|key_|value_)?heads|n_head|(.*_)?(attention|key_value|query|mamba_n)_heads"
    r"|num_query_groups"
)
_WIDTHS = (
    r"(.*_)?hidden_size|d_model|n_embd|emb_dim|embedding_dim|(.*_)?embedding_size|word_embed_proj_dim"
    r"|lru_width|.*d_ssm|mamba_headdim|attention_head_dim|time_step_rank"
)
_INNER = r"(.*_)?intermediate_size(_mlp)?|(.*_)?ffn_(hidden_size|dim)|n_inner|dff|dim_ff|d_inner|feed_forward_size"
_KEPT = r"hidden_size_per_layer_input|router_hidden_size"
# Scores that choose tokens are sums over these heads, without what is negative. With few of them many scores are zero,
# and which of equal tokens is chosen depends on how long the row is.
_CHOOSING_HEADS, _ENOUGH_HEADS = r"index(er)?_n_heads", 16
_AT_MOST: tuple[tuple[str, int], ...] = (
    (r"(.*_)?vocab_size(_.*)?", _VOCABULARY),
    (r"(.*_)?(num|n)_(routed_|local_)?experts", 4),
    (r"num_experts_per_tok(en)?|moe_(topk|k)|(moe_)?top_k(_experts)?", 2),
    (r"n_group|num_expert_groups?|n_expert_groups?|zero_expert_num", 2),
    (r"topk_group|(mamba_)?n_?groups", 1),
    (r"(.*_)?lora_rank|laurel_rank", 16),
    (r"(mamba_)?chunk_size", 16),
    # shorter than the sequences of the proof, so that it matters which layer has which
    (r"(.*_)?sliding_window(_size)?|(attention_)?window_size|local_attention|index_topk", 4),
)
# What happens to sequences above these lengths happens to those of the proof, too.
_LIMITS: tuple[tuple[str, int], ...] = (
    (r"attention_chunk_size|keep_window_size", 4),
    (r"floor_scale", 3),
    (r"index_block_size|index_topk_blocks", 2),
)
_LONGEST = 5  # with rotary embeddings that treat longer sequences in another way


def small_config(
    config: Any, layers: Sequence[int], total: int, sizes: Mapping[str, Any], shares: int = 1, *, limits: bool = True
) -> Any:
    """A copy of `config` with some of its `total` layers and small widths; `sizes` are put in as given.

    Where the config has one value for each layer, the copy has those of `layers`; the rest of it only knows how many
    they are. Nothing in it is random: dropout and its kin are off. `shares`: it has as many heads, or a multiple of
    that, if the numbers of the model allow it. `limits`: what holds for sequences of a certain length holds for a few
    tokens.
    """
    heads = getattr(config, "num_attention_heads", None)
    ratio = _ratio(heads) if isinstance(heads, int) else 8
    groups = getattr(config, "num_key_value_heads", None) or heads
    if shares > 1 and isinstance(heads, int) and isinstance(groups, int):
        ratio = next((heads // few for few in (2 * shares, shares) if heads % few == 0), 1)
        if groups // ratio % shares or groups < ratio:  # few heads of keys must not make a large copy
            sizes = {**sizes, "num_key_value_heads": shares}
    fields = config.to_dict()
    inner = None if _is_expanded(fields) else _INNER_WIDTH
    fields = _shrink(fields, lambda name, value: _small(name, value, ratio, inner, layers, total))
    fields = _with_limits(fields) if limits else fields
    fields = _keep_tokens(fields | dict(sizes))
    fields.pop("transformers_version", None)
    fields.pop("quantization_config", None)
    return type(config).from_dict(copy.deepcopy(fields))


def length_limit(config: Any) -> int | None:
    """The length above which a model treats sequences in another way, if its config has such a number."""
    fields = config.to_dict()
    known = [fields[name] for name in fields if any(re.fullmatch(rule, name) for rule, _ in _LIMITS)]
    return min((value for value in known if isinstance(value, int) and value > 0), default=None)


def _with_limits(fields: dict[str, Any]) -> dict[str, Any]:
    """Limits of lengths that are shorter than the sequences of the proof."""
    for name, value in fields.items():
        most = next((most for rule, most in _LIMITS if re.fullmatch(rule, name)), None)
        if most is not None and isinstance(value, int) and value > most:
            fields[name] = most
    kinds = _rope_kinds(fields.get("rope_parameters"))
    if "dynamic" in kinds:
        fields["max_position_embeddings"] = _LONGEST
    if "longrope" in kinds:
        for table in (fields, *_rope_tables(fields["rope_parameters"])):
            if "original_max_position_embeddings" in table:
                table["original_max_position_embeddings"] = _LONGEST
    return fields


def _rope_tables(rope: Any) -> list[dict[str, Any]]:
    """What a config says about rotary embeddings: in one table, or in one for each type of layers."""
    if not isinstance(rope, dict):
        return []
    inner = [table for table in rope.values() if isinstance(table, dict)]
    return [rope, *inner]


def _rope_kinds(rope: Any) -> set[str]:
    return {str(table.get("rope_type")) for table in _rope_tables(rope)}


def _is_expanded(fields: Mapping[str, Any]) -> bool:
    """Whether the inner width is a multiple of the outer one, as in a recurrent layer; that of an MLP is free."""
    factors = [value for name, value in fields.items() if "expand" in name and isinstance(value, int | float)]
    outer, inner = fields.get("hidden_size"), fields.get("intermediate_size")
    return bool(factors) and (outer is None or inner is None or any(outer * factor == inner for factor in factors))


def is_per_layer(name: str, value: Any, total: int) -> bool:
    """Whether an entry of a config has one value for each of its `total` layers."""
    if isinstance(value, str):
        return len(value) == total and "pattern" in name
    if not isinstance(value, list | tuple) or len(value) != total or "token" in name:
        return False
    return list(value) != list(range(total))  # which layers have something: all of them


def _is_by_layer(value: Any) -> bool:
    """Whether the keys of a table are numbers of layers."""
    return isinstance(value, dict) and bool(value) and all(str(key).isdecimal() for key in value)


def _shrink(fields: Mapping[str, Any], rule: Callable[[str, Any], Any]) -> dict[str, Any]:
    return {
        name: _shrink(value, rule)
        if isinstance(value, dict) and name.endswith("_config") and not _is_by_layer(value)
        else rule(name, value)
        for name, value in fields.items()
    }


def _ratio(heads: int) -> int:
    """What divides the widths, so that two heads are left, or a few more where their number is odd."""
    return next((heads // few for few in range(2, 9) if heads % few == 0), max(heads, 1))


def _small(name: str, value: Any, ratio: int, inner: int | None, layers: Sequence[int], total: int) -> Any:
    if isinstance(value, bool) or value is None:
        return value
    if is_per_layer(name, value, total):
        some = [value[layer] for layer in layers]
        return "".join(some) if isinstance(value, str) else some
    if _is_by_layer(value):
        numbers = {layer: number for number, layer in enumerate(layers)}
        return {type(key)(numbers[int(key)]): one for key, one in value.items() if int(key) in numbers}
    if is_chance(name, value):
        return type(value)(0)
    if isinstance(value, float) and re.search("aux_loss_coef", name):
        return 0.5  # large enough to be seen
    if not isinstance(value, int) or value <= 0 or re.fullmatch(_KEPT, name):
        return value
    if re.fullmatch(_LAYERS, name):
        return len(layers)
    if re.fullmatch(_INNER, name):
        return min(value, inner) if inner else max(1, value // ratio)
    if re.fullmatch(_CHOOSING_HEADS, name):
        return min(value, _ENOUGH_HEADS)
    if re.fullmatch(f"{_HEADS}|{_WIDTHS}", name):
        return max(1, value // ratio)
    return next((min(value, most) for rule, most in _AT_MOST if re.fullmatch(rule, name)), value)


def _keep_tokens(fields: dict[str, Any]) -> dict[str, Any]:
    """Special tokens that the small vocabulary has."""
    size = fields.get("vocab_size")
    if not isinstance(size, int):
        return fields
    inside = lambda value: value % size if isinstance(value, int) and not isinstance(value, bool) else value  # noqa: E731
    return {
        name: value
        if not re.search("token_id$|token_index$", name)
        else [inside(one) for one in value]
        if isinstance(value, list | tuple)
        else inside(value)
        for name, value in fields.items()
    }
