"""Sequence parallelism: outside attention and MLP each process of `tp` has a part of every sequence only.

Norms, residual sums and the messages between stages shrink by the number of processes. What such a part goes through,
like the weight of a norm, gets a share of its gradient on every process: these are summed once per step.
"""

from __future__ import annotations

from collections.abc import Sequence

from zeropipe.engine.mesh.spreading import Sharing, hooks
from zeropipe.engine.stages.hf import HFStage
from zeropipe.errors import ConfigError

_HIDDEN = (("args", 0), ("kwargs", "hidden_states"))  # where a layer may have its hidden states


def spread_sequence(
    stage: HFStage, merged: Sequence[str], spread: Sequence[str], rowwise: Sequence[str], sharing: Sharing
) -> list[str]:
    """Put hooks around the parts of a stage that need whole sequences; returns the parameters to be summed.

    `merged` names the parts whose column-wise layers share one input, `spread` all layers that are spread.
    """
    _check(stage)
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
    hook = hooks(sharing.peers)
    for region in regions:
        module = stage.get_submodule(region)
        if region in merged:
            module.register_forward_pre_hook(hook.enter_joined, with_kwargs=True)
        else:
            module.register_forward_pre_hook(hook.join, with_kwargs=True, prepend=True)
    for parent in merged:
        if parent not in regions:
            stage.get_submodule(parent).register_forward_pre_hook(hook.enter, with_kwargs=True)
    for name in rowwise:
        is_last = name.rpartition(".")[0] in merged and name.rpartition(".")[0] in regions
        stage.get_submodule(name).register_forward_hook(hook.leave_taken if is_last else hook.leave)
    for region in regions:
        if region not in merged:
            stage.get_submodule(region).register_forward_hook(hook.take_output, with_kwargs=True)
    _spread_ends(stage, spread, sharing)
    stage.sequence_shards = sharing.peers.number
    whole = [*regions, *_head(stage)]
    return [
        name
        for name, full in stage.full_names().items()
        if not _is_in(name, whole) and full not in stage.family.before and full not in sharing.dimensions
    ]


def _check(stage: HFStage) -> None:
    kind = stage.full_config.model_type
    if len(stage.family.carried) > 1 or stage.family.carried[0] not in _HIDDEN:
        raise ConfigError(
            f"model_type={kind!r} hands more than hidden states from layer to layer: leave sequence_parallel out"
        )


def _spread_ends(stage: HFStage, spread: Sequence[str], sharing: Sharing) -> None:
    """Each process takes its part before the first layer; the head, which comes after all, has whole sequences."""
    hook = hooks(sharing.peers)
    if stage.is_first and stage.blocks:
        stage.blocks[0].register_forward_pre_hook(hook.take_input, with_kwargs=True)
    elif stage.is_first:
        stage.register_forward_hook(hook.take)
    for head in _head(stage):
        module = stage.get_submodule(head)
        module.register_forward_pre_hook(hook.enter_joined if head in spread else hook.join, with_kwargs=True)


def _head(stage: HFStage) -> list[str]:
    if not stage.is_last:
        return []
    return ["score"] if stage.head == "score" else [stage.tied_names[1].rpartition(".")[0]]


def _is_in(name: str, modules: Sequence[str]) -> bool:
    return any(name == module or name.startswith(f"{module}.") for module in modules)
