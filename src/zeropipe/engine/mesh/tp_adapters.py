"""Linear layers with a LoRA adapter sharded over `tp`.

Of the two matrices of an adapter one is sharded as the layer is: B with the outputs of a column-wise layer, A with the
inputs of a row-wise one. All processes have the other, with partial gradients, which are summed once per step. So F and
I communicate as without an adapter.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torch import nn

from zeropipe.engine.backward.linear import defer
from zeropipe.engine.mesh.tp_layers import ParameterShards, shard_linear
from zeropipe.engine.stages.adapters import is_adapter_layer
from zeropipe.errors import ConfigError


def shard_adapted_linear(name: str, module: Any, dimension: int, shards: ParameterShards) -> list[str]:
    """Shard a linear layer, with its adapter if it has one; returns the names of parameters with partial gradients."""
    if not is_adapter_layer(module):
        return shard_linear(name, module, dimension, shards)
    if hasattr(module, "modules_to_save"):
        return [
            f"{part}.{parameter}"
            for part, layer in [("original_module", module.original_module), *_copies(module)]
            for parameter in shard_linear(f"{name}.{part}", layer, dimension, shards)
        ]
    _require_plain(name, module)
    summed = [f"base_layer.{p}" for p in shard_linear(f"{name}.base_layer", module.base_layer, dimension, shards)]
    for key in module.lora_A:
        a, b = f"lora_A.{key}", f"lora_B.{key}"
        if dimension == 0:
            shard_linear(f"{name}.{b}", module.lora_B[key], 0, shards)
            summed.append(f"{a}.weight")
        else:
            shard_linear(f"{name}.{a}", module.lora_A[key], 1, shards)
            summed += [f"{b}.{parameter}" for parameter in _add_bias_once(module.lora_B[key], shards)]
    return summed


def _copies(module: Any) -> Iterator[tuple[str, nn.Module]]:
    """The trained copies of a module of `modules_to_save`."""
    return ((f"modules_to_save.{key}", copy) for key, copy in module.modules_to_save.items())


def _add_bias_once(layer: Any, shards: ParameterShards) -> list[str]:
    """Let one process add the bias of a layer whose outputs are summed; returns the names of all parameters."""
    defer(layer)
    layer.adds_bias = shards.group.rank == 0
    return [name for name, _ in layer.named_parameters()]


def _require_plain(name: str, module: Any) -> None:
    """ConfigError for an adapter layer that is not a linear layer beside two others."""
    if getattr(module, "lora_variant", None) or not getattr(module, "lora_A", None):
        raise ConfigError(
            f"the adapter on {name} is more than a product of two matrices (DoRA, for example), which cannot be "
            "sharded over tp; use dp_shard, or another adapter"
        )
