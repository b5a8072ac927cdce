"""pipelined(): a Trainer class that trains on a pipeline."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, TypeVar

import transformers

from zeropipe.core.schedule import Schedule
from zeropipe.errors import ConfigError, short
from zeropipe.integrations.trainer.arguments import check_class
from zeropipe.integrations.trainer.dpo import PipelinedDPOTrainer, is_dpo
from zeropipe.integrations.trainer.mixin import PipelinedTrainer
from zeropipe.integrations.trainer.settings import PipelineSettings

T = TypeVar("T")


def pipelined(
    trainer_class: type[T],
    *,
    schedule: str | Schedule = "1f1b",
    mesh: str | Mapping[str, int],
    microbatches: int | None = None,
    layers: Sequence[int] | None = None,
    **options: Any,
) -> type[T]:
    """A subclass of transformers' Trainer, TRL's SFTTrainer or DPOTrainer that trains on a pipeline, under torchrun.

        Trainer = pipelined(SFTTrainer, schedule="zbv", mesh={"pp": 2, "dp_shard": 2}, microbatches=8)
        trainer = Trainer(model=..., args=SFTConfig(...), train_dataset=...)
        trainer.train()

    `mesh`: sizes of the dimensions pp, dp_replicate, dp_shard, tp and ep; their product (without ep) is the number of
    processes. All processes of a pipeline get the same batches, each pipeline its own.
    `microbatches` of a step and pipeline: a multiple of `gradient_accumulation_steps`, which is the default; each batch
    of the data loader is divided by rows. `layers`: the number of layers of each stage. `options`: those of the
    Engine (`compile`, `ac`, `timeout` and others).
    """
    if not (isinstance(trainer_class, type) and issubclass(trainer_class, transformers.Trainer)):
        raise ConfigError(
            f"{short(trainer_class)}: must be transformers.Trainer, trl.SFTTrainer, trl.DPOTrainer or a subclass"
        )
    settings = PipelineSettings.create(schedule, mesh, microbatches, layers, options)
    base = PipelinedDPOTrainer if is_dpo(trainer_class) else PipelinedTrainer
    made = type(f"Pipelined{trainer_class.__name__}", (base, trainer_class), {"settings": settings})
    made.__module__ = __name__
    check_class(made)
    return made
