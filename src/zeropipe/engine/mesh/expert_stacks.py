"""The stacks of experts of a stage, and their division over `ep`: each process keeps some experts of every stack."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import nn

from zeropipe.engine.backward.experts import defer_experts, divide_experts, is_routed_stack
from zeropipe.engine.mesh.tp_layers import ParameterShards, require_divisor


def find_stacks(stage: nn.Module) -> dict[str, Any]:
    """The stacks of experts that can be divided, by name; they are deferred from then on."""
    defer_experts(stage)
    return {name: module for name, module in stage.named_modules() if is_routed_stack(module)}


def divide_stacks(stacks: Mapping[str, Any], shards: ParameterShards) -> None:
    """Keep this process's experts of every stack, and let it exchange rows with the other processes."""
    for name, stack in stacks.items():
        require_divisor(name, stack, shards, "ep")
        divide_experts(stack, shards.group)
        for weight, _ in list(stack.named_parameters(recurse=False)):
            shards.shard(stack, weight, name, 0)
