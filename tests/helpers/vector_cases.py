"""What the local ranks run in test_vectors.py."""

from __future__ import annotations

from typing import Any

import torch
from engine_helpers import SquareLoss
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from zeropipe.core.schedule import Schedule
from zeropipe.engine import Engine, main_gradients, module_stages

WIDTH = 7


class Additions(TorchDispatchMode):
    """Counts the operators that copy, cast or add; those of layers are others."""

    number = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = str(func).split(".")[1].removeprefix("_foreach").strip("_")
        self.number += name in ("add", "copy", "to_copy", "clone")
        return func(*args, **(kwargs or {}))


def step_operators(schedule: Schedule, layers: int) -> int:
    """The number of operators on gradients of norms in the second step of a rank."""
    torch.manual_seed(0)
    number = schedule.num_stages
    blocks = [nn.Sequential(*(nn.LayerNorm(WIDTH) for _ in range(layers))).bfloat16() for _ in range(number)]
    stages = module_stages(blocks, schedule, torch.distributed.get_rank())
    for stage in stages.values():
        main_gradients(stage, torch.float32)
    batches = [
        {"inputs": torch.randn(2, 3, WIDTH).bfloat16(), "target": torch.randn(2, 3, WIDTH).bfloat16()}
        for _ in range(schedule.num_microbatches)
    ]
    with Engine(schedule, stages) as engine:
        engine.train_step(batches, SquareLoss())
        for parameter in engine.parameters():
            parameter.grad = None
        with Additions() as additions:
            engine.train_step(batches, SquareLoss())
        assert all(parameter.grad.dtype == torch.float32 for parameter in engine.parameters())
    return additions.number
