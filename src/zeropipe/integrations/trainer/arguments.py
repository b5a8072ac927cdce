"""Training arguments on a pipeline: those that the Engine takes over, and those that are refused."""

from __future__ import annotations

from typing import Any

from zeropipe.errors import ConfigError, short
from zeropipe.integrations.trainer.settings import PipelineSettings

# methods that run the model, and that the Engine replaces
_STEP_METHODS = ("compute_loss", "training_step", "prediction_step")
_KNOWN_MODULES = (
    "transformers.trainer", "trl.trainer.sft_trainer", "trl.trainer.dpo_trainer",
    "zeropipe.integrations.trainer.mixin", "zeropipe.integrations.trainer.dpo",
)  # fmt: skip
# modules of classes that sample while they train
_GENERATES = ("trl.trainer.grpo_trainer", "trl.trainer.rloo_trainer")
_OWN_LOSSES = ("trl.trainer.dpo_trainer",)  # modules of classes whose loss is no mean over tokens
_OPTIMIZERS = ("adamw_torch", "adamw_torch_fused", "sgd", "adagrad", "rmsprop")
# argument -> the reason to refuse it when it is set
_REFUSED = {
    "deepspeed": "the pipeline shards the model itself; use mesh={'pp': ..., 'dp_shard': ...}",
    "fsdp": "the pipeline shards the model itself; use mesh={'pp': ..., 'dp_shard': ...}",
    "parallelism_config": "the mesh is that of pipelined(mesh=...); leave it out",
    "auto_find_batch_size": "an error of one rank ends the step on all ranks; choose a batch size",
    "label_smoothing_factor": "the loss has no label smoothing; pass a compute_loss_func, or leave it out",
    "neftune_noise_alpha": "hooks of the full model do not reach its stages; leave it out",
    "use_liger_kernel": "it replaces forwards of the full model, which is cut into stages; leave it out",
    "fp16": "the pipeline has no gradient scaler; use bf16",
    "fp16_full_eval": "weights stay in their dtype; leave it out",
    "bf16_full_eval": "weights stay in their dtype; leave it out",
    "eval_use_gather_object": "objects of all processes would be counted once per rank of a pipeline; leave it out",
    "save_on_each_node": "the first process saves the model; leave it out",
    "enable_jit_checkpoint": "processes would save after different steps; use save_steps",
    "torch_empty_cache_steps": "the Engine keeps its buffers; leave it out",
    "debug": "hooks of the full model do not reach its stages; leave it out",
    "activation_offloading": "the Engine keeps activations where they are; use activation_checkpointing",
    "past_index": "stages keep no state between batches; leave it out",
}


def check_class(trainer_class: type) -> None:
    """ConfigError for a class with a step of its own, which the pipeline would not run."""
    for owner in trainer_class.__mro__:
        if owner.__module__ in _GENERATES:
            raise ConfigError(
                f"{owner.__name__} generates completions with the full model, which a pipeline cuts into stages: train "
                "with zeropipe.integrations.verl, or with the Engine's log-probabilities (examples/grpo.py)"
            )
    for name in _STEP_METHODS:
        for owner in trainer_class.__mro__:
            if name in vars(owner) and owner.__module__ not in _KNOWN_MODULES:
                way_out = "pass compute_loss_func, or use transformers.Trainer, trl.SFTTrainer or trl.DPOTrainer"
                raise ConfigError(
                    f"{owner.__name__} has a {name} of its own, which runs the full model: the pipeline would not call "
                    f"it; {way_out}"
                )


def check_arguments(args: Any, settings: PipelineSettings) -> None:
    """ConfigError for arguments that would be ignored, or would give another result than in one process."""
    for name, reason in _REFUSED.items():
        value = getattr(args, name, None)
        if value and not (name == "past_index" and value < 0):
            raise ConfigError(f"{name}={short(value)}: {reason}")
    if args.world_size != settings.num_processes:
        raise ConfigError(
            f"mesh={settings.dimensions} is for {settings.num_processes} processes, {args.world_size} are running: "
            f"start with torchrun --nproc-per-node {settings.num_processes}, or use another mesh"
        )
    if args.train_sampling_strategy == "batch_rebalance":
        raise ConfigError("train_sampling_strategy='batch_rebalance' gives each process its own rows; use another one")
    if args.accelerator_config.split_batches or args.accelerator_config.dispatch_batches:
        raise ConfigError("accelerator_config with split_batches or dispatch_batches: each pipeline reads its own rows")
    num_pipelines = settings.mesh.get("dp_replicate", 1) * settings.mesh.get("dp_shard", 1)
    if num_pipelines > 1 and not args.accelerator_config.even_batches:
        raise ConfigError("even_batches=False: all pipelines must take the same number of steps; leave it out")
    if num_pipelines > 1 and not args.average_tokens_across_devices:
        raise ConfigError("average_tokens_across_devices=False: the loss is the mean over all tokens; leave it out")
    if args.load_best_model_at_end and args.save_only_model:
        raise ConfigError("load_best_model_at_end with save_only_model: its checkpoints have no shards to load")
    if args.torch_compile and args.torch_compile_backend not in (None, "inductor"):
        raise ConfigError(f"torch_compile_backend={args.torch_compile_backend!r}: stages are compiled by inductor")
    if args.torch_compile and args.torch_compile_mode not in (None, "default"):
        raise ConfigError(f"torch_compile_mode={args.torch_compile_mode!r}: stages are compiled in the default mode")
    count_microbatches(args, settings)
    _checkpointing_of(args)


