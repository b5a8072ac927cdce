"""Small copies of a model, on which its cut is verified: few layers, narrow, and otherwise run as the model does."""

from __future__ import annotations

import copy
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cache
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor, nn

from zeropipe.engine.stages.families import CannotCut, quirk_of
from zeropipe.engine.stages.skeleton import SkipRandomInit
from zeropipe.engine.transformers_private import build

MIN_LAYERS = 3  # of a copy; more if that is needed to have every kind of layer
MAX_TRIES = 6  # numbers of layers that are tried
VOCABULARY_SIZE, MAX_INNER_WIDTH = 64, 48
_DROPOUT = re.compile("drop|jitter")
_LAYERS = r"(num_|n_)?(hidden_|decoder_|encoder_)?(layers?|blocks)(_per_stack)?"
# Divided by one ratio, so that a width stays the number of heads times the width of a head. The width of a head does
# not change: tables of rotary factors depend on it.
_HEADS = (
    r"(.*_)?(num|n)_(key_value_|kv_|key_|value_)?heads|n_head|(.*_)?(attention|key_value|query|mamba_n)_heads"
    r"|num_query_groups"
)
_WIDTHS = (
    r"(.*_)?hidden_size|d_model|n_embd|emb_dim|embedding_dim|(.*_)?embedding_size|word_embed_proj_dim"
    r"|lru_width|.*d_ssm|mamba_headdim|attention_head_dim|time_step_rank"
)
_INNER = r"(.*_)?intermediate_size(_mlp)?|(.*_)?ffn_(hidden_size|dim)|n_inner|dff|dim_ff|d_inner|feed_forward_size"
_UNCHANGED = r"hidden_size_per_layer_input|router_hidden_size"
# Sparse attention scores tokens by a sum of ReLUs over these heads. With fewer heads many scores are zero, and which of
# equal tokens is chosen depends on the length of the row.
_INDEXER_HEADS, MIN_INDEXER_HEADS = r"index(er)?_n_heads", 16
_MAX_SIZES: tuple[tuple[str, int], ...] = (
    (r"(.*_)?vocab_size(_.*)?", VOCABULARY_SIZE),
    (r"(.*_)?(num|n)_(routed_|local_)?experts", 4),
    (r"num_experts_per_tok(en)?|moe_(topk|k)|(moe_)?top_k(_experts)?", 2),
    (r"n_group|num_expert_groups?|n_expert_groups?|zero_expert_num", 2),
    (r"topk_group|(mamba_)?n_?groups", 1),
    (r"(.*_)?lora_rank|laurel_rank", 16),
    (r"(mamba_)?chunk_size", 16),
    # shorter than the sequences of the verification, so that it matters which layer has which
    (r"(.*_)?sliding_window(_size)?|(attention_)?window_size|local_attention|index_topk", 4),
)
# Lengths above which a model treats sequences differently; sequences of the verification are longer than these values.
_LENGTH_LIMITS: tuple[tuple[str, int], ...] = (
    (r"attention_chunk_size|keep_window_size", 4),
    (r"floor_scale", 3),
    (r"index_block_size|index_topk_blocks", 2),
)
# fields of every config, which some versions of transformers refuse to read in a part of another (attn_config of dbrx)
_NOT_IN_PARTS = ("_name_or_path", "output_attentions")
MAX_ROPE_LENGTH = 5  # of rotary embeddings that treat longer sequences differently


def is_dropout_field(name: str, value: Any) -> bool:
    """Whether a config field is the rate of a random operation: dropout, jitter."""
    return isinstance(value, int | float) and not isinstance(value, bool) and _DROPOUT.search(name) is not None


def nonzero_dropout(fields: Mapping[str, Any]) -> dict[str, float]:
    """The dropout fields of a config that are above 0."""
    return {name: value for name, value in fields.items() if is_dropout_field(name, value) and value > 0}


def build_small_model(model: nn.Module, layers: str, tp: int = 1, *, limits: bool = True) -> nn.Module:
    """A small copy with random weights, whose layers are of the kinds of the model's first and last layers.

    `tp` and `limits` are those of `small_config`.
    """
    lists = per_layer_fields(model, layers)
    pattern = layer_kinds(model, layers, lists)
    total = len(pattern)
    for chosen in _choices(pattern):
        try:
            config = small_config(model.config, chosen, total, tp, limits=limits)
            with SkipRandomInit(_is_randomized_here):
                small = build(config, torch.float32, kernels=False)
        except Exception:  # some models have layers in groups, and cannot be built with a part of a group
            if len(chosen) == total:
                raise
            continue
        found = layer_kinds(small, layers, lists)
        expected = (_renumber([pattern[layer] for layer in some]) for some in _first_and_last(total, len(chosen)))
        if set(found) == set(pattern) and found in expected:
            return _randomize(small)
    raise CannotCut("a small copy of it has other kinds of layers")


