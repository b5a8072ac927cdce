"""Batches of trl.DPOTrainer: pairs of rows, and the log-probabilities that a reference model gives them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from zeropipe.errors import ConfigError
from zeropipe.integrations.trainer.batches import BATCH
from zeropipe.integrations.trainer.losses import IGNORE

ROWS = ("input_ids", "attention_mask", "completion_mask")  # chosen rows, and below them the rejected ones
REFERENCES = ("ref_chosen_logps", "ref_rejected_logps")  # one number for each pair
COUNTS = ("chosen", "rejected", "tokens", "pairs")  # what metrics are means over
WEIGHT = "weight"  # key of a microbatch: what the mean of its pairs counts in the loss
# losses that compare the pairs of a whole batch
BATCH_LOSSES = ("aot", "aot_unpaired", "sft")


def divide_pairs(
    batch: Mapping[str, Any], parts: int, index: int = 0, *, pair_weight: float | None = None
) -> Iterator[dict[str, Any]]:
    """The microbatches of a batch: at most `parts`, each with some of its pairs.

    `pair_weight` of each pair: by default all pairs of the batch have the weight 1 together.
    """
    found = {name: value for name, value in batch.items() if value is not None}
    for name in found:
        if name not in (*ROWS, *REFERENCES):
            raise ConfigError(f"a batch has {name}, which stages do not take: must be {', '.join(ROWS)}")
    num_pairs = len(found["input_ids"]) // 2
    weight = 1 / num_pairs if pair_weight is None else pair_weight
    device = found["input_ids"].device
    for pairs in torch.arange(num_pairs, device=device).tensor_split(min(parts, num_pairs)):
        rows = torch.cat([pairs, pairs + num_pairs])
        microbatch = {name: value[pairs if name in REFERENCES else rows] for name, value in found.items()}
        labels = microbatch["input_ids"].masked_fill(microbatch["completion_mask"] == 0, IGNORE)
        yield microbatch | {"labels": labels, BATCH: index, WEIGHT: weight * len(pairs)}


def keep_pairs(batch: Mapping[str, Any], count: int) -> dict[str, Any]:
    """The first pairs of a batch."""
    num_pairs = len(batch["input_ids"]) // 2
    kept = torch.arange(count, device=batch["input_ids"].device)
    rows = torch.cat([kept, kept + num_pairs])
    return {name: value[kept if name in REFERENCES else rows] for name, value in batch.items()}


def inputs_of(microbatch: Mapping[str, Any]) -> dict[str, Any]:
    """A microbatch as TRL's loss takes a batch."""
    return {name: value for name, value in microbatch.items() if name in (*ROWS, *REFERENCES)}


@contextmanager
def without_adapters(modules: Mapping[int, nn.Module]) -> Iterator[None]:
    """Run stages without their LoRA adapters."""
    layers: list[Any] = [
        one for module in modules.values() for one in module.modules() if hasattr(one, "_disable_adapters")
    ]
    before = [layer._disable_adapters for layer in layers]
    for layer in layers:
        layer._disable_adapters = True  # enable_adapters() would also change which parameters are trained
    try:
        yield
    finally:
        for layer, was_disabled in zip(layers, before):
            layer._disable_adapters = was_disabled


def count_tokens(microbatch: Mapping[str, Tensor]) -> dict[str, int]:
    """What TRL's metrics of a microbatch are means of: tokens of completions, chosen and rejected, and pairs."""
    chosen, rejected = microbatch["completion_mask"][:, 1:].chunk(2)
    counts = {"chosen": int(chosen.sum()), "rejected": int(rejected.sum())}
    return {**counts, "tokens": sum(counts.values()), "pairs": len(chosen)}
