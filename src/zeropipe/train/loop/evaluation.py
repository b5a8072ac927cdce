"""The loss on held-out data."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch

from zeropipe.engine.engine import Engine
from zeropipe.engine.step.losses import CausalLMLoss


def evaluate(
    engine: Engine, batches: Iterable[Any], device: torch.device, loss_fn: CausalLMLoss, stops: Callable[[], bool]
) -> float | None:
    """The mean over all tokens; None if the run is to stop. All ranks call this alike."""
    total = count = 0.0
    for batch in batches:
        result = engine.eval_step(on(device, batch.microbatches), loss_fn)
        total, count = total + result.loss * result.count, count + result.count
        if stops():
            return None
    return total / (count or 1.0)


def on(device: torch.device, microbatches: Iterable[dict[str, torch.Tensor]]) -> list[dict[str, torch.Tensor]]:
    """Microbatches where the stages are."""
    if device.type == "cpu":
        return list(microbatches)
    return [{name: tensor.to(device, non_blocking=True) for name, tensor in one.items()} for one in microbatches]
