"""What the local ranks run in test_checkpointing.py: steps of schedules that say which F are checkpointed."""

from __future__ import annotations

from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from engine_helpers import blocks
from offload_cases import token_batches
from stage_models import CONFIGS
from torch import nn
from torch._dynamo.utils import counters

from zeropipe.core.schedule import Schedule
from zeropipe.core.timeline import Timeline
from zeropipe.engine import CausalLMLoss, Engine, hf_stages, module_stages
from zeropipe.engine.blocks import compiling, recompute
from zeropipe.errors import ConfigError


def record(schedule: Schedule, family: str, options: dict[str, Any], layers: int = 4) -> Timeline:
    """The timeline of a step, with the bytes that each F keeps."""
    stages = hf_stages(CONFIGS[family](num_hidden_layers=layers), schedule, dist.get_rank(), dtype=torch.float64)
    with Engine(schedule, stages, record=True, **options) as engine:
        engine.train_step(token_batches(schedule.num_microbatches, 0, packed=False), CausalLMLoss())
        return engine.timeline()


def count_recomputed(schedule: Schedule, numbers: list[int]) -> list[int]:
    """The blocks of this rank that are computed again, in steps with these numbers of microbatches and an eval step."""
    stages = hf_stages(CONFIGS["llama"](num_hidden_layers=4), schedule, dist.get_rank(), dtype=torch.float64)
    counts: list[int] = []
    run = recompute.RecomputableForward._recompute

    def counting(self: Any, args: Any, kwargs: Any) -> Any:
        counts[-1] += 1
        return run(self, args, kwargs)

    with mock.patch.object(recompute.RecomputableForward, "_recompute", counting), Engine(schedule, stages) as engine:
        for number in numbers:
            counts.append(0)
            engine.train_step(token_batches(number, 0, packed=False), CausalLMLoss())
        counts.append(0)
        engine.eval_step(token_batches(2, 0, packed=False), CausalLMLoss())
    return counts


def compiled_steps(plain: Schedule, marked: Schedule) -> tuple[bool, int, int]:
    """Whether gradients are equal bit for bit, and the numbers of graphs, with a compiler that only runs graphs."""
    found, graphs = [], []
    with mock.patch.object(compiling, "inductor_backend", mock.Mock(return_value="aot_eager")):
        for schedule in (plain, marked):
            torch._dynamo.reset()
            stages = hf_stages(CONFIGS["llama"](num_hidden_layers=4), schedule, dist.get_rank(), dtype=torch.float64)
            with Engine(schedule, stages, compile=True) as engine:
                before = counters["stats"]["unique_graphs"]
                for step in range(2):
                    engine.train_step(token_batches(schedule.num_microbatches, step, packed=False), CausalLMLoss())
                graphs.append(counters["stats"]["unique_graphs"] - before)
                found.append([parameter.grad.clone() for parameter in engine.parameters()])
    return all(map(torch.equal, *found)), *graphs


class NoBlocks(nn.Module):
    """A stage that names no blocks."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(3, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear(x)


def refusals(plain: Schedule, marked: Schedule) -> dict[str, str]:
    """The errors of set-ups that are refused."""
    rank, found = dist.get_rank(), {}
    stages = module_stages(blocks(plain.num_stages), plain, rank)
    mine = marked if rank == 0 else plain
    for name, arguments, options in (
        ("ac", (marked, stages), {"ac": "full"}),
        ("blocks", (marked, {rank: NoBlocks()}), {}),
        ("others", (mine, stages), {}),
    ):
        with pytest.raises(ConfigError) as caught:
            Engine(*arguments, **options)
        found[name] = str(caught.value)
    return found
