"""What trl.SFTTrainer logs beside the loss: it is computed by the loss on the last stage."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch


def is_sft(trainer: Any) -> bool:
    """Whether a trainer is one of TRL's for supervised fine-tuning."""
    return any(kind.__module__ == "trl.trainer.sft_trainer" for kind in type(trainer).__mro__)


def add_metrics(trainer: Any, mode: str, metrics: Mapping[str, float], batches: Sequence[Mapping[str, Any]]) -> None:
    """Add the sums of a step to SFTTrainer's metrics, batch by batch as it averages them."""
    own = trainer._metrics[mode]
    for index in range(len(batches)):
        tokens = metrics.get(f"tokens.{index}", 0.0)
        for name, key in (("entropy", "entropy"), ("mean_token_accuracy", "correct")):
            own[name].append(metrics[f"{key}.{index}"] / tokens if tokens else 0.0)
    if mode == "train":
        local = sum(_count_tokens(batch) for batch in batches)
        everyone = trainer.accelerator.gather(torch.tensor(local, device=trainer.args.device))
        trainer._total_train_tokens += int(everyone.sum())
    own["num_tokens"] = [trainer._total_train_tokens]


def _count_tokens(batch: Mapping[str, Any]) -> int:
    return int(batch["attention_mask"].sum()) if "attention_mask" in batch else batch["input_ids"].shape[1]