def check_trainer(trainer: Any) -> None:
    """ConfigError for what was passed to a Trainer beside its arguments."""
    if trainer.optimizer is not None:
        raise ConfigError("optimizers=...: its parameters are not those of the stages; pass optimizer_cls_and_kwargs")
    optim = getattr(trainer.args.optim, "value", trainer.args.optim)
    if trainer.optimizer_cls_and_kwargs is None and optim not in _OPTIMIZERS:
        raise ConfigError(
            f"optim={optim!r}: must be one of {', '.join(_OPTIMIZERS)} on a pipeline, or pass optimizer_cls_and_kwargs"
        )
    if any(kind.__module__ in _OWN_LOSSES for kind in type(trainer).__mro__):
        return
    if trainer.compute_loss_func is None and not trainer._loss_shifts_labels:
        raise ConfigError(
            f"a {type(trainer.model).__name__} has a loss of its own: must be a causal language model; pass a "
            "compute_loss_func that takes its logits"
        )
    if not trainer.model_accepts_loss_kwargs and trainer.compute_loss_func is None:
        raise ConfigError(
            f"a {type(trainer.model).__name__} takes no num_items_in_batch, so that Trainer averages batches: pass a "
            "compute_loss_func"
        )


def count_microbatches(args: Any, settings: PipelineSettings) -> int:
    """The number of microbatches of a step; ConfigError unless batches can be divided into it."""
    accumulation = args.gradient_accumulation_steps
    wanted = settings.microbatches or accumulation
    if wanted % accumulation:
        raise ConfigError(
            f"microbatches={wanted}: must be a multiple of gradient_accumulation_steps={accumulation}, since each "
            "batch of the data loader is divided"
        )
    parts, rows = wanted // accumulation, args.per_device_train_batch_size
    is_flat = getattr(args, "padding_free", False) or (
        getattr(args, "packing", False) and getattr(args, "packing_strategy", "") in ("bfd", "bfd_split")
    )
    if is_flat and parts > 1:
        raise ConfigError(
            f"microbatches={wanted}: with packing or padding_free a batch of the data loader is one row, which is not "
            f"divided; use gradient_accumulation_steps={wanted}"
        )
    if parts > rows:
        raise ConfigError(
            f"microbatches={wanted}: a step has {rows * accumulation} rows (per_device_train_batch_size={rows}, "
            f"gradient_accumulation_steps={accumulation}); use at most that many"
        )
    return wanted


def engine_options(args: Any, settings: PipelineSettings) -> dict[str, Any]:
    """The Engine's options: those that were passed, and those of the training arguments."""
    options = {"compile": bool(args.torch_compile), "ac": _checkpointing_of(args)}
    return options | dict(settings.options)


def _checkpointing_of(args: Any) -> str:
    """The Engine's `ac` for the arguments of activation checkpointing."""
    # what transformers called it before
    name = "activation_checkpointing" if hasattr(args, "activation_checkpointing") else "gradient_checkpointing"
    if not getattr(args, name):
        return "none"
    kwargs = dict(getattr(args, f"{name}_kwargs") or {})
    if kwargs.pop("offload", False):
        raise ConfigError(f"{name}_kwargs with offload: the Engine keeps activations where they are")
    every, selective = kwargs.pop("every_n_layers", 1), kwargs.pop("selective", False)
    kwargs.pop("use_reentrant", None)  # the same result
    if kwargs:
        raise ConfigError(f"{name}_kwargs has {', '.join(sorted(kwargs))}: must be left out")
    if selective:
        return "selective:op"
    return "full" if every == 1 else f"selective:{every}"
