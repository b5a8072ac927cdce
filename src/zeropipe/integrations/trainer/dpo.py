"""trl.DPOTrainer on a pipeline: its own loss on the last stage, with a reference model that is a pipeline, too."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader

from zeropipe.engine.engine import Engine
from zeropipe.engine.step.losses import StepResult
from zeropipe.errors import ConfigError
from zeropipe.integrations.trainer.batches import BATCH
from zeropipe.integrations.trainer.mixin import Batch, PipelinedTrainer
from zeropipe.integrations.trainer.preferences import (
    BATCH_LOSSES,
    COUNTS,
    REFERENCES,
    WEIGHT,
    count_tokens,
    divide_pairs,
    inputs_of,
    keep_pairs,
    without_adapters,
)
from zeropipe.integrations.trainer.scores import LossView, score, score_tokens
from zeropipe.integrations.trainer.stages import drop_weights, is_adapted

# what the mean of a metric is taken over; all others are means over pairs
_MEAN_OVER = {
    "entropy": "tokens", "logits/chosen": "chosen", "logits/rejected": "rejected", "mean_token_accuracy": "chosen",
}  # fmt: skip


def is_dpo(trainer_class: type) -> bool:
    """Whether a class is TRL's DPOTrainer."""
    return any(kind.__module__ == "trl.trainer.dpo_trainer" for kind in trainer_class.__mro__)


@dataclass(frozen=True)
class PreferenceLoss:
    """DPOTrainer's own loss of a microbatch, as (sum, weight, sums of its metrics)."""

    trainer: Any

    def count(self, microbatch: Mapping[str, Any]) -> float:
        """The weight of the microbatch in the mean over pairs."""
        return float(microbatch[WEIGHT])

    def __call__(self, output: Tensor, microbatch: Mapping[str, Any]) -> tuple[Tensor, float, dict[str, float]]:
        view = LossView(self.trainer, precompute_ref_logps=True)
        scores = score(output, microbatch["labels"])
        value = type(self.trainer)._compute_loss(view, lambda **kwargs: scores, inputs_of(microbatch), False)
        weight, index = self.count(microbatch), microbatch[BATCH]
        counts = count_tokens(microbatch) if weight else {}
        sums: dict[str, float] = {f"{name}.{index}": count for name, count in counts.items()}
        for name, mean in view.metrics.items() if weight else ():
            sums[f"{name}.{index}"] = mean * counts[_MEAN_OVER.get(name, "pairs")]
        return value * weight, weight, sums


