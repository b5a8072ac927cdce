"""What TRL's losses take of a model, computed from the logits of the last stage."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from zeropipe.engine.mesh.vocab_parallel import token_losses
from zeropipe.integrations.trainer.losses import IGNORE

_CHUNK_ROWS = 1024  # of logits that are compared at once


def score_tokens(logits: Tensor, microbatch: Mapping[str, Any]) -> Tensor:
    """The log-probability of each token but the first, as `score` has it: a model is its own reference exactly."""
    return -token_losses(logits[:, :-1], microbatch["labels"][:, 1:], IGNORE)


def score(logits: Tensor, labels: Tensor) -> SimpleNamespace:
    """The fields of TRL's fused head: of each token but the first, 0 where the label is ignored."""
    logits, labels = logits[:, :-1], labels[:, 1:]
    mask = labels != IGNORE
    chunks = [_compare(rows) for rows in logits.detach()[mask].split(_CHUNK_ROWS)]
    entropy, log_sum_sq_probs, mean_logits, best = (_spread([chunk[n] for chunk in chunks], mask) for n in range(4))
    return SimpleNamespace(
        log_probs=-token_losses(logits, labels, IGNORE), entropy=entropy, log_sum_sq_probs=log_sum_sq_probs,
        mean_logits=mean_logits, is_top1=(best == labels) & mask, aux_loss=None,
    )  # fmt: skip


@torch.no_grad()
def _compare(rows: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The entropy of each row, log(sum(p^2)), the mean of its logits, and the index of the largest."""
    rows = rows.float()
    logs = rows.log_softmax(-1)
    return -(logs.exp() * logs).sum(-1), (2 * logs).logsumexp(-1), rows.mean(-1), rows.argmax(-1)


def _spread(chunks: Sequence[Tensor], mask: Tensor) -> Tensor:
    """The values of the tokens of a mask in its shape, 0 for the others."""
    values = torch.cat(list(chunks))
    return torch.zeros(mask.shape, dtype=values.dtype, device=mask.device).masked_scatter(mask, values)


class LossView:
    """A TRL trainer as its own loss sees it on the last stage: metrics of a microbatch, nothing of other processes."""

    def __init__(self, trainer: Any, **own: Any) -> None:
        device = trainer.args.device
        self._trainer = trainer
        self._metrics: dict[str, dict[str, list[float]]] = {"train": defaultdict(list), "eval": defaultdict(list)}
        self._total_train_tokens = 0
        self.accelerator = SimpleNamespace(
            device=device, gather=_same, gather_for_metrics=_same, autocast=trainer.accelerator.autocast
        )
        vars(self).update(own)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._trainer, name)

    @property
    def metrics(self) -> dict[str, float]:
        """What the loss appended, by name."""
        return {name: values[-1] for own in self._metrics.values() for name, values in own.items()}


def _same(value: Any) -> Any:
    return value
