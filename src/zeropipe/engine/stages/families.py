"""What must be known about a Hugging Face model family to cut it into stages."""

from __future__ import annotations

import copy
from dataclasses import dataclass
from typing import Any

from zeropipe.errors import ConfigError


@dataclass(frozen=True)
class Family:
    """Names of the parts of a decoder model."""

    base: str = "model"
    embedding: str = "embed_tokens"
    layers: str = "layers"
    norm: str = "norm"
    first_only: tuple[str, ...] = ()  # applied to the embeddings by the base model: once, not once per stage
    stored_head: str = "lm_head"  # what published checkpoints call the head


_LLAMA = Family()
_INDEX_LISTS = ("mlp_only_layers", "eos_token_id")  # lists that are not one entry per layer, whatever their length
FAMILIES = {
    "llama": _LLAMA,
    "mistral": _LLAMA,
    "qwen2": _LLAMA,
    "qwen3": _LLAMA,
    "qwen3_moe": _LLAMA,
    "gemma3_text": _LLAMA,
    "gpt_neox": Family("gpt_neox", "embed_in", "layers", "final_layer_norm", ("emb_dropout",), "embed_out"),
    "phi": Family(norm="final_layernorm", first_only=("embed_dropout",)),
}


def family_of(config: Any) -> Family:
    """The family of a transformers config; ConfigError for one that was never tested."""
    family = FAMILIES.get(config.model_type)
    if family is None:
        raise ConfigError(
            f"model_type={config.model_type!r} cannot be cut into stages: tested are {', '.join(sorted(FAMILIES))}; "
            f"give the model as a list of modules instead (module_stages)"
        )
    if getattr(config, "output_router_logits", False):
        raise ConfigError(
            "output_router_logits=True: the load-balancing loss spans all stages and is not supported; set it to False"
        )
    return family


def sliced_config(config: Any, layers: range) -> Any:
    """A copy of the config for some of the layers only: every per-layer list is cut to match.

    55 model types index such a list by the layer's place in the model; without this the stage would use the
    attention pattern of other layers, without a word.
    """
    sliced = copy.deepcopy(config)
    total = config.num_hidden_layers
    for name, value in list(vars(config).items()):
        if isinstance(value, list | tuple) and len(value) == total and name not in _INDEX_LISTS:
            setattr(sliced, name, type(value)(value[i] for i in layers))
    sliced.num_hidden_layers = len(layers)
    return sliced
