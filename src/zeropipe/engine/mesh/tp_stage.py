"""One stage sharded over `tp` by a plan, in the styles of transformers' plans.

Two sums per layer and direction remain to communicate: of the outputs of row-wise layers, and of the gradients of the
inputs of column-wise ones. With sequence parallelism each sum becomes an all-gather and a reduce-scatter, so between
attention and MLP a process has only a chunk of the tokens.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from torch import nn

from zeropipe.engine.mesh.sequence_parallel import shard_sequences
from zeropipe.engine.mesh.tp_adapters import shard_adapted_linear
from zeropipe.engine.mesh.tp_layers import (
    ParameterShards,
    create_copy_last_hook,
    create_hooks,
    shard_embedding,
    shard_experts,
    shard_linear,
)
from zeropipe.engine.mesh.vocab_parallel import create_logits_hook
from zeropipe.engine.stages.adapters import layer_of
from zeropipe.engine.stages.hf import HFStage
from zeropipe.errors import ConfigError

COLWISE = ("colwise", "colwise_gather_output")
ROWWISE = ("rowwise", "rowwise_split_input")
SUMMED = "replicated_with_grad_allreduce"
EXPERTS, EXPERT_WEIGHTS = "moe_tp_experts", ("packed_colwise", "packed_rowwise", "colwise", "rowwise")
LATENT = "mla_kv_a_proj"
REPLICATED = ("embedding_rowwise", "embedding_colwise", "replicate")  # gradients are equal on all processes
STYLES = (*COLWISE, *ROWWISE, SUMMED, EXPERTS, LATENT, *REPLICATED)

Styles = dict[str, tuple[str, str]]  # local name of a module -> its name in the full model, and its style


def shard_stage(stage: Any, plan: Mapping[str, str], shards: ParameterShards, sequence: bool) -> None:
    """Shard the layers of a stage, in place, and add the hooks that communicate."""
    styles, hooks = find_styles(stage, plan), create_hooks(shards.group)
    ends = _shard_vocabulary(stage, plan, shards, styles)
    head = ends[1:] if ends and stage.is_last and stage.head == "lm" else []
    colwise = {parent_name(name) for name, (_, style) in styles.items() if style == "colwise"} - {""}
    merged = [parent for parent in sorted(colwise) if _is_fully_sharded(stage, parent, styles)]
    summed: list[str] = []  # parameters with partial gradients
    for name, (full_name, style) in styles.items():
        summed += _shard_layer(stage, name, full_name, style, shards)
        if style in COLWISE and parent_name(name) not in merged:
            stage.get_submodule(name).register_forward_pre_hook(hooks.copy_input, with_kwargs=True)
    rowwise = [name for name, (_, style) in styles.items() if style in ROWWISE]
    if sequence:
        summed += shard_sequences(stage, merged, [*styles, *head], rowwise, shards)
    else:
        for parent in (*merged, *head):
            stage.get_submodule(parent).register_forward_pre_hook(hooks.copy_input, with_kwargs=True)
        for name in rowwise:
            stage.get_submodule(name).register_forward_hook(hooks.reduce_output)
    stage.summed_over_tp = tuple(dict.fromkeys(summed))


def _shard_layer(stage: Any, name: str, full_name: str, style: str, shards: ParameterShards) -> list[str]:
    """Shard one module; returns its parameters with partial gradients."""
    module, hooks = stage.get_submodule(name), create_hooks(shards.group)
    if style == SUMMED:
        return [f"{name}.{parameter}" for parameter, _ in module.named_parameters()]
    if style == EXPERTS:
        return [f"{name}.{parameter}" for parameter in shard_experts(full_name, module, shards)]
    if style == LATENT:
        size = stage.full_config.get_text_config().qk_rope_head_dim
        module.register_forward_hook(create_copy_last_hook(shards.group, size))
    elif style in COLWISE or style in ROWWISE:
        if style == "colwise_gather_output":
            module.register_forward_hook(hooks.gather_features)
        elif style == "rowwise_split_input":
            module.register_forward_pre_hook(hooks.scatter_features, with_kwargs=True)
        summed = shard_adapted_linear(full_name, module, 0 if style in COLWISE else 1, shards)
        return [f"{name}.{parameter}" for parameter in summed]
    return []


def find_styles(stage: Any, plan: Mapping[str, str]) -> Styles:
    """The modules of a stage that a plan shards."""
    found = {}
    for name, full_name in sorted(stage.full_names().items()):
        style, parameter_style = _find_style(layer_of(full_name), plan), _find_style(full_name, plan)
        if parameter_style is not None and style != EXPERTS:
            raise ConfigError(
                f"the plan shards {full_name} by {parameter_style!r}: only linear layers and experts can be sharded"
            )
        if style is not None and style not in REPLICATED:
            found[layer_of(name)] = (layer_of(full_name), style)
    return found


def _find_style(name: str, plan: Mapping[str, str]) -> str | None:
    return plan.get(re.sub(r"(^|\.)\d+(?=\.|$)", r"\1*", name), plan.get(name))


def parent_name(name: str) -> str:
    return name.rpartition(".")[0]


def _is_fully_sharded(stage: Any, parent: str, styles: Styles) -> bool:
    """Whether all of an attention or MLP is sharded, so that its column-wise layers share one sum of gradients.

    Otherwise some layer in it computes with all of the input, and its gradient of the input is complete already.
    """
    module = stage.get_submodule(parent)
    if any(module is block for block in getattr(stage, "blocks", ())) or module is getattr(stage, "lm", None):
        return False
    owners = {layer_of(f"{parent}.{name}") for name, _ in module.named_parameters()}
    return all(styles.get(owner, ("", ""))[1] in ("colwise", "rowwise", SUMMED) for owner in owners)


def _shard_vocabulary(stage: Any, plan: Mapping[str, str], shards: ParameterShards, styles: Styles) -> list[str]:
    """Shard embedding and head over the vocabulary, if the plan shards the head and tp divides both.

    Logits are not gathered then: losses take shards. Returns the names of embedding and head, if they are sharded.
    """
    if not isinstance(stage, HFStage):
        return []
    ends = [parent_name(name) for name in stage.tied_names]
    is_planned = bool(ends[1]) and _find_style(stage.full_name(ends[1]), plan) == "colwise_gather_output"
    styles.pop(ends[1], None)
    embedding, head = (stage.get_submodule(name) if name else None for name in ends)
    if not is_planned or not isinstance(embedding, nn.Embedding) or not isinstance(head, nn.Linear):
        return []
    if embedding.max_norm is not None or not all(shards.divides(end.weight.shape[0]) for end in (embedding, head)):
        return []
    if "weight" in embedding._parameters:
        shard_embedding(stage.full_name(ends[0]), embedding, shards)
    if "weight" in head._parameters and stage.head == "lm":
        shard_linear(stage.full_name(ends[1]), head, 0, shards)
        if shards.mesh is not None:
            stage.register_forward_hook(create_logits_hook(shards.mesh))
    return ends
