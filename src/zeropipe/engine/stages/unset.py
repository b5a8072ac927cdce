"""Tensors that a family's initialisation leaves out: they have what the constructors of its modules give them.

Stages are built without memory, so those constructors have written nothing. They are run in a narrow copy of the model.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable

import torch
from torch import Tensor, nn

from zeropipe.engine.stages.families import entry_of
from zeropipe.engine.stages.hf import HFStage
from zeropipe.engine.stages.seeds import seeded
from zeropipe.engine.stages.small import small_config
from zeropipe.engine.stages.whole import tensors_of
from zeropipe.engine.transformers_private import build
from zeropipe.errors import ConfigError


def unset(tensors: Iterable[Tensor]) -> None:
    """Mark tensors that have no values yet."""
    for tensor in tensors:
        if tensor.is_floating_point():
            tensor.data.fill_(float("nan"))


def complete(stage: HFStage, names: Iterable[str], seed: int) -> None:
    """Give values to those of a stage's tensors that are still without."""
    tensors = tensors_of(stage)
    empty = [name for name in names if tensors[name].is_floating_point() and tensors[name].isnan().any()]
    if not empty:
        return
    made = tensors_of(_narrow(stage))
    for name in empty:
        full = stage.full_name(name)
        if full not in made:
            raise ConfigError(f"transformers gives no first value to {full}: load the model from a checkpoint")
        _follow(tensors[name], made[full], full, seed)


def _narrow(stage: HFStage) -> nn.Module:
    config, total = stage.whole_config, stage.family.num_layers
    with seeded(0), torch.device("cpu"):
        return build(small_config(config, range(total), total, entry_of(config).small), torch.float32, kernels=False)


def _follow(tensor: Tensor, value: Tensor, name: str, seed: int) -> None:
    """The same value, or random numbers like those of a narrower one."""
    with torch.no_grad():
        if tensor.shape == value.shape and not value.requires_grad:
            tensor.copy_(value)
        elif value.requires_grad:
            digest = hashlib.sha256(f"{seed} {name}".encode()).digest()
            generator = torch.Generator().manual_seed(int.from_bytes(digest[:7], "little"))
            spread = float(value.std()) if value.numel() > 1 else 0.0
            tensor.copy_(torch.randn(tensor.shape, generator=generator) * spread + float(value.mean()))
        else:
            raise ConfigError(f"transformers does not compute {name} when a model is loaded: give the model in memory")
