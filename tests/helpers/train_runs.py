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
    """The same training without any of ours but the data: the losses of its steps; the model is trained in place."""
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
    losses = []
    for step in range(steps):
        fallen = 0.5 * (1 - math.cos(math.pi * (step - warmup) / (steps - 1 - warmup)))
        part = (step + 1) / warmup if step < warmup else 1 - (1 - config.rate.final) * fallen
        for group in optimizer.param_groups:
            group["lr"] = table.lr * part
        microbatches = data.next().microbatches
        total = sum(int((one["labels"][..., 1:] != -100).sum()) for one in microbatches)
        value = 0.0
        for one in microbatches:
            logits = model(input_ids=one["input_ids"], attention_mask=one.get("attention_mask")).logits
            loss = torch.nn.functional.cross_entropy(
                logits[:, :-1].flatten(0, 1), one["labels"][:, 1:].flatten(), reduction="sum"
            )
            (loss / total).backward()
            value += float(loss.detach()) / total
        torch.nn.utils.clip_grad_norm_(trained, table.clip)
        if step not in left_out:
            optimizer.step()
        optimizer.zero_grad()
        losses.append(value)
    return losses


def difference(model: torch.nn.Module, other: torch.nn.Module) -> float:
    """The largest difference of a weight, over its largest entry."""
    mine, theirs = dict(model.named_parameters()), dict(other.named_parameters())
    assert mine.keys() == theirs.keys()
    return max(float((mine[n] - theirs[n]).detach().abs().max() / theirs[n].detach().abs().max()) for n in theirs)
