"""The shapes of a decoder model, read from its config.json without building anything."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from os import PathLike
from pathlib import Path
from typing import Any

from zeropipe.core.files import read_text
from zeropipe.core.formats.parse import parse_json
from zeropipe.core.limits import COMMAND_LINE
from zeropipe.core.model.configs import find_built_in, suggest_model
from zeropipe.errors import ConfigError, short

MOST = 10**8  # of any size; the largest vocabularies have 3 * 10**5
MOST_LAYERS = 10_000


class NotKnown(ConfigError):
    """What a model has whose shapes are not written down here: its layers have to be counted."""


@dataclass(frozen=True)
class Family:
    """What a model type has that its config does not say."""

    qk_norm: int = 0  # 1: norms of queries and keys with a head's size, 2: with that of all heads, 3: with the hidden
    norms: int = 2  # per layer, of the hidden size
    qkv_bias: bool = False
    o_bias: str = "attention_bias"  # the field that says whether attention's output has one; "": it has none
    scoring_bias: bool = False  # of each expert, in the choice of experts
    # What transformers' plan for tensor parallelism does with a part of a layer: its work is "shared"; "gathered": each
    # GPU gathers what the others have made of its input; "whole": each has all of it. And whether there is a plan.
    attention: str = "shared"
    mlp: str = "shared"
    shared_expert: str = "shared"
    tp: bool = True
    windows: str = "never"  # which layers have one where no list of layer types says so, see _Reader.windowed
    # The fields that it reads beside CORE. A config may have others, which mean something to other types only.
    reads: tuple[str, ...] = ("head_dim", "attention_bias")
    experts: str = ""  # the field with the number of experts; none: it has no experts
    aliases: Mapping[str, str] = field(default_factory=dict)  # other names of fields, as in transformers' attribute_map
    defaults: Mapping[str, Any] = field(default_factory=dict)  # transformers' own, of fields that configs leave out

    @property
    def fields(self) -> frozenset[str]:
        """All fields that say how many parameters a model has, and where its windows are."""
        return CORE | {*self.reads, *self.aliases} | ({self.experts, "num_experts_per_tok"} if self.experts else set())


CORE = frozenset({
    "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads", "vocab_size",
    "tie_word_embeddings",
})  # fmt: skip
HEADS = ("head_dim",)
BIASES = ("head_dim", "attention_bias", "mlp_bias")
SPARSE = ("decoder_sparse_step", "mlp_only_layers", "moe_intermediate_size")  # without experts their layers are dense
GATED = "shared_expert_intermediate_size"
SHARED = ("moe_intermediate_size", "n_shared_experts")
FIRST = (*SHARED, "first_k_dense_replace")
LATENT = ("q_lora_rank", "kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim")
WINDOW = ("sliding_window",)
LISTED = (*WINDOW, "layer_types")
CHOSEN = (*LISTED, "use_sliding_window", "max_window_layers")
PATTERN = (*LISTED, "sliding_window_pattern")
LOCAL: dict[str, Any] = {"experts": "num_local_experts", "aliases": {"num_experts": "num_local_experts"}}
ROUTED: dict[str, Any] = {"experts": "n_routed_experts", "aliases": {"num_local_experts": "n_routed_experts"}}

# Models that see or hear: whether the head is tied where their own config does not say so, and whether a text part that
# says so is enough.
TIED_AROUND = (
    "deepseek_vl", "deepseek_vl_hybrid", "gemma3", "glmasr", "got_ocr2", "granite_speech", "granite_speech_plus",
    "internvl", "janus", "kimi_k25", "lighton_ocr", "mistral3", "moss_transcribe_diarize", "ovis2", "paligemma",
    "pp_chart2table", "qwen3_asr",
)  # fmt: skip
UNTIED_AROUND = (
    "cosmos3_omni", "exaone4_5", "idefics2", "idefics3", "llava_next", "qianfan_ocr", "qwen3_vl", "qwen3_vl_moe",
    "smolvlm", "video_llava", "vipllava",
)  # fmt: skip
TIED_BY_EITHER = (
    "fast_vlm", "llava", "llava_next_video", "llava_onevision", "qwen2_5_vl", "qwen2_vl", "video_llama_3",
)  # fmt: skip
COUNTED_AROUND = ("fun_asr_nano", "perception_lm", "shieldgemma2", "vibevoice")  # they have rules of their own

_QWEN = {"num_key_value_heads": 32, "sliding_window": 4096, "max_window_layers": 28}
_MISTRAL = {"num_key_value_heads": 8, "sliding_window": 4096}
_MIXTRAL = {"num_key_value_heads": 8, "num_local_experts": 8, "num_experts_per_tok": 2}
_QWEN3_MOE = {
    "num_key_value_heads": 4, "num_local_experts": 128, "num_experts_per_tok": 8, "moe_intermediate_size": 768,
    "sliding_window": 4096,
}  # fmt: skip
_QWEN2_MOE = {
    **_QWEN, "num_key_value_heads": 16, "num_experts": 60, "num_experts_per_tok": 4, "moe_intermediate_size": 1408,
    "shared_expert_intermediate_size": 5632, "qkv_bias": True,
}  # fmt: skip
_QWEN2_VL = {"num_key_value_heads": 8, "sliding_window": 4096, "max_window_layers": 80}
_QWEN3_VL_MOE = {
    "num_key_value_heads": 16, "num_local_experts": 60, "num_experts_per_tok": 4, "moe_intermediate_size": 1408,
}  # fmt: skip
_GEMMA3 = {
    "hidden_size": 2304, "intermediate_size": 9216, "num_hidden_layers": 26, "num_attention_heads": 8,
    "num_key_value_heads": 4, "head_dim": 256, "vocab_size": 262208, "sliding_window": 4096,
    "sliding_window_pattern": 6, "tie_word_embeddings": True,
}  # fmt: skip
_DEEPSEEK = {
    "n_routed_experts": 256, "num_experts_per_tok": 8, "moe_intermediate_size": 2048, "n_shared_experts": 1,
    "first_k_dense_replace": 3, "q_lora_rank": 1536, "kv_lora_rank": 512, "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64, "v_head_dim": 128,
}  # fmt: skip
_DEEPSEEK_V2 = {
    **_DEEPSEEK, "n_routed_experts": 64, "num_experts_per_tok": None, "moe_intermediate_size": 1407,
    "n_shared_experts": 2, "first_k_dense_replace": 0,  # how many of the experts has to be said
}  # fmt: skip
_GLM4 = {"num_key_value_heads": 2, "head_dim": 128, "attention_bias": True}
_GLM4_MOE = {
    "num_key_value_heads": 8, "n_routed_experts": 128, "num_experts_per_tok": 8, "moe_intermediate_size": 1408,
    "n_shared_experts": 1, "first_k_dense_replace": 1,
}  # fmt: skip
_SOLAR = {
    "num_key_value_heads": 8, "head_dim": 128, "n_routed_experts": 128, "num_experts_per_tok": 8,
    "moe_intermediate_size": 1280, "n_shared_experts": 1,
}  # fmt: skip
_MINIMAX_M2 = {"num_key_value_heads": 8, "head_dim": 128, "num_local_experts": 256, "num_experts_per_tok": 8}
_EXAONE4 = {"num_key_value_heads": 32, "sliding_window": 4096, "sliding_window_pattern": 4}
_DOTS1 = {"num_key_value_heads": 32, "moe_intermediate_size": 1408, "sliding_window": 4096, "max_window_layers": 62}
_OLMO3 = {"sliding_window": 4096, "sliding_window_pattern": 4}
_SEED = {"num_key_value_heads": 8, "head_dim": 128, "attention_bias": True}

FAMILIES = {
    "llama": Family(reads=BIASES),
    "mistral": Family(windows="always", reads=(*HEADS, *WINDOW), defaults=_MISTRAL),
    "ministral": Family(windows="always", reads=(*HEADS, *LISTED), defaults=_MISTRAL),
    "ministral3": Family(
        windows="always", reads=(*HEADS, *WINDOW), defaults={"num_key_value_heads": 8, "head_dim": 128}
    ),
    "mixtral": Family(windows="always", reads=(*HEADS, *WINDOW), **LOCAL, defaults=_MIXTRAL),
    "qwen2": Family(qkv_bias=True, windows="late", reads=(*HEADS, *CHOSEN), defaults=_QWEN),
    "qwen3": Family(
        qk_norm=1, windows="late", reads=(*HEADS, *CHOSEN, "attention_bias"), defaults={**_QWEN, "head_dim": 128}
    ),
    "qwen2_moe": Family(
        shared_expert="whole", windows="early", reads=(*HEADS, *CHOSEN, *SPARSE, GATED, "qkv_bias"),
        experts="num_experts", defaults=_QWEN2_MOE,
    ),
    "qwen2_vl_text": Family(qkv_bias=True, windows="late", reads=CHOSEN, defaults=_QWEN2_VL),
    "qwen2_5_vl_text": Family(qkv_bias=True, windows="late", reads=CHOSEN, defaults=_QWEN2_VL),
    "qwen3_moe": Family(
        qk_norm=1, windows="asked", reads=(*HEADS, *WINDOW, "use_sliding_window", "attention_bias", *SPARSE),
        **LOCAL, defaults=_QWEN3_MOE,
    ),
    "qwen3_vl_text": Family(qk_norm=1, tp=False, defaults={"num_key_value_heads": 32, "head_dim": 128}),
    "qwen3_vl_moe_text": Family(
        qk_norm=1, reads=(*HEADS, "attention_bias", *SPARSE), **LOCAL, defaults=_QWEN3_VL_MOE
    ),
    "gemma": Family(defaults={"num_key_value_heads": 16, "head_dim": 256, "tie_word_embeddings": True}),
    "gemma3_text": Family(qk_norm=1, norms=4, reads=(*HEADS, "attention_bias", *PATTERN), defaults=_GEMMA3),
    "phi3": Family(attention="gathered", mlp="gathered", windows="always", reads=(*HEADS, *WINDOW)),
    "olmo2": Family(qk_norm=2, attention="gathered"),
    "olmo3": Family(qk_norm=2, attention="gathered", reads=(*HEADS, "attention_bias", *PATTERN), defaults=_OLMO3),
    "olmoe": Family(
        qk_norm=3, attention="gathered", experts="num_experts", aliases={"num_local_experts": "num_experts"},
        defaults={"num_experts": 64, "num_experts_per_tok": 8},
    ),
    "exaone4": Family(qk_norm=1, reads=(*HEADS, *PATTERN), defaults=_EXAONE4),
    "internlm3": Family(
        reads=BIASES, aliases={"qkv_bias": "attention_bias", "bias": "mlp_bias"},
        defaults={"num_key_value_heads": 2, "head_dim": 128},
    ),
    "iquestcoder": Family(reads=BIASES, defaults={"num_key_value_heads": 8, "head_dim": 128}),
    "hunyuan_v1_dense": Family(qk_norm=1, tp=False),
    "minimax_m2": Family(
        qk_norm=2, attention="gathered", scoring_bias=True, reads=HEADS, **LOCAL, defaults=_MINIMAX_M2
    ),
    "solar_open": Family(
        o_bias="", shared_expert="whole", scoring_bias=True, reads=(*HEADS, "attention_bias", *SHARED), **ROUTED,
        defaults=_SOLAR,
    ),
    "dots1": Family(
        qk_norm=1, scoring_bias=True, windows="late", **ROUTED, defaults=_DOTS1,
        reads=(*HEADS, "attention_bias", *LISTED, "max_window_layers", *FIRST),
    ),
    "granite": Family(reads=BIASES),
    "granitemoe": Family(
        attention="whole", experts="num_local_experts", defaults={"num_local_experts": 8, "num_experts_per_tok": 2}
    ),
    "smollm3": Family(
        windows="unrotated", reads=(*BIASES, *CHOSEN, "no_rope_layers", "no_rope_layer_interval"),
        defaults={"num_key_value_heads": 4, "tie_word_embeddings": True},
    ),
    "seed_oss": Family(o_bias="attention_out_bias", reads=(*BIASES, "attention_out_bias"), defaults=_SEED),
    "glm": Family(o_bias="", mlp="gathered", defaults=_GLM4),
    "glm4": Family(norms=4, o_bias="", mlp="gathered", defaults=_GLM4),
    "glm4_moe": Family(
        o_bias="", scoring_bias=True, reads=(*HEADS, "attention_bias", "use_qk_norm", *FIRST), **ROUTED,
        defaults=_GLM4_MOE,
    ),
    "deepseek_v2": Family(
        reads=("attention_bias", "mlp_bias", *FIRST, *LATENT), experts="n_routed_experts",
        aliases={"num_experts": "n_routed_experts"}, defaults=_DEEPSEEK_V2,
    ),
    "deepseek_v3": Family(
        attention="whole", scoring_bias=True, reads=("attention_bias", *FIRST, *LATENT), **ROUTED,
        defaults=_DEEPSEEK,
    ),
    "kimi_k2": Family(
        attention="whole", scoring_bias=True, reads=("attention_bias", *FIRST, *LATENT), **ROUTED,
        defaults=_DEEPSEEK,
    ),
}  # fmt: skip


@dataclass(frozen=True)
class Experts:
    """A mixture of experts."""

    number: int
    chosen: int
    size: int  # intermediate size of one
    shared: int | None = None  # intermediate size of what every token goes through, if there is such a part ...
    gated: bool = False  # ... weighed by a gate of its own
    scoring_bias: bool = False


@dataclass(frozen=True)
class Latent:
    """Multi-head latent attention: ranks and head sizes."""

    q_rank: int | None
    kv_rank: int
    nope: int
    rope: int
    value: int


@dataclass(frozen=True)
class Layer:
    """What distinguishes decoder layers of a model; equal ones are of one kind."""

    window: int | None = None
    experts: bool = False


@dataclass(frozen=True)
class Shape:
    """A model as far as its costs depend on it."""

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
    latent: Latent | None = None

    @property
    def num_layers(self) -> int:
        return len(self.layers)


def shape_of(model: str | Mapping[str, Any]) -> Shape:
    """The shape of a known name, a directory with config.json, a config file, or a config as plain data.

    NotKnown for a decoder model that has none here.
    """
    return _shape(*named_config(model))


def named_config(model: str | Mapping[str, Any]) -> tuple[str, Mapping[str, Any]]:
    """The name of a model and its config as plain data, from all that `shape_of` takes."""
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
        raise ConfigError(f"{path} is not a model's configuration: save one with save_pretrained")
    return path.parent.resolve().name if path.name == "config.json" else path.stem, data


def _shape(name: str, data: Mapping[str, Any]) -> Shape:
    if isinstance(data.get("text_config"), Mapping):  # of a model that also sees: its text part
        if data["text_config"].get("model_type") is None and data.get("model_type") is not None:
            raise NotKnown(f"models of type {short(data['model_type'])}")
        data = _text_part(data)
    kind = data.get("model_type")
    if str(kind) not in FAMILIES and f"{kind}_text" in FAMILIES and "hidden_size" in data:
        kind = f"{kind}_text"  # older configs of models that see have the text's fields beside the vision's
    if kind is None:
        raise ConfigError(f"{name} has no model_type: give a model's config.json, or to `plan` costs of its layers")
    family = FAMILIES.get(str(kind))
    if family is None:
        raise NotKnown(f"models of type {short(kind)}")
    if data.get("attn_logit_softcapping"):
        raise NotKnown("attention with soft-capping")
    data = _completed(data, family)
    if data.get("use_qk_norm"):
        family = replace(family, qk_norm=1)
    read = _Reader(name, data)
    hidden, heads = read.count("hidden_size"), read.count("num_attention_heads")
    latent = read.latent()
    head_dim = 0 if latent else read.head_dim(hidden, heads)
    if family.qk_norm == 3 and head_dim * heads != hidden:
        raise NotKnown("heads that are not of the hidden size together")
    bias = bool(data.get("attention_bias")) or bool(data.get("qkv_bias"))
    shape = Shape(
        name, (), hidden, heads, read.count("num_key_value_heads", heads), head_dim,
        read.count("intermediate_size", least=0), read.count("vocab_size"), bool(data.get("tie_word_embeddings")),
        family, qkv_bias=bias or family.qkv_bias, o_bias=bool(data.get(family.o_bias)),
        mlp_bias=bool(data.get("mlp_bias")), experts=read.experts(family), latent=latent,
    )  # fmt: skip
    return replace(shape, layers=read.layers(family))


def _text_part(data: Mapping[str, Any]) -> dict[str, Any]:
    """The text's config of a model that sees or hears, with what the config around it says about the head."""
    kind, text = data.get("model_type"), dict(data["text_config"])
    outer, inner = (one.get("tie_word_embeddings") for one in (data, text))
    tied: bool | None
    if kind in COUNTED_AROUND:
        raise NotKnown(f"models of type {short(kind)}")
    if kind in TIED_BY_EITHER:
        tied = bool(outer) or bool(inner)
    elif kind in (*TIED_AROUND, *UNTIED_AROUND):
        tied = kind in TIED_AROUND if outer is None else bool(outer)
    else:
        tied = inner if outer is None else outer
    return text if tied is None else text | {"tie_word_embeddings": tied}


