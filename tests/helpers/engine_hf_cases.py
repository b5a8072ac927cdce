"""Hugging Face models through the engine, beside the same model in one piece."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from engine_helpers import error_of, hf_plain_step
from stage_models import CONFIGS

from zeropipe.core.schedule import Schedule
from zeropipe.engine import CausalLMLoss, Engine, hf_model, hf_stages

LAYER_TYPES = ("sliding_attention", "full_attention", "sliding_attention")


def token_batches(number: int, seed: int, vocabulary: int = 61) -> list[dict[str, Any]]:
    """Microbatches of different lengths, some tokens without a loss."""
    generator = torch.Generator().manual_seed(seed)
    batches = []
    for index in range(number):
        ids = torch.randint(vocabulary, (2, 5 + (3 * index + seed) % 7), generator=generator)
        labels = ids.clone()
        labels[:, : 1 + index % 4] = -100
        batches.append({"input_ids": ids, "labels": labels})
    return batches


def train_hf(schedule: Schedule, family: str, steps: int, options: dict[str, Any]) -> dict[str, float]:
    """Some SGD steps in float64: the largest differences of loss, gradients and weights."""
    number = max(4, schedule.num_stages)
    if family in ("qwen3-mixed", "gemma3"):
        options = options | {"layer_types": [LAYER_TYPES[index % 3] for index in range(number)]}
    return train_config(schedule, CONFIGS[family](num_hidden_layers=number, **options), steps)


def train_config(schedule: Schedule, config: Any, steps: int) -> dict[str, float]:
    """As train_hf."""
    model = hf_model(config, dtype=torch.float64)
    stages = hf_stages(config, schedule, dist.get_rank(), dtype=torch.float64)
    whole, loss_fn = dict(model.named_parameters(remove_duplicate=False)), CausalLMLoss()
    seen = {"loss": 0.0, "grad": 0.0, "weight": 0.0, "norm": 0.0}
    with Engine(schedule, stages) as engine:
        for step in range(steps):
            batches = token_batches(schedule.num_microbatches, seed=step)
            wanted = hf_plain_step(model, batches, loss_fn)
            result = engine.train_step(batches, loss_fn)
            norm = float(torch.nn.utils.get_total_norm([p.grad for p in model.parameters() if p.grad is not None]))
            seen["loss"] = max(seen["loss"], abs(result.loss - wanted) / wanted)
            seen["norm"] = max(seen["norm"], abs(engine.grad_norm() - norm) / norm)
            pairs = [
                (parameter, whole[stage.full_names()[name]])
                for stage in stages.values()
                for name, parameter in stage.named_parameters(remove_duplicate=False)
            ]
            for mine, theirs in pairs:
                if theirs.grad is not None and theirs.grad.abs().max() > 1e-12:
                    seen["grad"] = max(seen["grad"], error_of(mine.grad, theirs.grad))
            with torch.no_grad():
                for parameter in (*engine.parameters(), *model.parameters()):
                    if parameter.grad is not None:
                        parameter.sub_(parameter.grad, alpha=0.1)
                        parameter.grad = None
            for mine, theirs in pairs:
                seen["weight"] = max(seen["weight"], error_of(mine.detach(), theirs.detach()))
    return seen


def packed(schedule: Schedule) -> float:
    """Two sequences packed in one row, told apart by position ids, against the two apart."""
    config = CONFIGS["qwen3"](num_hidden_layers=max(4, schedule.num_stages))
    stages = hf_stages(config, schedule, dist.get_rank(), dtype=torch.float64)
    model = hf_model(config, dtype=torch.float64).eval()
    lengths = [(3, 6), (5, 4), (2, 2), (7, 1)]
    batches = []
    for index in range(schedule.num_microbatches):
        first, second = lengths[index % 4]
        ids = torch.randint(61, (1, first + second), generator=torch.Generator().manual_seed(index))
        positions = torch.cat([torch.arange(first), torch.arange(second)])[None]
        batches.append({"input_ids": ids, "position_ids": positions})
    with Engine(schedule, stages) as engine:
        outputs = engine.forward(batches, broadcast=True)
    worst = 0.0
    for index, (batch, output) in enumerate(zip(batches, outputs)):
        first = lengths[index % 4][0]
        parts = (batch["input_ids"][:, :first], batch["input_ids"][:, first:])
        with torch.no_grad():
            apart = torch.cat([model(input_ids=part, use_cache=False).logits for part in parts], 1)
        worst = max(worst, error_of(output, apart))
    return worst
