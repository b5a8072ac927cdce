"""Sequence parallelism: outside attention and MLP each process of `tp` has only a chunk of every sequence.

Norms, residual sums and the messages between stages shrink by the size of `tp`. Parameters that such a chunk passes,
like the weight of a norm, get a partial gradient on every process: these are summed once per step.
"""

from __future__ import annotations

from collections.abc import Sequence

from zeropipe.engine.mesh.tp_layers import ParameterShards, create_hooks
from zeropipe.engine.stages.hf import HFStage
from zeropipe.errors import ConfigError

_HIDDEN_STATES = (("args", 0), ("kwargs", "hidden_states"))  # the argument of a layer that may be its hidden states


def shard_sequences(
    stage: HFStage, merged: Sequence[str], sharded: Sequence[str], rowwise: Sequence[str], shards: ParameterShards
) -> list[str]:
    """Add hooks around the modules of a stage that need full sequences; returns the parameters to be summed.

    `merged`: modules whose column-wise layers share one input. `sharded`: all sharded layers.
    """
    _require_hidden_states(stage)
    names = {id(module): name for name, module in stage.named_modules()}
    regions = [
        name
        for block in stage.blocks
        for name, child in ((names[id(child)], child) for child in block.children())
        if any(parameter.dim() > 1 for parameter in child.parameters())  # all others are norms
    ]
    gathered = set(regions) - set(merged)
    for block in stage.blocks:
        block.gathers = any(names[id(child)] in gathered for child in block.children())
    hooks = create_hooks(shards.group)
    for region in regions:
        module = stage.get_submodule(region)
        if region in merged:
            module.register_forward_pre_hook(hooks.gather_copy_input, with_kwargs=True)
        else:
            module.register_forward_pre_hook(hooks.gather_input, with_kwargs=True, prepend=True)
    for parent in merged:
        if parent not in regions:
            stage.get_submodule(parent).register_forward_pre_hook(hooks.copy_input, with_kwargs=True)
    for name in rowwise:
        is_last = name.rpartition(".")[0] in merged and name.rpartition(".")[0] in regions
        hook = hooks.reduce_scatter_output if is_last else hooks.reduce_output
        stage.get_submodule(name).register_forward_hook(hook)
    for region in regions:
        if region in gathered:
            stage.get_submodule(region).register_forward_hook(hooks.scatter_tokens, with_kwargs=True)
    _add_hooks_of_ends(stage, sharded, shards)
    stage.sequence_shards = shards.group.size
    unsharded = [*regions, *_find_head(stage)]
    return [
        name
        for name, full in stage.full_names().items()
        if not _is_inside(name, unsharded) and full not in stage.family.before and full not in shards.dimensions
    ]


def _require_hidden_states(stage: HFStage) -> None:
    if len(stage.family.carried) > 1 or stage.family.carried[0] not in _HIDDEN_STATES:
        raise ConfigError(
            f"model_type={stage.full_config.model_type!r} passes more than hidden states from layer to layer; leave "
            "out sequence_parallel"
        )


def _add_hooks_of_ends(stage: HFStage, sharded: Sequence[str], shards: ParameterShards) -> None:
    """Scatter sequences before the first layer, and gather them before the head."""
    hooks = create_hooks(shards.group)
    if stage.is_first and stage.blocks:
        stage.blocks[0].register_forward_pre_hook(hooks.scatter_input, with_kwargs=True)
    elif stage.is_first:
        stage.register_forward_hook(hooks.scatter_output)
    for head in _find_head(stage):
        hook = hooks.gather_copy_input if head in sharded else hooks.gather_input
        stage.get_submodule(head).register_forward_pre_hook(hook, with_kwargs=True)


def _find_head(stage: HFStage) -> list[str]:
    if not stage.is_last:
        return []
    return ["score"] if stage.head == "score" else [stage.tied_names[1].rpartition(".")[0]]


def _is_inside(name: str, modules: Sequence[str]) -> bool:
    return any(name == module or name.startswith(f"{module}.") for module in modules)
