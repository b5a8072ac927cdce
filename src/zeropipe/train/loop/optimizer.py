"""The optimizer of a run, over float32 master weights if the model has 16 bits, and its learning-rate schedule."""

from __future__ import annotations

from collections.abc import Iterator
from math import ceil, cos, pi
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from zeropipe.engine.engine import Engine
from zeropipe.engine.masters import MasterWeights
from zeropipe.errors import ConfigError
from zeropipe.train.config.rules import check_adafactor
from zeropipe.train.config.tables import OptimizerTable, RateTable, RunConfig
from zeropipe.train.loop.setup import stored_dtype

OPTIMIZERS: dict[str, type[torch.optim.Optimizer]] = {
    "adamw": torch.optim.AdamW, "adam": torch.optim.Adam, "sgd": torch.optim.SGD, "adafactor": torch.optim.Adafactor,
}  # fmt: skip


def make_optimizer(config: RunConfig, engine: Engine, device: torch.device) -> Any:
    """A torch optimizer or MasterWeights. A rank without trained weights has one without parameters."""
    table = config.optimizer
    for error in check_adafactor(config):
        raise ConfigError(error)
    groups = _make_groups(table, engine)
    options: dict[str, Any] = {"lr": table.lr}
    if table.name != "adafactor":
        on_gpu = device.type == "cuda" and not config.engine.offload
        has_shards = any(isinstance(p, DTensor) for group in groups for p in group["params"])
        can_fuse = table.name != "sgd" or not has_shards
        if table.fused == "yes" and not can_fuse:
            raise ConfigError("optimizer.fused='yes': torch's fused sgd takes no sharded parameters; use auto")
        options["fused"] = table.fused == "yes" or (table.fused == "auto" and on_gpu and can_fuse) or None
    optimizer = OPTIMIZERS[table.name]
    if stored_dtype(config) == torch.bfloat16 and table.master_weights and config.lora is None:
        return MasterWeights(optimizer, groups, low_bits=True, **options)
    return optimizer(groups, **options)


def _make_groups(table: OptimizerTable, engine: Engine) -> list[dict[str, Any]]:
    """Parameter groups: first those with weight decay, then those without it (norms and biases).

    Either half has a group for each mesh that parameters are sharded over, and one for unsharded parameters, because
    torch's fused kernels take no mixture of them.
    """
    trained = [p for p in engine.parameters() if p.requires_grad]
    undecayed = {id(p) for stage in engine.stages.values() for p in find_norms_and_biases(stage)}
    meshes = list(dict.fromkeys(map(_mesh_of, trained))) or [None]
    return [
        {
            "params": [p for p in trained if _mesh_of(p) == mesh and (id(p) in undecayed) == is_undecayed],
            "weight_decay": 0.0 if is_undecayed else table.weight_decay,
            **_group_options(table),
        }
        for is_undecayed in (False, True)
        for mesh in meshes
    ]


def _mesh_of(parameter: Tensor) -> DeviceMesh | None:
    return parameter.device_mesh if isinstance(parameter, DTensor) else None


def find_norms_and_biases(stage: nn.Module) -> Iterator[nn.Parameter]:
    """Parameters of norms, biases, and all others of one dimension.

    Norms and biases may have two, with a row for each expert (gpt_oss) or for each head (cohere).
    """
    for module in stage.modules():
        is_norm = "norm" in type(module).__name__.lower()
        for name, parameter in module.named_parameters(recurse=False):
            if parameter.ndim < 2 or is_norm or name.endswith("bias"):
                yield parameter


def _group_options(table: OptimizerTable) -> dict[str, Any]:
    if table.name in ("adamw", "adam"):
        return {"betas": tuple(table.betas), "eps": table.eps}
    return {"momentum": table.momentum} if table.name == "sgd" else {}


def reset_groups(optimizer: Any, table: OptimizerTable) -> None:
    """Restore the file's settings, after a checkpoint has loaded those that it was saved with."""
    groups = optimizer.param_groups
    for number, group in enumerate(groups):
        group.update(_group_options(table), weight_decay=table.weight_decay if number < len(groups) // 2 else 0.0)


def set_rate(optimizer: Any, rate: float) -> None:
    """Set the learning rate of the next step."""
    for group in optimizer.param_groups:
        if isinstance(group["lr"], Tensor):
            group["lr"].fill_(rate)
        else:
            group["lr"] = rate


def rate_factor(table: RateTable, step: int, num_steps: int) -> float:
    """The learning rate of step `step` (from 0) of `num_steps`, as a fraction of the peak; `final` in the last step.

    >>> [round(rate_factor(RateTable(shape="linear", warmup=2, final=0.0), step, 5), 2) for step in range(5)]
    [0.5, 1.0, 1.0, 0.5, 0.0]
    """
    if step < table.warmup:
        return (step + 1) / table.warmup
    if table.shape == "constant":
        return 1.0
    start = table.warmup  # of the decay
    if table.shape == "wsd":
        start = max(start, num_steps - ceil(table.decay * num_steps))
    if step < start:
        return 1.0
    progress = min(1.0, (step - start) / max(1, num_steps - 1 - start))
    decayed = (1 - cos(pi * progress)) / 2 if table.shape == "cosine" else progress
    return 1.0 - (1.0 - table.final) * decayed
