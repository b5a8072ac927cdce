"""The losses of Trainer and of trl.SFTTrainer: the mean over all tokens of a step."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers.modeling_outputs import CausalLMOutput

from zeropipe.engine.mesh.vocab_parallel import token_losses
from zeropipe.errors import ConfigError
from zeropipe.integrations.trainer.batches import BATCH

IGNORE = -100
_CHUNK_ROWS = 1024  # of logits whose entropy is computed at once


@dataclass(frozen=True)
class TokenLoss:
    """Next-token cross entropy, as (sum, number of tokens), or (sum, number, metrics).

    `function`: Trainer's `compute_loss_func`. `is_dft`: TRL's `loss_type="dft"`. `num_items`: the number of tokens of
    the whole step, for `function` and for a router loss, which is added `router_weight` times per microbatch.
    `has_metrics`: also the sums of what SFTTrainer logs, for each batch of the step.
    """

    function: Callable[..., Any] | None = None
    is_dft: bool = False
    has_metrics: bool = False
    num_items: float = 1.0
    router_weight: float = 1.0

    @property
    def takes_pieces(self) -> bool:
        """Whether logits may be sharded over the vocabulary."""
        return self.function is None and not self.has_metrics

    def count(self, microbatch: Mapping[str, Any]) -> int:
        """The number of tokens with a loss."""
        return int((_targets(microbatch) != IGNORE).sum())

    def __call__(self, output: Tensor | tuple[Tensor, Tensor], microbatch: Mapping[str, Any]) -> tuple[Any, ...]:
        logits, extra = output if isinstance(output, tuple) else (output, None)
        targets = _targets(microbatch)
        predicting = logits if "shift_labels" in microbatch else logits[..., :-1, :]
        if self.function is not None:
            value = self.function(
                CausalLMOutput(logits=logits), microbatch["labels"], num_items_in_batch=self.num_items
            )
            total = value * self.num_items
        else:
            losses = token_losses(predicting, targets, IGNORE)
            total = (losses * (-losses).exp().detach() if self.is_dft else losses).sum()
        if extra is not None:
            total = total + extra * (self.router_weight * self.num_items)
        count = (targets != IGNORE).sum()
        if not self.has_metrics:
            return total, count
        return total, count, dict(_metrics(predicting, targets, microbatch[BATCH]))


def _targets(microbatch: Mapping[str, Any]) -> Tensor:
    """The label that each token but the last predicts."""
    if "shift_labels" in microbatch:
        return microbatch["shift_labels"]
    if "labels" not in microbatch:
        raise ConfigError(f"a batch has {sorted(microbatch.keys() - {BATCH})}: must have labels")
    return microbatch["labels"][..., 1:]


@torch.no_grad()
def _metrics(logits: Tensor, targets: Tensor, batch: int) -> Iterator[tuple[str, Tensor]]:
    """The entropy, the number of tokens that are predicted correctly, and that of all tokens with a loss."""
    entropy = correct = torch.zeros((), device=logits.device)
    mask = (targets != IGNORE).reshape(-1)
    rows = zip(
        logits.reshape(-1, logits.shape[-1])[mask].split(_CHUNK_ROWS), targets.reshape(-1)[mask].split(_CHUNK_ROWS)
    )
    for chunk, labels in rows:
        logs = chunk.float().log_softmax(-1)
        entropy = entropy - (logs.exp() * logs).sum()
        correct = correct + (chunk.argmax(-1) == labels).sum()
    yield f"entropy.{batch}", entropy
    yield f"correct.{batch}", correct
    yield f"tokens.{batch}", mask.sum()
