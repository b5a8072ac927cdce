"""What the local ranks run in test_compile_schedules."""

from __future__ import annotations

import copy
import os
import shutil
import warnings

import torch
import torch.distributed as dist
from engine_helpers import SquareLoss, error_of, plain_step
from stage_models import CONFIGS, lm_loss, microbatches
from torch import Tensor, nn
from torch._dynamo.utils import counters

from zeropipe.core.schedule import Schedule
from zeropipe.engine import Engine
from zeropipe.engine.stages.build import hf_model, hf_stages, module_stages


class TokenLoss:
    """Summed next-token loss and the number of tokens."""

    def count(self, microbatch: dict[str, Tensor]) -> int:
        return microbatch["labels"][:, 1:].numel()

    def __call__(self, logits: Tensor, microbatch: dict[str, Tensor]) -> tuple[Tensor, int]:
        return lm_loss(logits, microbatch), self.count(microbatch)


def worst_error(
    schedule: Schedule, family: str, modes: list[str], compile: bool, split: str, lengths: tuple[int, ...], cache: str
) -> dict[str, float]:
    """For each AC mode, the largest relative difference of a gradient on this rank from the plain model's."""
    os.environ["TORCHINDUCTOR_CACHE_DIR"] = cache
    # a block that falls back to running uncompiled has the right gradients too: it must not pass for compiled
    warnings.filterwarnings("error", message=".*cannot be compiled")
    model = hf_model(CONFIGS[family](), dtype=torch.float64, seed=1)
    batches, loss_fn = (
        microbatches(tuple(lengths[m % len(lengths)] for m in range(schedule.num_microbatches))),
        TokenLoss(),
    )
    total = sum(map(loss_fn.count, batches))
    for batch in batches:
        (lm_loss(model(batch["input_ids"], use_cache=False).logits, batch) / total).backward()
    wanted = {name: p.grad for name, p in model.named_parameters()}
    errors = {}
    for mode in modes:
        torch._dynamo.reset()
        stages = hf_stages(model, schedule, dist.get_rank())
        with Engine(schedule, stages, compile=compile, ac=mode, split=split) as engine:
            before = counters["stats"]["unique_graphs"]
            engine.train_step(batches, loss_fn)
            assert (counters["stats"]["unique_graphs"] > before) == compile
        errors[mode] = max(
            float((p.grad - wanted[stage.full_names()[name]]).norm() / wanted[stage.full_names()[name]].norm())
            for stage in stages.values()
            for name, p in stage.named_parameters()
        )
    return errors


class Toy(nn.Module):
    """A chain in which each output gradient's buffer is free when the next one is needed."""

    def __init__(self) -> None:
        super().__init__()
        self.linears = nn.ModuleList(nn.Linear(16, 16, bias=False) for _ in range(2))

    def forward(self, x):
        for linear in self.linears:
            x = x + 0.5 * linear(x.sin())
        return x


def worst_toy_error(schedule: Schedule, mode: str, cache: str) -> float:
    """As worst_error, for one Toy in each stage: a few kernels, of which inductor reuses buffers where it may."""
    os.environ["TORCHINDUCTOR_CACHE_DIR"] = cache
    warnings.filterwarnings("error", message=".*cannot be compiled")
    torch._dynamo.reset()
    torch.manual_seed(0)
    plain, loss_fn = nn.ModuleList(Toy() for _ in range(schedule.num_stages)).double(), SquareLoss()
    batches = [
        {key: torch.randn(8, 16).double() for key in ("inputs", "target")} for _ in range(schedule.num_microbatches)
    ]
    stages = module_stages(copy.deepcopy(plain), schedule, dist.get_rank())
    plain_step(nn.Sequential(*plain), batches, loss_fn)
    with Engine(schedule, stages, compile=True, ac=mode) as engine:
        before = counters["stats"]["unique_graphs"]
        engine.train_step(batches, loss_fn)
        number = counters["stats"]["unique_graphs"] - before
        assert number == 1 + (0 in stages)  # what the first stage is given has no gradient
    return max(
        error_of(own.grad, wanted.grad)
        for stage, module in stages.items()
        for own, wanted in zip(module.parameters(), plain[stage].parameters(), strict=True)
    )


def cold_and_warm(schedule: Schedule, family: str, mode: str, cache: str) -> dict[str, float]:
    """Compiled twice: with a compile cache that knows no graph (only compiled C++), and with what that left there."""
    results = {}
    for state in ("cold", "warm"):
        if state == "cold" and dist.get_rank() == 0:
            for kind in ("fxgraph", "aotautograd"):
                shutil.rmtree(f"{cache}/{kind}", ignore_errors=True)
        dist.barrier()
        counters.clear()
        results[state] = worst_error(schedule, family, [mode], True, "store", (9,), cache)[mode]
        results[f"{state} misses"] = counters["inductor"]["fxgraph_cache_miss"]
        hits = counters["inductor"]["fxgraph_cache_hit"] + counters["aot_autograd"]["autograd_cache_hit"]
        assert state == "cold" or hits > 0
        dist.barrier()
    return results
