"""The methods of Trainer that run on the Engine. All else stays Trainer's."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

import torch
import torch.distributed as dist
from accelerate.utils import broadcast_object_list
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

from zeropipe.engine.checkpoint.load import load_checkpoint
from zeropipe.engine.checkpoint.save import save_checkpoint
from zeropipe.engine.engine import Engine
from zeropipe.engine.mesh.parallelize import parallelize
from zeropipe.engine.stages.build import hf_stages
from zeropipe.engine.stages.hf import HFStage
from zeropipe.engine.step.losses import StepResult
from zeropipe.errors import ConfigError
from zeropipe.integrations.trainer.accelerator import PipelineAccelerator
from zeropipe.integrations.trainer.arguments import (
    check_arguments,
    check_class,
    check_trainer,
    count_microbatches,
    engine_options,
)
from zeropipe.integrations.trainer.batches import divide
from zeropipe.integrations.trainer.checkpoints import FOLDER, SCHEDULER, find_newest, shards_of
from zeropipe.integrations.trainer.losses import IGNORE, TokenLoss
from zeropipe.integrations.trainer.settings import PipelineSettings
from zeropipe.integrations.trainer.sft import add_metrics, is_sft
from zeropipe.integrations.trainer.stages import StageGroup, drop_weights, is_adapted, require_whole

if TYPE_CHECKING:
    from transformers import Trainer as Base  # the class that follows it among the bases
else:
    Base = object
Batch = Mapping[str, Any]


class PipelinedTrainer(Base):
    """Before a Trainer class among the bases of a class that `pipelined` makes.

    `engine` is the Engine of this process. `model` keeps its class and config for callbacks, without weights: those
    are in the stages, and `save_model` writes them.
    """

    settings: ClassVar[PipelineSettings]
    engine: Engine
    accelerator: Any

    # set-up

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        check_class(type(self))
        self._collected: list[Batch] = []
        self._is_cut = False
        super().__init__(*args, **kwargs)
        self._set_up()

    def _set_up(self) -> None:
        """Cut the model, once: classes that run it while they are made call this before."""
        if not self._is_cut:
            self._num_microbatches = count_microbatches(self.args, self.settings)
            self._check()
            self._create_engine()
            self._is_cut = True

    def _check(self) -> None:
        check_trainer(self)

    def create_accelerator_and_postprocess(self) -> None:
        check_arguments(self.args, self.settings)
        super().create_accelerator_and_postprocess()
        if not dist.is_initialized():
            raise ConfigError("torch.distributed is not running: start with torchrun")
        sizes = self.settings.dimensions
        self._mesh = init_device_mesh(self.args.device.type, tuple(sizes.values()), mesh_dim_names=tuple(sizes))
        self.accelerator = PipelineAccelerator.adopt(self.accelerator, self._mesh)
        self.gather_function = self.accelerator.gather_for_metrics

    def _create_engine(self) -> None:
        stages, self.engine = self._cut(self.model)
        self._stages = StageGroup(stages, self.model)
        drop_weights(self.model)

    def _cut(self, model: nn.Module) -> tuple[dict[int, HFStage], Engine]:
        """This rank's stages of a model, and their Engine."""
        settings, args = self.settings, self.args
        schedule = settings.build_schedule(self._num_microbatches)
        rank = self._mesh["pp"].get_local_rank()
        stages = hf_stages(model, schedule, rank, layers=settings.layers, device=args.device)
        require_whole(model, stages)
        parallelize(stages, self._mesh, ep=settings.ep)
        options = engine_options(args, settings)
        return stages, Engine(schedule, stages, mesh=self._mesh, device=args.device, **options)

    @property
    def _num_parts(self) -> int:
        """The number of microbatches of a batch of the data loader."""
        return self._num_microbatches // self.args.gradient_accumulation_steps

    def _move_model_to_device(self, model: nn.Module, device: torch.device) -> None:
        """Stages are on the device; the full model stays where it is."""

    def _wrap_model(self, model: nn.Module, training: bool = True, dataloader: Any = None) -> nn.Module:
        return self._stages

    def create_optimizer(self, model: Any = None) -> torch.optim.Optimizer:
        return super().create_optimizer(self._stages)

    def get_decay_parameter_names(self, model: nn.Module) -> list[str]:
        return super().get_decay_parameter_names(self.model)

    def get_tp_size(self) -> int:
        """The number of processes with the same rows."""
        return self.args.world_size // self.accelerator.num_processes

    def call_model_init(self, trial: Any = None) -> nn.Module:
        raise ConfigError("model_init: a pipeline is cut from one model; pass model=")

    # steps

    def _get_num_items_in_batch(self, batch_samples: Sequence[Batch], device: torch.device) -> Tensor | None:
        """None: the Engine counts tokens itself."""
        return None

    def training_step(self, model: nn.Module, inputs: Batch, num_items_in_batch: Any = None) -> Tensor:
        """Collect a batch; the last one of a step runs all of them on the pipeline."""
        self._collected.append(self._prepare_inputs(inputs))
        if not self.accelerator.sync_gradients:
            return torch.zeros((), device=self.args.device)
        batches, self._collected = self._collected, []
        model.train()
        if callable(getattr(self.optimizer, "train", None)):
            self.optimizer.train()
        parts = [part for index, batch in enumerate(batches) for part in self._divide(batch, self._num_parts, index)]
        microbatches = self._prepare_microbatches(parts)
        loss = self._create_loss(microbatches, len(batches))
        with self._autocast():
            result = self.engine.train_step(microbatches, loss)
        self._log_step("train", result, batches)
        return torch.tensor(result.loss, device=self.args.device)

    def _divide(self, batch: Batch, parts: int, index: int = 0) -> list[dict[str, Any]]:
        return list(divide(batch, parts, index))

    def _prepare_microbatches(self, microbatches: Sequence[Batch]) -> list[Batch]:
        """The microbatches of a step with what its loss takes beside them."""
        return list(microbatches)

    def prediction_step(
        self, model: nn.Module, inputs: Batch, prediction_loss_only: bool, ignore_keys: list[str] | None = None
    ) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
        """The loss of a batch over all pipelines, and with metrics its logits."""
        batch = self._prepare_inputs(inputs)
        labels = batch.get("labels")
        microbatches = list(divide(self._without_repeated(batch), self._num_microbatches))
        value = logits = None
        with self._autocast():
            if labels is not None or "shift_labels" in batch:
                result = self.engine.eval_step(microbatches, self._create_loss(microbatches, 1))
                self._log_step("eval", result, [batch])
                value = torch.tensor(result.loss, device=self.args.device)
            if not prediction_loss_only:
                outputs = self.engine.forward(microbatches, broadcast=True)
                logits = torch.cat([one[0] if isinstance(one, tuple) else one for one in outputs]).float()
        return value, logits, None if prediction_loss_only else labels

    def _without_repeated(self, batch: Batch) -> Batch:
        """A batch without labels of the rows that fill up the last one of an evaluation, so that they do not count."""
        num_rows = len(batch["input_ids"])
        left = self._count_left(num_rows)
        if left == num_rows:
            return batch
        names = [name for name in ("labels", "shift_labels") if name in batch]
        hidden = torch.arange(num_rows, device=batch["input_ids"].device)[:, None] >= left
        return {**batch, **{name: batch[name].masked_fill(hidden, IGNORE) for name in names}}

    def _count_left(self, num_rows: int) -> int:
        """The rows of an evaluation's batch that are not repeated ones."""
        state = self.accelerator.gradient_state
        if not state.end_of_dataloader or state.remainder <= 0:
            return num_rows
        return min(num_rows, max(0, state.remainder - self.accelerator.process_index * num_rows))

    def _create_loss(self, microbatches: Sequence[Batch], num_batches: int) -> Any:
        loss = TokenLoss(
            function=self.compute_loss_func,
            is_dft=getattr(self.args, "loss_type", "") == "dft",
            has_metrics=is_sft(self),
        )
        if loss.function is None and not self._has_router_loss:
            return loss
        local = torch.tensor(sum(map(loss.count, microbatches)), device=self.args.device)
        num_items = max(1.0, float(self.accelerator.gather(local).sum()))
        # SFTTrainer averages router losses over the batches of all pipelines, Trainer adds them up
        weight = 1 / (num_batches * self.accelerator.num_processes) if is_sft(self) else 1.0
        return TokenLoss(loss.function, loss.is_dft, loss.has_metrics, num_items, weight)

    @property
    def _has_router_loss(self) -> bool:
        return bool(getattr(self.model.config.get_text_config(), "output_router_logits", False))

    def _log_step(self, mode: str, result: StepResult, batches: Sequence[Batch]) -> None:
        if is_sft(self):
            add_metrics(self, mode, result.metrics, batches)

    def _autocast(self) -> AbstractContextManager[Any]:
        """bf16=True computes in bfloat16 with weights in their own dtype, as Accelerate does."""
        return torch.autocast(self.args.device.type, torch.bfloat16) if self.args.bf16 else nullcontext()

    # gradients

    def _clip_grad_norm(self, model: nn.Module) -> float:
        return self.engine.clip_grad_norm(self.args.max_grad_norm)

    def _get_grad_norm(self, model: nn.Module, grad_norm: float | None = None) -> float:
        return self.engine.grad_norm() if grad_norm is None else grad_norm

    def floating_point_ops(self, inputs: Batch) -> float:
        """This process's share: Trainer adds up those of all processes."""
        return super().floating_point_ops(inputs) / self.get_tp_size()

    # saving and loading

    def _save(self, output_dir: str | None = None, state_dict: Mapping[str, Tensor] | None = None) -> None:
        """Write the model as Trainer does; all ranks call this, the first one gets the weights."""
        if state_dict is None:
            prefix = self._stages.prefix
            state_dict = {prefix + name: tensor.cpu() for name, tensor in self.engine.named_weights([0])}
        super()._save(output_dir, state_dict)

    def _save_optimizer_and_scheduler(self, output_dir: str) -> None:
        save_checkpoint(
            Path(output_dir) / FOLDER, self.engine, self.optimizer.optimizer, step=self.state.global_step,
            frozen=not is_adapted(self.model),
        )  # fmt: skip
        if self.args.should_save:
            torch.save(self.lr_scheduler.state_dict(), Path(output_dir) / SCHEDULER)

    def _save_rng_state(self, output_dir: str) -> None:
        super()._save_rng_state(output_dir)
        dist.barrier()  # the state that is written last tells that a checkpoint is complete

    def train(self, resume_from_checkpoint: str | bool | None = None, *args: Any, **kwargs: Any) -> Any:
        """As Trainer.train. With `resume_from_checkpoint=True` checkpoints that are not complete are passed over."""
        if resume_from_checkpoint is True:
            found = [str(find_newest(self.args.output_dir) or "")]
            broadcast_object_list(found)
            resume_from_checkpoint = found[0] or True
        return super().train(resume_from_checkpoint, *args, **kwargs)

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: nn.Module | None = None) -> None:
        """Weights are loaded with the optimizer, when there is one."""
        shards_of(resume_from_checkpoint)

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        if checkpoint is not None:
            load_checkpoint(shards_of(checkpoint), self.engine, self.optimizer.optimizer)
            self.lr_scheduler.load_state_dict(torch.load(Path(checkpoint) / SCHEDULER, weights_only=True))

    def _load_best_model(self) -> None:
        load_checkpoint(shards_of(self.state.best_model_checkpoint), self.engine)

    def end(self) -> None:
        """As Trainer.end: the Engine's connections are closed, too."""
        self.engine.close()
        super().end()
