"""The shape of a decoder model, read from its config.json without building the model."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from os import PathLike
from pathlib import Path
from typing import Any

from zeropipe.core.files import read_text
from zeropipe.core.formats.parse import parse_json
from zeropipe.core.limits import COMMAND_LINE
from zeropipe.core.model.configs import find_built_in, suggest_model
from zeropipe.errors import ConfigError, short
from zeropipe.estimating.families import (
    FAMILIES,
    GATED_SIZE,
    TIED_BY_DEFAULT,
    TIED_BY_EITHER,
    TIED_BY_OWN_RULES,
    UNTIED_BY_DEFAULT,
    Family,
)

MAX_SIZE = 10**8  # the largest vocabularies have 3 * 10**5 tokens
MAX_LAYERS = 10_000


class UnknownShape(ConfigError):
    """The model has something that shapes do not describe, so its layers must be counted; the message names it."""


@dataclass(frozen=True)
class Experts:
    """A mixture of experts."""

    number: int
    num_active: int  # per token
    intermediate: int  # of one expert
    shared: int | None = None  # intermediate size of the shared expert
    has_shared_gate: bool = False
    scoring_bias: bool = False


@dataclass(frozen=True)
class LatentAttention:
    """Multi-head latent attention: ranks and head sizes."""

    q_rank: int | None
    kv_rank: int
    nope: int
    rope: int
    value: int


@dataclass(frozen=True)
class Layer:
    """A decoder layer; equal ones are of one kind."""

    window: int | None = None
    has_experts: bool = False


@dataclass(frozen=True)
class Shape:
    """The properties of a model that its costs depend on."""

    name: str
    layers: tuple[Layer, ...]
    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    intermediate: int
    vocabulary: int
    tied: bool
    family: Family
    qkv_bias: bool = False
    o_bias: bool = False
    mlp_bias: bool = False
    experts: Experts | None = None
    latent: LatentAttention | None = None
    is_multimodal: bool = False  # the text model of one

    @property
    def num_layers(self) -> int:
        return len(self.layers)


def read_shape(model: str | Mapping[str, Any]) -> Shape:
    """Read the shape of a model; the argument is that of `read_config`. UnknownShape if the layers must be counted."""
    return _parse_shape(*read_config(model))


def read_config(model: str | Mapping[str, Any]) -> tuple[str, Mapping[str, Any]]:
    """Read the name and the config of a known model, a directory with config.json, a config file, or a config."""
    if isinstance(model, Mapping):
        return str(model.get("_name_or_path") or model.get("model_type") or "model"), model
    known = find_built_in(model) if isinstance(model, str) else None
    if known is not None:
        return str(model).lower(), known
    path = Path(model) if isinstance(model, (str, PathLike)) else None
    if path is not None and path.is_dir():
        path = path / "config.json"
    if path is None or not path.is_file():
        raise ConfigError(
            f"model {short(model)}: must be a directory with config.json, a config file or a built-in model; "
            f"{suggest_model(str(model))}"
        )
    try:
        data = parse_json(read_text(path, COMMAND_LINE, "the model's config"))
    except ValueError as error:
        if isinstance(error, ConfigError):
            raise
        raise ConfigError(f"{path} is not JSON: {error}") from None
    if not isinstance(data, Mapping):
        raise ConfigError(f"{path} is not a model's configuration; use a file that save_pretrained wrote")
    return path.parent.resolve().name if path.name == "config.json" else path.stem, data


def _parse_shape(name: str, data: Mapping[str, Any]) -> Shape:
    is_multimodal = isinstance(data.get("text_config"), Mapping)
    if is_multimodal:
        if data["text_config"].get("model_type") is None and data.get("model_type") is not None:
            raise UnknownShape(f"models of type {short(data['model_type'])}")
        data = _text_config(data)
    kind = data.get("model_type")
    if str(kind) not in FAMILIES and f"{kind}_text" in FAMILIES and "hidden_size" in data:
        kind = f"{kind}_text"  # older multimodal configs have the fields of text and vision together
    if kind is None:
        raise ConfigError(f"{name} has no model_type; use a model's config.json, or for `plan` costs of its layers")
    family = FAMILIES.get(str(kind))
    if family is None:
        raise UnknownShape(f"models of type {short(kind)}")
    if data.get("attn_logit_softcapping"):
        raise UnknownShape("attention with soft-capping")
    data = _complete(data, family)
    if data.get("use_qk_norm"):
        family = replace(family, qk_norm=1)
    reader = ConfigReader(name, data)
    hidden, heads = reader.count("hidden_size"), reader.count("num_attention_heads")
    latent = reader.latent()
    head_dim = 0 if latent else reader.head_dim(hidden, heads)
    if family.qk_norm == 3 and head_dim * heads != hidden:
        raise UnknownShape("heads that do not have the hidden size together")
    bias = bool(data.get("attention_bias")) or bool(data.get("qkv_bias"))
    shape = Shape(
        name, (), hidden, heads, reader.count("num_key_value_heads", heads), head_dim,
        reader.count("intermediate_size", minimum=0), reader.count("vocab_size"), bool(data.get("tie_word_embeddings")),
        family, qkv_bias=bias or family.qkv_bias, o_bias=bool(data.get(family.o_bias)),
        mlp_bias=bool(data.get("mlp_bias")), experts=reader.experts(family), latent=latent,
        is_multimodal=is_multimodal or "_vl_" in str(kind),
    )  # fmt: skip
    return replace(shape, layers=reader.layers(family))


def _text_config(data: Mapping[str, Any]) -> dict[str, Any]:
    """The config of a multimodal model's text model, with the tying of the outer config."""
    kind, text = data.get("model_type"), dict(data["text_config"])
    outer, inner = (one.get("tie_word_embeddings") for one in (data, text))
    tied: bool | None
    if kind in TIED_BY_OWN_RULES:
        raise UnknownShape(f"models of type {short(kind)}")
    if kind in TIED_BY_EITHER:
        tied = bool(outer) or bool(inner)
    elif kind in (*TIED_BY_DEFAULT, *UNTIED_BY_DEFAULT):
        tied = kind in TIED_BY_DEFAULT if outer is None else bool(outer)
    else:
        tied = inner if outer is None else outer
    return text if tied is None else text | {"tie_word_embeddings": tied}


