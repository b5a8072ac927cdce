"""Model types: the facts that their configs leave out, and the fields that they read."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class Family:
    """Facts about a model type that its config does not have."""

    qk_norm: int = 0  # norms of queries and keys: 1 of a head's size, 2 of the size of all heads, 3 of the hidden size
    norms: int = 2  # per layer, of the hidden size
    qkv_bias: bool = False
    o_bias: str = "attention_bias"  # the field that enables the bias of attention's output; "": there is none
    scoring_bias: bool = False  # the router has a bias for each expert
    # What transformers' tensor-parallel plan does: "sharded"; "gathered": each GPU gathers the outputs of the others'
    # shards; "replicated": each GPU computes all of it.
    attention: str = "sharded"
    mlp: str = "sharded"
    shared_expert: str = "sharded"
    has_tp_plan: bool = True
    windows: str = "never"  # the layers with a sliding window if the config has no layer types: see `has_window`
    # The fields it reads besides CORE; other fields of a config have a meaning for other types only.
    reads: tuple[str, ...] = ("head_dim", "attention_bias")
    experts: str = ""  # the field with the number of experts; "": there are none
    aliases: Mapping[str, str] = field(default_factory=dict)  # other names of fields, as in transformers' attribute_map
    defaults: Mapping[str, Any] = field(
        default_factory=dict
    )  # those of transformers, for fields that a config leaves out

    @property
    def fields(self) -> frozenset[str]:
        """All fields that determine the number of parameters and the windows."""
        return CORE | {*self.reads, *self.aliases} | ({self.experts, "num_experts_per_tok"} if self.experts else set())


# groups of config fields that several types read
CORE = frozenset({
    "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads", "vocab_size",
    "tie_word_embeddings",
})  # fmt: skip
HEADS = ("head_dim",)
BIASES = ("head_dim", "attention_bias", "mlp_bias")
SPARSE = (
    "decoder_sparse_step",
    "mlp_only_layers",
    "moe_intermediate_size",
)  # their layers are dense if there are no experts
GATED_SIZE = "shared_expert_intermediate_size"
SHARED = ("moe_intermediate_size", "n_shared_experts")
FIRST_DENSE = (*SHARED, "first_k_dense_replace")
LATENT = ("q_lora_rank", "kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim")
WINDOW = ("sliding_window",)
TYPES = (*WINDOW, "layer_types")
CHOICE = (*TYPES, "use_sliding_window", "max_window_layers")
PATTERN = (*TYPES, "sliding_window_pattern")
LOCAL_EXPERTS: dict[str, Any] = {"experts": "num_local_experts", "aliases": {"num_experts": "num_local_experts"}}
ROUTED_EXPERTS: dict[str, Any] = {"experts": "n_routed_experts", "aliases": {"num_local_experts": "n_routed_experts"}}

# Multimodal models: whether the head is tied by default, and those that are tied if their config or that of their text
# model is.
TIED_BY_DEFAULT = (
    "deepseek_vl", "deepseek_vl_hybrid", "gemma3", "glmasr", "got_ocr2", "granite_speech", "granite_speech_plus",
    "internvl", "janus", "kimi_k25", "lighton_ocr", "mistral3", "moss_transcribe_diarize", "ovis2", "paligemma",
    "pp_chart2table", "qwen3_asr",
)  # fmt: skip
UNTIED_BY_DEFAULT = (
    "cosmos3_omni", "exaone4_5", "idefics2", "idefics3", "llava_next", "qianfan_ocr", "qwen3_vl", "qwen3_vl_moe",
    "smolvlm", "video_llava", "vipllava",
)  # fmt: skip
TIED_BY_EITHER = (
    "fast_vlm", "llava", "llava_next_video", "llava_onevision", "qwen2_5_vl", "qwen2_vl", "video_llama_3",
)  # fmt: skip
TIED_BY_OWN_RULES = ("fun_asr_nano", "perception_lm", "shieldgemma2", "vibevoice")  # with tying rules of their own

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
    "n_shared_experts": 2, "first_k_dense_replace": 0,  # the number of active experts has no default
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
    "ministral": Family(windows="always", reads=(*HEADS, *TYPES), defaults=_MISTRAL),
    "ministral3": Family(
        windows="always", reads=(*HEADS, *WINDOW), defaults={"num_key_value_heads": 8, "head_dim": 128}
    ),
    "mixtral": Family(windows="always", reads=(*HEADS, *WINDOW), **LOCAL_EXPERTS, defaults=_MIXTRAL),
    "qwen2": Family(qkv_bias=True, windows="late", reads=(*HEADS, *CHOICE), defaults=_QWEN),
    "qwen3": Family(
        qk_norm=1, windows="late", reads=(*HEADS, *CHOICE, "attention_bias"), defaults={**_QWEN, "head_dim": 128}
    ),
    "qwen2_moe": Family(
        shared_expert="replicated", windows="early", reads=(*HEADS, *CHOICE, *SPARSE, GATED_SIZE, "qkv_bias"),
        experts="num_experts", defaults=_QWEN2_MOE,
    ),
    "qwen2_vl_text": Family(qkv_bias=True, windows="late", reads=CHOICE, defaults=_QWEN2_VL),
    "qwen2_5_vl_text": Family(qkv_bias=True, windows="late", reads=CHOICE, defaults=_QWEN2_VL),
    "qwen3_moe": Family(
        qk_norm=1, windows="enabled", reads=(*HEADS, *WINDOW, "use_sliding_window", "attention_bias", *SPARSE),
        **LOCAL_EXPERTS, defaults=_QWEN3_MOE,
    ),
    "qwen3_vl_text": Family(qk_norm=1, has_tp_plan=False, defaults={"num_key_value_heads": 32, "head_dim": 128}),
    "qwen3_vl_moe_text": Family(
        qk_norm=1, reads=(*HEADS, "attention_bias", *SPARSE), **LOCAL_EXPERTS, defaults=_QWEN3_VL_MOE
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
    "hunyuan_v1_dense": Family(qk_norm=1, has_tp_plan=False),
    "minimax_m2": Family(
        qk_norm=2, attention="gathered", scoring_bias=True, reads=HEADS, **LOCAL_EXPERTS, defaults=_MINIMAX_M2
    ),
    "solar_open": Family(
        o_bias="", shared_expert="replicated", scoring_bias=True, reads=(*HEADS, "attention_bias", *SHARED),
        **ROUTED_EXPERTS, defaults=_SOLAR,
    ),
    "dots1": Family(
        qk_norm=1, scoring_bias=True, windows="late", **ROUTED_EXPERTS, defaults=_DOTS1,
        reads=(*HEADS, "attention_bias", *TYPES, "max_window_layers", *FIRST_DENSE),
    ),
    "granite": Family(reads=BIASES),
    "granitemoe": Family(
        attention="replicated", experts="num_local_experts", defaults={"num_local_experts": 8, "num_experts_per_tok": 2}
    ),
    "smollm3": Family(
        windows="unrotated", reads=(*BIASES, *CHOICE, "no_rope_layers", "no_rope_layer_interval"),
        defaults={"num_key_value_heads": 4, "tie_word_embeddings": True},
    ),
    "seed_oss": Family(o_bias="attention_out_bias", reads=(*BIASES, "attention_out_bias"), defaults=_SEED),
    "glm": Family(o_bias="", mlp="gathered", defaults=_GLM4),
    "glm4": Family(norms=4, o_bias="", mlp="gathered", defaults=_GLM4),
    "glm4_moe": Family(
        o_bias="", scoring_bias=True, reads=(*HEADS, "attention_bias", "use_qk_norm", *FIRST_DENSE), **ROUTED_EXPERTS,
        defaults=_GLM4_MOE,
    ),
    "deepseek_v2": Family(
        reads=("attention_bias", "mlp_bias", *FIRST_DENSE, *LATENT), experts="n_routed_experts",
        aliases={"num_experts": "n_routed_experts"}, defaults=_DEEPSEEK_V2,
    ),
    "deepseek_v3": Family(
        attention="replicated", scoring_bias=True, reads=("attention_bias", *FIRST_DENSE, *LATENT), **ROUTED_EXPERTS,
        defaults=_DEEPSEEK,
    ),
    "kimi_k2": Family(
        attention="replicated", scoring_bias=True, reads=("attention_bias", *FIRST_DENSE, *LATENT), **ROUTED_EXPERTS,
        defaults=_DEEPSEEK,
    ),
}  # fmt: skip
