"""Models by name: the fields of their config.json that matter, under the names that transformers gives them."""

from __future__ import annotations

import re
from difflib import get_close_matches
from pathlib import Path
from typing import Any

_LLAMA = {"model_type": "llama", "num_key_value_heads": 8, "vocab_size": 128256, "tie_word_embeddings": False}
_QWEN3 = {"model_type": "qwen3", "num_key_value_heads": 8, "head_dim": 128, "vocab_size": 151936}
_QWEN3_MOE = {
    "model_type": "qwen3_moe", "num_key_value_heads": 4, "head_dim": 128, "vocab_size": 151936, "num_experts": 128,
    "num_experts_per_tok": 8, "tie_word_embeddings": False,
}  # fmt: skip
_MISTRAL = {
    "model_type": "mistral", "num_key_value_heads": 8, "head_dim": 128, "tie_word_embeddings": False,
    "sliding_window": None,
}  # fmt: skip
_GLM4_MOE = {
    "model_type": "glm4_moe", "num_key_value_heads": 8, "head_dim": 128, "vocab_size": 151552, "attention_bias": True,
    "num_experts_per_tok": 8, "n_shared_experts": 1, "tie_word_embeddings": False,
}  # fmt: skip
_DEEPSEEK = {
    "moe_intermediate_size": 2048, "num_experts_per_tok": 8, "n_shared_experts": 1, "q_lora_rank": 1536,
    "kv_lora_rank": 512, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128,
    "tie_word_embeddings": False,
}  # fmt: skip
_GEMMA3 = {"model_type": "gemma3_text", "tie_word_embeddings": True, "sliding_window_pattern": 6}
_GPT_OSS = {"model_type": "gpt_oss", "num_key_value_heads": 8, "head_dim": 64, "vocab_size": 201088}
_GEMMA2 = {"model_type": "gemma2", "vocab_size": 256000, "tie_word_embeddings": True}


def _sizes(hidden: int, intermediate: int, layers: int, heads: int) -> dict[str, int]:
    return {
        "hidden_size": hidden, "intermediate_size": intermediate, "num_hidden_layers": layers,
        "num_attention_heads": heads,
    }  # fmt: skip


CONFIGS_BY_SHAPE: dict[str, dict[str, Any]] = {  # the estimator derives their layers from these shapes
    "llama-3.2-1b": {**_LLAMA, **_sizes(2048, 8192, 16, 32), "head_dim": 64, "tie_word_embeddings": True},
    "llama-3.2-3b": {**_LLAMA, **_sizes(3072, 8192, 28, 24), "head_dim": 128, "tie_word_embeddings": True},
    "llama-3-8b": {**_LLAMA, **_sizes(4096, 14336, 32, 32)},
    "llama-3-70b": {**_LLAMA, **_sizes(8192, 28672, 80, 64)},
    "llama-3.1-405b": {**_LLAMA, **_sizes(16384, 53248, 126, 128)},
    "qwen2.5-7b": {
        "model_type": "qwen2", **_sizes(3584, 18944, 28, 28), "num_key_value_heads": 4, "vocab_size": 152064,
        "tie_word_embeddings": False,
    },
    "qwen2.5-72b": {
        "model_type": "qwen2", **_sizes(8192, 29568, 80, 64), "num_key_value_heads": 8, "vocab_size": 152064,
        "tie_word_embeddings": False,
    },
    "qwen3-0.6b": {**_QWEN3, **_sizes(1024, 3072, 28, 16), "tie_word_embeddings": True},
    "qwen3-1.7b": {**_QWEN3, **_sizes(2048, 6144, 28, 16), "tie_word_embeddings": True},
    "qwen3-4b": {**_QWEN3, **_sizes(2560, 9728, 36, 32), "tie_word_embeddings": True},
    "qwen3-8b": {**_QWEN3, **_sizes(4096, 12288, 36, 32), "tie_word_embeddings": False},
    "qwen3-14b": {**_QWEN3, **_sizes(5120, 17408, 40, 40), "tie_word_embeddings": False},
    "qwen3-32b": {**_QWEN3, **_sizes(5120, 25600, 64, 64), "tie_word_embeddings": False},
    "qwen3-30b-a3b": {**_QWEN3_MOE, **_sizes(2048, 6144, 48, 32), "moe_intermediate_size": 768},
    "qwen3-235b-a22b": {**_QWEN3_MOE, **_sizes(4096, 12288, 94, 64), "moe_intermediate_size": 1536},
    "mistral-7b": {**_MISTRAL, **_sizes(4096, 14336, 32, 32), "vocab_size": 32768},
    "mistral-nemo-12b": {**_MISTRAL, **_sizes(5120, 14336, 40, 32), "vocab_size": 131072},
    "mistral-small-24b": {**_MISTRAL, **_sizes(5120, 32768, 40, 32), "vocab_size": 131072},
    "mistral-large-123b": {**_MISTRAL, **_sizes(12288, 28672, 88, 96), "vocab_size": 32768},
    "mixtral-8x7b": {
        **_MISTRAL, **_sizes(4096, 14336, 32, 32), "model_type": "mixtral", "vocab_size": 32000,
        "num_local_experts": 8, "num_experts_per_tok": 2,
    },
    "gemma-7b": {
        "model_type": "gemma", **_sizes(3072, 24576, 28, 16), "num_key_value_heads": 16, "head_dim": 256,
        "vocab_size": 256000, "tie_word_embeddings": True,
    },
    "gemma-3-1b": {
        **_GEMMA3, **_sizes(1152, 6912, 26, 4), "num_key_value_heads": 1, "head_dim": 256, "vocab_size": 262144,
        "sliding_window": 512,
    },
    "gemma-3-12b": {
        **_GEMMA3, **_sizes(3840, 15360, 48, 16), "num_key_value_heads": 8, "head_dim": 256, "vocab_size": 262208,
        "sliding_window": 1024,
    },
    "gemma-3-27b": {
        **_GEMMA3, **_sizes(5376, 21504, 62, 32), "num_key_value_heads": 16, "head_dim": 128, "vocab_size": 262208,
        "sliding_window": 1024,
    },
    "deepseek-v3": {
        **_DEEPSEEK, "model_type": "deepseek_v3", **_sizes(7168, 18432, 61, 128), "num_key_value_heads": 128,
        "vocab_size": 129280, "n_routed_experts": 256, "first_k_dense_replace": 3,
    },
    "kimi-k2": {
        **_DEEPSEEK, "model_type": "kimi_k2", **_sizes(7168, 18432, 61, 64), "num_key_value_heads": 64,
        "vocab_size": 163840, "n_routed_experts": 384, "first_k_dense_replace": 1,
    },
    "glm-4.5-air": {
        **_GLM4_MOE, **_sizes(4096, 10944, 46, 96), "moe_intermediate_size": 1408, "n_routed_experts": 128,
        "first_k_dense_replace": 1, "use_qk_norm": False,
    },
    "glm-4.5": {
        **_GLM4_MOE, **_sizes(5120, 12288, 92, 96), "moe_intermediate_size": 1536, "n_routed_experts": 160,
        "first_k_dense_replace": 3, "use_qk_norm": True,
    },
}  # fmt: skip