def _complete(data: Mapping[str, Any], family: Family) -> dict[str, Any]:
    """The fields of a config that the model type reads, with its defaults."""
    fields = {name: value for name, value in data.items() if name in family.fields - family.aliases.keys()}
    for other, name in family.aliases.items():
        if other in data and fields.setdefault(name, data[other]) != data[other]:
            raise UnknownShape(f"configs in which {other} and {name} differ")
    return {**family.defaults, **fields}


class ConfigReader:
    """Reads fields of a config; ConfigError for an invalid one."""

    def __init__(self, name: str, data: Mapping[str, Any]) -> None:
        self.name, self.data = name, data

    def count(self, *names: str | int | None, minimum: int = 1, maximum: int = MAX_SIZE) -> int:
        """The first of these fields that is set; the last argument may be a default."""
        for name in names:
            value = self.data.get(name) if isinstance(name, str) else name
            if value is None:
                continue
            if type(value) is not int or not minimum <= value <= maximum:
                raise ConfigError(f"{self.name}: {name}={short(value)}: must be an integer from {minimum} to {maximum}")
            return value
        raise ConfigError(f"{self.name}: its config has no {names[0]}; use a decoder model's config.json")

    def head_dim(self, hidden: int, heads: int) -> int:
        if self.data.get("head_dim") is None and heads > hidden:
            raise ConfigError(f"{self.name}: num_attention_heads={heads}: must be at most hidden_size={hidden}")
        return self.count("head_dim", hidden // heads)

    def num_experts(self, family: Family) -> int:
        """The number of experts, or 0."""
        number = self.count(family.experts, 0, minimum=0)
        if family.experts and not number and "decoder_sparse_step" not in family.reads:
            raise UnknownShape("mixtures of no experts")
        return number

    def experts(self, family: Family) -> Experts | None:
        number = self.num_experts(family)
        if not number:
            return None
        size = self.count("moe_intermediate_size", "intermediate_size")
        shared = None
        if GATED_SIZE in family.reads:
            shared = self.count(GATED_SIZE, minimum=0)
        elif "n_shared_experts" in family.reads:
            shared = self.count("n_shared_experts", minimum=0) * size
        active = self.count("num_experts_per_tok", maximum=number)
        return Experts(number, active, size, shared, GATED_SIZE in family.reads, family.scoring_bias)

    def latent(self) -> LatentAttention | None:
        if self.data.get("kv_lora_rank") is None:
            return None
        rank = self.data.get("q_lora_rank")
        names = ("kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim")
        return LatentAttention(
            None if rank is None else self.count("q_lora_rank"), *(self.count(name) for name in names)
        )

    def layers(self, family: Family) -> tuple[Layer, ...]:
        number = self.count("num_hidden_layers", maximum=MAX_LAYERS)
        has_windows = "use_sliding_window" not in family.reads or bool(self.data.get("use_sliding_window"))
        window = self.count("sliding_window", 0, minimum=0) if has_windows else 0
        types = self.data.get("layer_types")
        pattern = self.count("sliding_window_pattern", 0, minimum=0)
        if types is None and pattern:
            types = ["full_attention" if (n + 1) % pattern == 0 else "sliding_attention" for n in range(number)]
        if types is None:
            types = ["sliding_attention" if self.has_window(family, n) else "full_attention" for n in range(number)]
        if not isinstance(types, list) or len(types) != number:
            raise ConfigError(
                f"{self.name}: layer_types={short(types)}: must have one type for each of {number} layers"
            )
        unknown = [kind for kind in types if kind not in ("full_attention", "sliding_attention")]
        if unknown:
            raise UnknownShape(f"layers of type {short(unknown[0])}")
        with_experts = self._expert_layers(number) if self.num_experts(family) else range(0)
        return tuple(
            Layer((window or None) if types[n] == "sliding_attention" else None, n in with_experts)
            for n in range(number)
        )

    def has_window(self, family: Family, layer: int) -> bool:
        """Whether a layer has a sliding window if the config has no layer types."""
        if family.windows in ("never", "always"):
            return family.windows == "always"
        bound = self.count("max_window_layers", 0, minimum=0)
        match family.windows:
            case "late":
                return layer >= bound
            case "early":  # every second one
                return layer < bound and layer % 2 == 0
            case "unrotated":  # layers without rotary embeddings
                rotated = self.data.get("no_rope_layers")
                if isinstance(rotated, list) and layer < len(rotated):
                    return not rotated[layer]
                return (layer + 1) % self.count("no_rope_layer_interval", 4) == 0
        return True

    def _expert_layers(self, number: int) -> set[int]:
        """The indices of the layers with experts."""
        every, first = self.count("decoder_sparse_step", 1), self.count("first_k_dense_replace", 0, minimum=0)
        dense = self.data.get("mlp_only_layers") or []
        if not isinstance(dense, list) or any(type(layer) is not int for layer in dense):
            raise ConfigError(f"{self.name}: mlp_only_layers={short(dense)}: must be a list of layer indices")
        return {n for n in range(first, number) if (n + 1) % every == 0} - set(dense)
