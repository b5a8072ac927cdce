"""The optimizer of a run: one of torch's, in two groups, over float32 weights where the model has 16 bits."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

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
        options["fused"] = table.fused == "yes" or (table.fused == "auto" and on_gpu) or None
    kind = KINDS[table.name]
    if kept_dtype(config) == torch.bfloat16 and table.master_weights and config.lora is None:
        return MasterWeights(kind, groups, **options)
    return kind(groups, **options)


def _groups(table: OptimizerTable, engine: Engine) -> list[dict[str, Any]]:
    """What decays, and what does not: norms, biases, and whatever else has one dimension."""
    trained = [p for p in engine.parameters() if p.requires_grad]
    small = {id(p) for stage in engine.stages.values() for p in _norms_and_biases(stage)}
    matrices, others = [p for p in trained if id(p) not in small], [p for p in trained if id(p) in small]
    return [
        {"params": matrices, "weight_decay": table.weight_decay, **_settings(table)},
        {"params": others, "weight_decay": 0.0, **_settings(table)},
    ]


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
    for group, decay in zip(optimizer.param_groups, (table.weight_decay, 0.0), strict=True):
        group.update(_settings(table), weight_decay=decay)


def set_rate(optimizer: Any, rate: float) -> None:
    """The learning rate of the next step."""
    for group in optimizer.param_groups:
        if isinstance(group["lr"], Tensor):
            group["lr"].fill_(rate)
        else:
            group["lr"] = rate