# Types whose layers the estimator counts by running them on the meta device, with torch and transformers.
CONFIGS_BY_COUNT: dict[str, dict[str, Any]] = {
    "gpt-oss-20b": {**_GPT_OSS, **_sizes(2880, 2880, 24, 64), "num_local_experts": 32, "num_experts_per_tok": 4},
    "gpt-oss-120b": {**_GPT_OSS, **_sizes(2880, 2880, 36, 64), "num_local_experts": 128, "num_experts_per_tok": 4},
    "gemma-2-9b": {**_GEMMA2, **_sizes(3584, 14336, 42, 16), "num_key_value_heads": 8, "head_dim": 256},
    "gemma-2-27b": {**_GEMMA2, **_sizes(4608, 36864, 46, 32), "num_key_value_heads": 16, "head_dim": 128},
    "qwen3-next-80b-a3b": {
        "model_type": "qwen3_next", **_sizes(2048, 5120, 48, 16), "num_key_value_heads": 2, "head_dim": 256,
        "num_experts": 512, "num_experts_per_tok": 10, "moe_intermediate_size": 512,
        "shared_expert_intermediate_size": 512, "vocab_size": 151936, "tie_word_embeddings": False,
    },
    "llama-4-scout": {
        "model_type": "llama4_text", **_sizes(5120, 8192, 48, 40), "num_key_value_heads": 8, "head_dim": 128,
        "intermediate_size_mlp": 16384, "num_local_experts": 16, "num_experts_per_tok": 1,
        "interleave_moe_layer_step": 1, "vocab_size": 202048, "tie_word_embeddings": False,
    },
    "command-r-35b": {
        "model_type": "cohere", **_sizes(8192, 22528, 40, 64), "num_key_value_heads": 64, "vocab_size": 256000,
        "tie_word_embeddings": True,
    },
}  # fmt: skip
CONFIGS = CONFIGS_BY_SHAPE | CONFIGS_BY_COUNT
# Parameters of the counted ones: all, and those active for one token.
COUNTED_PARAMETERS = {
    "gpt-oss-20b": (20_914_757_184, 4_193_246_784), "gpt-oss-120b": (116_829_156_672, 5_750_551_872),
    "gemma-2-9b": (9_241_705_984, 9_241_705_984), "gemma-2-27b": (27_227_128_320, 27_227_128_320),
    "qwen3-next-80b-a3b": (79_674_391_296, 3_874_929_408), "llama-4-scout": (107_769_861_120, 17_172_894_720),
    "command-r-35b": (34_980_831_232, 34_980_831_232),
}  # fmt: skip

_TINY = {**_sizes(256, 768, 8, 4), "num_key_value_heads": 2, "head_dim": 64, "vocab_size": 2048}
_TINY |= {"tie_word_embeddings": False}
# The names of all commands: models that are planned, and created with random weights, without any file.
BUILT_IN: dict[str, dict[str, Any]] = {
    "tiny-qwen3": {**_QWEN3, **_TINY},
    "tiny-llama": {**_LLAMA, **_TINY},
    **CONFIGS,
    "llama-8b": {**CONFIGS["llama-3-8b"], "head_dim": 128},
}
_VARIANT = re.compile(r"[-_](instruct|base|chat|it|hf|pt|thinking|\d{4})$")  # of a name on the Hub


def find_built_in(name: str) -> dict[str, Any] | None:
    """The config of a built-in model, ignoring case. None for other names, and if a file or folder has that name."""
    return None if Path(name).exists() else BUILT_IN.get(name.lower())


def find_similar(name: str) -> str | None:
    """The most similar built-in name, also for names of the Hub; None if none is similar."""
    wanted = name.rpartition("/")[2].lower()
    while _VARIANT.search(wanted):
        wanted = _VARIANT.sub("", wanted)
    return next(iter(get_close_matches(wanted, BUILT_IN, n=1)), None)


def suggest_model(name: str) -> str:
    """The way out for an unknown model: the most similar built-in name."""
    similar = find_similar(name)
    return f"did you mean {similar!r}?" if similar else "`zeropipe estimate --known` lists the built-in models"