def per_layer_fields(model: nn.Module, layers: str) -> list[str]:
    """The fields of a model's config that have one value for each layer."""
    total = len(model.get_submodule(layers))
    return [name for name, value in model.config.to_dict().items() if _is_per_layer(name, value, total)]


def layer_kinds(model: nn.Module, layers: str, lists: Sequence[str]) -> list[int]:
    """The kind of each layer, numbered by first appearance; layers of one kind have equal modules and config values.

    `lists` are the config fields with one value for each layer.
    """
    numbers: dict[Any, int] = {}
    config = model.config.to_dict()
    return [
        numbers.setdefault((_signature(layer), repr([config[name][i] for name in lists])), len(numbers))
        for i, layer in enumerate(model.get_submodule(layers).children())
    ]


def _signature(layer: nn.Module) -> frozenset[Any]:
    """The modules in a layer, with their attributes of plain types except indices."""
    return frozenset(
        (_without_digits(name), type(module).__qualname__, _attributes(module))
        for name, module in layer.named_modules()
    )


def _attributes(module: nn.Module) -> frozenset[Any]:
    return frozenset(
        (name, value)
        for name, value in vars(module).items()
        if isinstance(value, bool | int | str | type(None))
        and not name.startswith("_")
        and not (type(value) is int and _is_index(name))
    )


@cache
def _without_digits(name: str) -> str:
    return re.sub(r"\d+", "*", name)


@cache
def _is_index(name: str) -> bool:
    """Whether an attribute has the index of the layer."""
    return re.search("layer|idx|index", name) is not None


def _choices(pattern: list[int]) -> Iterable[tuple[int, ...]]:
    """The layers to try for a copy: as few as have every kind, then more, finally all; first layers preferred."""
    total = len(pattern)
    found = []
    for number in range(min(MIN_LAYERS, total), total + 1):
        complete = [some for some in _first_and_last(total, number) if {pattern[i] for i in some} == set(pattern)]
        found += complete[:1]
        if found and found[-1] == tuple(range(number)):
            break
    return dict.fromkeys((*found[:MAX_TRIES], found[-1], tuple(range(total))))


def _renumber(pattern: list[int]) -> list[int]:
    """The same pattern, with kinds numbered by first appearance."""
    numbers = {kind: number for number, kind in enumerate(dict.fromkeys(pattern))}
    return [numbers[kind] for kind in pattern]


def _first_and_last(total: int, number: int) -> list[tuple[int, ...]]:
    """All choices of `number` layers that are some of the first and some of the last ones."""
    return [(*range(first), *range(total - number + first, total)) for first in range(number, 0, -1)]


def _randomize(model: nn.Module) -> nn.Module:
    """Make all weights random, so that none is 0 or 1 and can be left out unnoticed; always with the same seed."""
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in model.parameters():
            if _is_randomized_here(parameter):  # uniform numbers take a third of the time of normal ones
                parameter.uniform_(-1, 1, generator=generator).mul_(0.8 * parameter.shape[-1] ** -0.5)
            else:
                parameter.add_(torch.empty_like(parameter).normal_(generator=generator), alpha=0.1)
            parameter.requires_grad_()
    return model.train()


def _is_randomized_here(tensor: Tensor) -> bool:
    """Whether a tensor needs no first value of the model's own: all weights but vectors."""
    return isinstance(tensor, nn.Parameter) and tensor.dim() >= 2


