"""What the local ranks run in test_checkpoint.py."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from engine_helpers import error_of
from mesh_cases import llama, mesh_of, whole

from zeropipe.core.schedule import Schedule
from zeropipe.engine import CausalLMLoss, Engine, hf_model, hf_stages, load_checkpoint, parallelize, save_checkpoint

BATCHES = 8  # of a step, whatever the layout


def data(step: int) -> list[dict[str, Any]]:
    generator = torch.Generator().manual_seed(step)
    lengths = [4 + index % 3 for index in range(BATCHES)]
    batches = [torch.randint(64, (1, length), generator=generator) for length in lengths]
    return [{"input_ids": tokens, "labels": tokens} for tokens in batches]


def adamw(parameters: Any) -> tuple[Any, Any]:
    """Two groups and a schedule, so that options of groups matter."""
    parameters = list(parameters)
    groups = [
        {"params": [p for p in parameters if p.ndim > 1], "weight_decay": 0.1},
        {"params": [p for p in parameters if p.ndim == 1], "weight_decay": 0.0},
    ]
    optimizer = torch.optim.AdamW(groups, lr=0.01, foreach=False)
    return optimizer, torch.optim.lr_scheduler.MultiStepLR(optimizer, [1, 3, 4], 0.5)


def oracle(model: dict[str, Any], steps: int, path: Path) -> None:
    """Weights of one process after each step."""
    plain, loss_fn = hf_model(llama(**model)), CausalLMLoss()
    optimizer, scheduler = adamw(plain.parameters())
    for step in range(steps):
        batches = data(step)
        total = sum(loss_fn.count(batch) for batch in batches)
        for batch in batches:
            (loss_fn(plain(batch["input_ids"]).logits, batch)[0] / total).backward()
        torch.nn.utils.clip_grad_norm_(plain.parameters(), 0.1)
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
        torch.save(dict(plain.named_parameters()), path / f"{step}.pt")


def build(schedule: Schedule, sizes: dict[str, int], model: dict[str, Any], seed: int = 0) -> tuple[Any, Any, Any]:
    """An engine on a mesh, and which microbatches are its own."""
    mesh = mesh_of(sizes)
    stages = hf_stages(llama(**model), schedule, mesh["pp"].get_local_rank() if "pp" in sizes else 0, seed=seed)
    parallelize(stages, mesh)
    pipelines = math.prod(size for name, size in sizes.items() if name.startswith("dp"))
    place = 0
    for name in ("dp_replicate", "dp_shard"):
        if name in sizes:
            place = place * sizes[name] + mesh[name].get_local_rank()
    return Engine(schedule, stages, mesh=mesh), stages, slice(place, None, pipelines)


def link(
    schedule: Schedule, sizes: dict[str, int], model: dict[str, Any], path: str, step: int, oracle: str,
    asynchronous: bool = False,
) -> float:  # fmt: skip
    """One layout of a chain: load what the layout before saved, do one step, save. The difference from the oracle."""
    engine, stages, own = build(schedule, sizes, model, seed=step)
    with engine:
        optimizer, scheduler = adamw(engine.parameters())
        if step:
            loaded = load_checkpoint(path, engine, optimizer)
            assert loaded.step == step
            scheduler.load_state_dict(loaded.extra["scheduler"])
        engine.train_step(data(step)[own], CausalLMLoss())
        engine.clip_grad_norm(0.1)
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
        extra = {"scheduler": scheduler.state_dict()}
        saving = save_checkpoint(path, engine, optimizer, step=step + 1, extra=extra, asynchronous=asynchronous)
        if asynchronous:  # what comes now is not in the checkpoint
            with torch.no_grad():
                for parameter in engine.parameters():
                    parameter.add_(1.0)
            saving.wait()
            with torch.no_grad():
                for parameter in engine.parameters():
                    parameter.sub_(1.0)
    wanted = torch.load(Path(oracle) / f"{step}.pt", weights_only=True)
    worst = 0.0
    for stage in stages.values():
        names = stage.full_names()
        for name, parameter in stage.named_parameters():
            if (other := wanted.get(names[name])) is None:  # tied
                other = wanted["model.embed_tokens.weight"]
            worst = max(worst, error_of(whole(parameter.detach()), other))
    return worst


def rank() -> int:
    return dist.get_rank()
