"""What the local ranks run in test_families_checkpoint.py."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist

from zeropipe.core.schedule import Schedule
from zeropipe.engine import Engine, hf_model, hf_stages, load_checkpoint, save_checkpoint
from zeropipe.engine.stages.skeleton import computed_buffers


def drawn(config: Any) -> Any:
    """A model whose parameters and stored buffers are all other than those it starts with, the same on every rank."""
    model = hf_model(config, seed=1)
    generator = torch.Generator().manual_seed(2)
    with torch.no_grad():
        for tensor in model.state_dict(keep_vars=True).values():
            if tensor.is_floating_point():
                tensor.copy_(torch.randn(tensor.shape, generator=generator))
    return model


def save_and_load(config: Any, path: str, cuts: tuple[tuple[Schedule, list[int]], ...]) -> list[str]:
    """Save on the first cut and load on the second, begun with other weights: what is not as it was, on this rank."""
    model = drawn(config)
    (schedule, layers), (other, layers_there) = cuts
    with Engine(schedule, hf_stages(model, schedule, dist.get_rank(), layers=layers)) as engine:
        save_checkpoint(path, engine)
    stages = hf_stages(config, other, dist.get_rank(), layers=layers_there, seed=3)
    with Engine(other, stages) as engine:
        load_checkpoint(path, engine)
    wanted = dict(model.named_parameters(remove_duplicate=False)) | dict(model.named_buffers(remove_duplicate=False))
    wrong = []
    for stage in stages.values():
        found = dict(stage.named_parameters(remove_duplicate=False)) | dict(stage.named_buffers(remove_duplicate=False))
        for name in found.keys() - computed_buffers(stage):
            if not torch.equal(found[name], wanted[stage.full_name(name)]):
                wrong.append(name)
    return wrong