def small_config(
    config: Any,
    layers: Sequence[int],
    total: int,
    tp: int = 1,
    *,
    limits: bool = True,
    sizes: Mapping[str, Any] = MappingProxyType({}),
) -> Any:
    """A copy of `config` with the given ones of its `total` layers, small widths and no dropout.

    Fields with one value for each layer keep those of `layers`. `tp`: the number of heads is a multiple of it, if the
    numbers of the model allow that. `limits`: lengths above which sequences are treated differently become a few
    tokens. `sizes`: fields that are set to these values.
    """
    sizes = {**quirk_of(config).small_sizes, **sizes}
    heads = getattr(config, "num_attention_heads", None)
    ratio = _ratio(heads) if isinstance(heads, int) else 8
    groups = getattr(config, "num_key_value_heads", None) or heads
    if tp > 1 and isinstance(heads, int) and isinstance(groups, int):
        ratio = next((heads // few for few in (2 * tp, tp) if heads % few == 0), 1)
        if groups // ratio % tp or groups < ratio:  # a small number of key heads must not make the copy large
            sizes = {**sizes, "num_key_value_heads": tp}
    fields = config.to_dict()
    inner = None if _is_expanded(fields) else MAX_INNER_WIDTH
    fields = _map_fields(fields, lambda name, value: _shrink(name, value, ratio, inner, layers, total))
    fields = _shrink_limits(fields) if limits else fields
    fields = _wrap_token_ids(fields | dict(sizes))
    fields.pop("transformers_version", None)
    fields.pop("quantization_config", None)
    return type(config).from_dict(copy.deepcopy(fields))


def length_limit(config: Any) -> int | None:
    """The length above which a model treats sequences differently; None if its config has no such field."""
    fields = config.to_dict()
    limits = [fields[name] for name in fields if any(re.fullmatch(rule, name) for rule, _ in _LENGTH_LIMITS)]
    return min((value for value in limits if isinstance(value, int) and value > 0), default=None)


def _shrink_limits(fields: dict[str, Any]) -> dict[str, Any]:
    """Make limits of lengths shorter than the sequences of the verification."""
    for name, value in fields.items():
        most = next((most for rule, most in _LENGTH_LIMITS if re.fullmatch(rule, name)), None)
        if most is not None and isinstance(value, int) and value > most:
            fields[name] = most
    types = _rope_types(fields.get("rope_parameters"))
    if "dynamic" in types:
        fields["max_position_embeddings"] = MAX_ROPE_LENGTH
    if "longrope" in types:
        for table in (fields, *_rope_tables(fields["rope_parameters"])):
            if "original_max_position_embeddings" in table:
                table["original_max_position_embeddings"] = MAX_ROPE_LENGTH
    return fields


def _rope_tables(rope: Any) -> list[dict[str, Any]]:
    """The parameters of rotary embeddings: one table, or one for each type of layers."""
    if not isinstance(rope, dict):
        return []
    inner = [table for table in rope.values() if isinstance(table, dict)]
    return [rope, *inner]


def _rope_types(rope: Any) -> set[str]:
    return {str(table.get("rope_type")) for table in _rope_tables(rope)}


def _is_expanded(fields: Mapping[str, Any]) -> bool:
    """Whether the inner width must be a fixed multiple of the outer one, as in recurrent layers."""
    factors = [value for name, value in fields.items() if "expand" in name and isinstance(value, int | float)]
    outer, inner = fields.get("hidden_size"), fields.get("intermediate_size")
    return bool(factors) and (outer is None or inner is None or any(outer * factor == inner for factor in factors))


def _is_per_layer(name: str, value: Any, total: int) -> bool:
    """Whether a config field has one value for each of the `total` layers."""
    if isinstance(value, str):
        return len(value) == total and "pattern" in name
    if not isinstance(value, list | tuple) or len(value) != total or "token" in name:
        return False
    return list(value) != list(range(total))  # not the indices of all layers


def _has_layer_keys(value: Any) -> bool:
    """Whether the keys of a dict are indices of layers."""
    return isinstance(value, dict) and bool(value) and all(str(key).isdecimal() for key in value)


def _map_fields(fields: Mapping[str, Any], rule: Callable[[str, Any], Any]) -> dict[str, Any]:
    return {
        name: _map_fields({key: one for key, one in value.items() if key not in _NOT_IN_PARTS}, rule)
        if isinstance(value, dict) and name.endswith("_config") and not _has_layer_keys(value)
        else rule(name, value)
        for name, value in fields.items()
    }


def _ratio(heads: int) -> int:
    """The divisor of widths that leaves 2 heads, or up to 8 where their number is odd."""
    return next((heads // few for few in range(2, 9) if heads % few == 0), max(heads, 1))


def _shrink(name: str, value: Any, ratio: int, inner: int | None, layers: Sequence[int], total: int) -> Any:
    if isinstance(value, bool) or value is None:
        return value
    if _is_per_layer(name, value, total):
        chosen = [value[layer] for layer in layers]
        return "".join(chosen) if isinstance(value, str) else chosen
    if _has_layer_keys(value):
        new_index = {layer: index for index, layer in enumerate(layers)}
        return {type(key)(new_index[int(key)]): one for key, one in value.items() if int(key) in new_index}
    if is_dropout_field(name, value):
        return type(value)(0)
    if isinstance(value, float) and re.search("aux_loss_coef", name):
        return 0.5  # large enough to make a difference
    if not isinstance(value, int) or value <= 0 or re.fullmatch(_UNCHANGED, name):
        return value
    if re.fullmatch(_LAYERS, name):
        return len(layers)
    if re.fullmatch(_INNER, name):
        return min(value, inner) if inner else max(1, value // ratio)
    if re.fullmatch(_INDEXER_HEADS, name):
        return min(value, MIN_INDEXER_HEADS)
    if re.fullmatch(f"{_HEADS}|{_WIDTHS}", name):
        return max(1, value // ratio)
    return next((min(value, most) for rule, most in _MAX_SIZES if re.fullmatch(rule, name)), value)


def _wrap_token_ids(fields: dict[str, Any]) -> dict[str, Any]:
    """Map special token ids into the small vocabulary."""
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
