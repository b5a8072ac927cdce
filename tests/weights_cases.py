"""What the local ranks run in test_weights.py and test_save.py, and how their stages are looked at."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from engine_helpers import SquareLoss, blocks, error_of, microbatches, plain_step
from torch import Tensor, nn

from zeropipe.core.schedule import Schedule
from zeropipe.engine import Engine, hf_stages, module_stages


def all_stages(source: Any, schedule: Schedule, **options: Any) -> list[nn.Module]:
    """The stages of all ranks, in order."""
    found: dict[int, nn.Module] = {}
    for rank in range(schedule.num_ranks):
        found |= hf_stages(source, schedule, rank, **options)
    return [found[stage] for stage in range(schedule.num_stages)]


def run(stages: list[nn.Module], batch: dict[str, Tensor]) -> Tensor:
    """The stages one after the other."""
    inputs: tuple[Tensor, ...] = ()
    for stage in stages:
        inputs = (stage(*inputs, **stage.pick(batch)),)
    return inputs[0]


def train_with_empty_stages(schedule: Schedule, layers: list[int]) -> float:
    """The largest difference from the plain model's gradients, where some stages have no modules."""
    plain, loss_fn = nn.Sequential(*blocks(sum(layers))), SquareLoss()
    batches = microbatches(schedule.num_microbatches)
    plain_step(plain, batches, loss_fn)
    stages = module_stages(blocks(sum(layers)), schedule, dist.get_rank(), layers=layers)
    wanted = {name: parameter.grad for name, parameter in plain.named_parameters()}
    with Engine(schedule, stages) as engine:
        engine.train_step(batches, loss_fn)
        return max(
            (
                error_of(parameter.grad, wanted[stage.full_name(name)])
                for stage in stages.values()
                for name, parameter in stage.named_parameters()
            ),
            default=0.0,
        )


def seeded(model: nn.Module, seed: int = 0) -> nn.Module:
    """Every parameter and stored buffer random: nothing is 0 or 1 by accident."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, tensor in model.state_dict(keep_vars=True).items():
            if tensor.is_floating_point():
                scale = 0.05 if "bias" in name else 0.2
                tensor.copy_(torch.randn(tensor.shape, generator=generator) * scale + ("norm" in name))
    return model