def _completed(data: Mapping[str, Any], family: Family) -> dict[str, Any]:
    """What the model type reads of a config, with its defaults for what is left out."""
    given = {name: value for name, value in data.items() if name in family.fields - family.aliases.keys()}
    for other, name in family.aliases.items():
        if other in data and given.setdefault(name, data[other]) != data[other]:
            raise NotKnown(f"configs in which {other} and {name} differ")
    return {**family.defaults, **given}


class _Reader:
    """Reads fields of a config, or says in one line what is wrong with them."""

    def __init__(self, name: str, data: Mapping[str, Any]) -> None:
        self.name, self.data = name, data

    def count(self, *names: str | int | None, least: int = 1, most: int = MOST) -> int:
        """The first of these fields that is there; the last argument may be a default."""
        for name in names:
            value = self.data.get(name) if isinstance(name, str) else name
            if value is None:
                continue
            if type(value) is not int or not least <= value <= most:
                raise ConfigError(
                    f"{self.name}: {name}={short(value)}: a whole number from {least} to {most} is needed"
                )
            return value
        raise ConfigError(f"{self.name}: its config has no {names[0]}: give a decoder model's config.json")

    def head_dim(self, hidden: int, heads: int) -> int:
        if self.data.get("head_dim") is None and heads > hidden:
            raise ConfigError(f"{self.name}: num_attention_heads={heads}: at most hidden_size={hidden} are possible")
        return self.count("head_dim", hidden // heads)

    def number_of_experts(self, family: Family) -> int:
        """0 where there are none."""
        number = self.count(family.experts, 0, least=0)
        if family.experts and not number and "decoder_sparse_step" not in family.reads:
            raise NotKnown("mixtures of no experts")
        return number

    def experts(self, family: Family) -> Experts | None:
        number = self.number_of_experts(family)
        if not number:
            return None
        size = self.count("moe_intermediate_size", "intermediate_size")
        shared = None
        if GATED in family.reads:
            shared = self.count(GATED, least=0)
        elif "n_shared_experts" in family.reads:
            shared = self.count("n_shared_experts", least=0) * size
        chosen = self.count("num_experts_per_tok", most=number)
        return Experts(number, chosen, size, shared, GATED in family.reads, family.scoring_bias)

    def latent(self) -> Latent | None:
        if self.data.get("kv_lora_rank") is None:
            return None
        rank = self.data.get("q_lora_rank")
        names = ("kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim")
        return Latent(None if rank is None else self.count("q_lora_rank"), *(self.count(name) for name in names))

    def layers(self, family: Family) -> tuple[Layer, ...]:
        number = self.count("num_hidden_layers", most=MOST_LAYERS)
        is_asked = "use_sliding_window" not in family.reads or bool(self.data.get("use_sliding_window"))
        window = self.count("sliding_window", 0, least=0) if is_asked else 0
        types = self.data.get("layer_types")
        pattern = self.count("sliding_window_pattern", 0, least=0)
        if types is None and pattern:
            types = ["full_attention" if (n + 1) % pattern == 0 else "sliding_attention" for n in range(number)]
        if types is None:
            types = ["sliding_attention" if self.windowed(family, n) else "full_attention" for n in range(number)]
        if not isinstance(types, list) or len(types) != number:
            raise ConfigError(f"{self.name}: layer_types={short(types)}: one for each of {number} layers is needed")
        unknown = [kind for kind in types if kind not in ("full_attention", "sliding_attention")]
        if unknown:
            raise NotKnown(f"layers of type {short(unknown[0])}")
        with_experts = self._with_experts(number) if self.number_of_experts(family) else range(0)
        return tuple(
            Layer((window or None) if types[n] == "sliding_attention" else None, n in with_experts)
            for n in range(number)
        )

    def windowed(self, family: Family, layer: int) -> bool:
        """Whether a layer has a sliding window where the config has no list of layer types."""
        if family.windows in ("never", "always"):
            return family.windows == "always"
        bound = self.count("max_window_layers", 0, least=0)
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

    def _with_experts(self, number: int) -> set[int]:
        """The layers that have experts."""
        every, first = self.count("decoder_sparse_step", 1), self.count("first_k_dense_replace", 0, least=0)
        dense = self.data.get("mlp_only_layers") or []
        if not isinstance(dense, list) or any(type(layer) is not int for layer in dense):
            raise ConfigError(f"{self.name}: mlp_only_layers={short(dense)}: a list of layers is needed")
        return {n for n in range(first, number) if (n + 1) % every == 0} - set(dense)
