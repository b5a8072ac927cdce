"""The optimizer of a run: one of torch's, over float32 weights where the model has 16 bits."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from zeropipe.engine.engine import Engine
from zeropipe.engine.masters import MasterWeights
from zeropipe.errors import ConfigError
from zeropipe.train.config.rules import check_adafactor
from zeropipe.train.config.tables import OptimizerTable, RunConfig
from zeropipe.train.loop.setup import kept_dtype

KINDS: dict[str, type[torch.optim.Optimizer]] = {
    "adamw": torch.optim.AdamW, "adam": torch.optim.Adam, "sgd": torch.optim.SGD, "adafactor": torch.optim.Adafactor,
}  # fmt: skip


def make_optimizer(config: RunConfig, engine: Engine, device: torch.device) -> Any:
    """A torch optimizer or MasterWeights; a rank that trains nothing has one of no parameters."""
    table = config.optimizer
    for error in check_adafactor(config):
        raise ConfigError(error)
    groups = _groups(table, engine)
    options: dict[str, Any] = {"lr": table.lr}
    if table.name != "adafactor":
        on_gpu = device.type == "cuda" and not config.engine.offload
        can = table.name != "sgd" or not any(isinstance(p, DTensor) for group in groups for p in group["params"])
        if table.fused == "yes" and not can:
            raise ConfigError("optimizer.fused='yes': torch's fused sgd takes no sharded parameters; use auto")
        options["fused"] = table.fused == "yes" or (table.fused == "auto" and on_gpu and can) or None
    kind = KINDS[table.name]
    if kept_dtype(config) == torch.bfloat16 and table.master_weights and config.lora is None:
        return MasterWeights(kind, groups, **options)
    return kind(groups, **options)


def _groups(table: OptimizerTable, engine: Engine) -> list[dict[str, Any]]:
    """First what decays, then what does not: norms, biases, and whatever else has one dimension.

    Both halves have a group for each mesh that parameters are spread over, and one for those that are whole: torch's
    fused kernels take no mixtures.
    """
    trained = [p for p in engine.parameters() if p.requires_grad]
    small = {id(p) for stage in engine.stages.values() for p in _norms_and_biases(stage)}
    meshes = list(dict.fromkeys(map(_mesh, trained))) or [None]
    return [
        {
            "params": [p for p in trained if _mesh(p) == mesh and (id(p) in small) == is_small],
            "weight_decay": 0.0 if is_small else table.weight_decay,
            **_settings(table),
        }
        for is_small in (False, True)
        for mesh in meshes
    ]


def _mesh(parameter: Tensor) -> DeviceMesh | None:
    return parameter.device_mesh if isinstance(parameter, DTensor) else None


def _norms_and_biases(stage: nn.Module) -> Iterator[nn.Parameter]:
    """Also those with a row for each expert (gpt_oss) or for each head (cohere)."""
    for module in stage.modules():
        is_norm = "norm" in type(module).__name__.lower()
        for name, parameter in module.named_parameters(recurse=False):
            if parameter.ndim < 2 or is_norm or name.endswith("bias"):
                yield parameter


def _settings(table: OptimizerTable) -> dict[str, Any]:
    if table.name in ("adamw", "adam"):
        return {"betas": tuple(table.betas), "eps": table.eps}
    return {"momentum": table.momentum} if table.name == "sgd" else {}


def set_groups(optimizer: Any, table: OptimizerTable) -> None:
    """The file's settings again, after a checkpoint has brought those that it was saved with."""
    groups = optimizer.param_groups
    for number, group in enumerate(groups):
        group.update(_settings(table), weight_decay=table.weight_decay if number < len(groups) // 2 else 0.0)


def set_rate(optimizer: Any, rate: float) -> None:
    """The learning rate of the next step."""
    for group in optimizer.param_groups:
        if isinstance(group["lr"], Tensor):
            group["lr"].fill_(rate)
        else:
            group["lr"] = rate
