"""Runs of `zeropipe train` for the tests: tiny files, local ranks, and the same training in plain torch."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import torch
from engine_helpers import ranks
from transformers import AutoConfig, AutoModelForCausalLM

from zeropipe.train.config.tables import RunConfig

VOCABULARY = 64
TINY = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 4, "num_attention_heads": 4, "head_dim": 8,
        "num_key_value_heads": 2, "vocab_size": VOCABULARY, "initializer_range": 0.2}  # fmt: skip

PRELOAD = ("transformers.models.qwen3.modeling_qwen3", "peft", "zeropipe.train.loop.trainer")


def pool(number: int) -> Any:
    """Local ranks that have the code of a run."""
    return ranks(number, PRELOAD)


def model_directory(path: Path, *, tied: bool = False, seed: int = 0, model_type: str = "qwen3", **fields: Any) -> Path:
    """A tiny Qwen3 as transformers saves it."""
    torch.manual_seed(seed)
    config = AutoConfig.for_model(model_type, **TINY | fields, tie_word_embeddings=tied)
    AutoModelForCausalLM.from_config(config, dtype=torch.float64).save_pretrained(path)
    return path


def run_config(output: Path, start: Path | str, /, **tables: dict[str, Any]) -> RunConfig:
    """A file with small numbers; `tables` change some of them."""
    given: dict[str, dict[str, Any]] = {
        "model": {"path": str(start), "dtype": "float64"},
        "data": {"kind": "synthetic", "sequence": 12, "batch": 4, "microbatch": 1, "packing": False},
        "engine": {"device": "cpu", "timeout": 60.0},
        "optimizer": {"lr": 1e-2, "eps": 1e-4},
        "rate": {"shape": "cosine", "warmup": 2},
        "train": {"output": str(output), "steps": 5, "record_every": 0},
    }
    for name, table in tables.items():
        given[name] = {**given.get(name, {}), **table}
    return RunConfig.model_validate(given)


def train_on(config: RunConfig, timeout: float = 240.0) -> Any:
    """The outcome of a run on local ranks, the same on all of them."""
    from zeropipe.train.loop.trainer import train

    outcomes = pool(config.mesh.num_processes).run(train, config, timeout=timeout)
    assert len({(one.losses, one.steps, one.tokens, one.checkpoint) for one in outcomes}) == 1
    return outcomes[0]


def metrics_of(output: Path) -> list[dict[str, Any]]:
    """The steps of metrics.jsonl."""
    lines = [json.loads(line) for line in (output / "metrics.jsonl").read_text().splitlines()]
    return [line for line in lines if "loss" in line]


def plain_training(config: RunConfig, model: torch.nn.Module, left_out: tuple[int, ...] = ()) -> list[float]:
    """The losses of `plain_steps`."""
    return [loss for loss, _ in plain_steps(config, model, left_out)]


def plain_steps(config: RunConfig, model: torch.nn.Module, left_out: tuple[int, ...] = ()) -> list[tuple[float, float]]:
    """The same training without any of ours but the data: loss and gradient norm of each step.

    The model is trained in place. Packed samples go through it one by one.
    """
    from zeropipe.train.data import open_data

    alone = config.model_copy(update={"mesh": type(config.mesh)()})
    data, table = open_data(alone, pipeline=0), config.optimizer
    trained = [p for p in model.parameters() if p.requires_grad]
    groups = [
        {"params": [p for p in trained if p.ndim > 1], "weight_decay": table.weight_decay},
        {"params": [p for p in trained if p.ndim < 2], "weight_decay": 0.0},
    ]
    optimizer = torch.optim.AdamW(groups, lr=table.lr, betas=table.betas, eps=table.eps)
    steps, warmup = config.train.steps, config.rate.warmup
    assert steps is not None
    found = []
    for step in range(steps):
        fallen = 0.5 * (1 - math.cos(math.pi * (step - warmup) / (steps - 1 - warmup)))
        part = (step + 1) / warmup if step < warmup else 1 - (1 - config.rate.final) * fallen
        for group in optimizer.param_groups:
            group["lr"] = table.lr * part
        parts = [part for one in data.next().microbatches for part in _samples_apart(one)]
        counts = [int((part["labels"][..., 1:] != -100).sum()) for part in parts]
        value = 0.0
        for part, count in zip(parts, counts):
            loss = _mean_loss(model, part) * (count / sum(counts))
            loss.backward()
            value += float(loss.detach())
        norm = float(torch.nn.utils.clip_grad_norm_(trained, table.clip))
        if step not in left_out:
            optimizer.step()
        optimizer.zero_grad()
        found.append((value, norm))
    return found


def _samples_apart(microbatch: dict[str, torch.Tensor]) -> list[dict[str, torch.Tensor]]:
    """A microbatch, or each of its packed samples that has a loss."""
    if "cu_seqlens" not in microbatch:
        return [microbatch]
    lengths = microbatch["cu_seqlens"].diff().tolist()
    ids, labels = (microbatch[name].view(1, -1).split(lengths, 1) for name in ("input_ids", "labels"))
    parts = [{"input_ids": one, "labels": other} for one, other in zip(ids, labels)]
    return [part for part in parts if (part["labels"][:, 1:] != -100).any()]


def _mean_loss(model: torch.nn.Module, part: dict[str, torch.Tensor]) -> torch.Tensor:
    """The mean over tokens of the model's own logits, with the loss of its routers if it has one."""
    output = model(input_ids=part["input_ids"], attention_mask=part.get("attention_mask"), use_cache=False)
    loss = torch.nn.functional.cross_entropy(output.logits[:, :-1].flatten(0, 1), part["labels"][:, 1:].flatten())
    routers = getattr(output, "aux_loss", None)
    return loss if routers is None else loss + model.router_aux_loss_coef * routers


def difference(model: torch.nn.Module, other: torch.nn.Module) -> float:
    """The largest difference of a weight, over its largest entry."""
    mine, theirs = dict(model.named_parameters()), dict(other.named_parameters())
    assert mine.keys() == theirs.keys()
    return max(float((mine[n] - theirs[n]).detach().abs().max() / theirs[n].detach().abs().max()) for n in theirs)