class PipelinedDPOTrainer(PipelinedTrainer):
    """Before DPOTrainer among the bases. The reference is a second pipeline, or the first without its adapter."""

    _reference: Engine | None = None

    def _check(self) -> None:
        super()._check()
        if self.compute_metrics is not None:
            raise ConfigError("compute_metrics: takes logits of an extra forward; read TRL's eval_rewards/* instead")
        if self.args.sync_ref_model:
            raise ConfigError("sync_ref_model=True: the reference is cut into stages; leave it out")
        if self.aux_loss_enabled:
            raise ConfigError("router_aux_loss_coef: DPO on a pipeline has no router loss; set it to 0.0")
        if "ref" in getattr(self.model, "peft_config", {}):
            raise ConfigError(
                "a PeftModel is its own reference in a second adapter, which stages do not have: pass "
                "model.merge_and_unload() and a peft_config"
            )
        mixed = [name for name in self.loss_types if name in BATCH_LOSSES]
        if mixed and self._num_parts > 1:
            raise ConfigError(
                f"loss_type={mixed[0]!r}: compares all pairs of a batch, which microbatches="
                f"{self._num_microbatches} divides; use gradient_accumulation_steps={self._num_microbatches}"
            )

    def _create_engine(self) -> None:
        super()._create_engine()
        if self.args.disable_dropout:
            for module in self._stages.modules():
                if isinstance(module, nn.Dropout):
                    module.p = 0.0
        if self.ref_model is not None:
            _, self._reference = self._cut(self.ref_model)
            drop_weights(self.ref_model)

    # steps

    def _divide(self, batch: Batch, parts: int, index: int = 0) -> list[dict[str, Any]]:
        return list(divide_pairs(batch, parts, index))

    def _create_loss(self, microbatches: Sequence[Batch], num_batches: int) -> Any:
        return PreferenceLoss(self)

    def _prepare_microbatches(self, microbatches: Sequence[Batch]) -> list[Batch]:
        """With the log-probabilities of the reference, unless the data set has them."""
        if all(name in microbatches[0] for name in REFERENCES):
            return list(microbatches)
        found = self._score_by_reference(microbatches)
        return [{**one, **dict(zip(REFERENCES, values))} for one, values in zip(microbatches, found)]

    def _score_by_reference(self, microbatches: Sequence[Batch]) -> list[tuple[Tensor, Tensor]]:
        """The log-probabilities of the chosen and of the rejected rows of each microbatch."""
        engine = self._reference or self.engine
        is_own = self._reference is None and is_adapted(self.model)
        with without_adapters(self.engine.stages) if is_own else nullcontext(), self._autocast():
            tokens = engine.forward(microbatches, post=score_tokens, broadcast=True)
        return [self._sum_tokens(one, logs) for one, logs in zip(microbatches, tokens)]

    def _sum_tokens(self, microbatch: Batch, log_probs: Tensor) -> tuple[Tensor, Tensor]:
        view = LossView(self, ref_model=self)  # any: its adapters are off already
        scores = SimpleNamespace(log_probs=log_probs)
        return super().compute_ref_log_probs.__func__(view, lambda **kwargs: scores, inputs_of(microbatch))  # type: ignore[misc]

    def _precompute_ref_logps(self, dataset: Any, name: str, batch_size: int) -> Any:
        """As DPOTrainer's, without its cache on the disk, which processes share for some data sets only."""
        if not hasattr(dataset, "__len__"):
            raise ConfigError("precompute_ref_log_probs=True: must have a Dataset, not one that is read as it is used")
        self._set_up()
        loader = self.accelerator.prepare(DataLoader(dataset, batch_size, collate_fn=self.data_collator))
        gather = self.accelerator.gather_for_metrics
        found = [gather(self.compute_ref_log_probs(self.model, batch)) for batch in loader]
        columns = zip(REFERENCES, map(torch.cat, zip(*found)))
        for column, values in columns:
            dataset = dataset.add_column(column, values.tolist())
        return dataset

    def compute_ref_log_probs(self, model: nn.Module, inputs: Batch) -> tuple[Tensor, Tensor]:
        """As DPOTrainer's, of a whole batch, on the pipeline."""
        found = self._score_by_reference(list(divide_pairs(inputs, self._num_microbatches)))
        chosen, rejected = (torch.cat(column) for column in zip(*found))
        return chosen, rejected

    def prediction_step(
        self, model: nn.Module, inputs: Batch, prediction_loss_only: bool, ignore_keys: list[str] | None = None
    ) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
        """The loss of a batch over all pipelines."""
        batch = self._prepare_inputs(inputs)
        left = self._count_left(len(batch["input_ids"]) // 2)
        kept = keep_pairs(batch, max(1, left))
        parts = list(divide_pairs(kept, self._num_parts, pair_weight=1.0 if left else 0.0))
        microbatches = self._prepare_microbatches(parts)
        with self._autocast():
            result = self.engine.eval_step(microbatches, self._create_loss(microbatches, 1))
        self._log_step("eval", result, [batch])
        return torch.tensor(result.loss, device=self.args.device), None, None

    def _log_step(self, mode: str, result: StepResult, batches: Sequence[Batch]) -> None:
        own, sums = self._metrics[mode], result.metrics
        names = dict.fromkeys(name.rpartition(".")[0] for name in sums)
        for index in range(len(batches)):
            for name in names:
                if name in COUNTS or name == "num_tokens":
                    continue
                count = sums.get(f"{_MEAN_OVER.get(name, 'pairs')}.{index}", 0.0)
                own[name].append(sums.get(f"{name}.{index}", 0.0) / count if count else 0.0)
        if mode == "train":
            local = sum(int(batch["attention_mask"].sum()) for batch in batches)
            self._total_train_tokens += int(self.accelerator.gather(torch.tensor(local, device=self.args.device)).sum())
        own["num_tokens"] = [self._total_train_tokens]

    def end(self) -> None:
        """As Trainer.end: the connections of both pipelines are closed."""
        if self._reference is not None:
            self._reference.close()
        super().end()
