"""torchtitan's models with zeropipe's schedules: use `pipeline_llm` as a ModelSpec's `pipelining_fn`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage

from zeropipe.core.units import count_text
from zeropipe.engine import defer
from zeropipe.errors import ConfigError
from zeropipe.integrations import experts  # noqa: F401  # registers them
from zeropipe.integrations.schedule_choice import ScheduleChoice, choose_schedule

try:
    from torchtitan.components import metrics
    from torchtitan.distributed import pipeline_parallel as titan
    from torchtitan.tools.logging import logger
except ImportError as error:
    raise ConfigError(f"zeropipe.integrations.torchtitan needs torchtitan (0.3.0): {error}") from error


def pipeline_llm(
    model: nn.Module,
    *,
    parallel_dims: Any,
    training: Any,
    parallelism: Any,
    compile_config: Any,
    ac_config: Any,
    dump_folder: str,
    device: torch.device,
    model_config: Any,
    parallelize_fn: Callable[..., nn.Module],
    loss_fn: Callable[..., tuple[Tensor, Any]],
) -> tuple[Any, list[nn.Module], bool, bool]:
    """As torchtitan's function of the same name: (schedule, this rank's model parts, has first, has last stage).

    `pipeline_parallel_schedule` may be any schedule with one copy of each stage, by torch's name or ours;
    `pipeline_parallel_schedule_csv` a CSV or a JSON file, such as `zeropipe search` writes.
    """
    compiles = compile_config.enable and "model" in compile_config.components
    if parallel_dims.tp_enabled and compiles and ac_config is not None:
        raise ConfigError(
            f"tp={parallel_dims.tp}, compile and activation checkpointing: torch cannot compile checkpointed blocks "
            "that are sharded over tp; leave out one of the three"
        )
    choice = choose_schedule(parallelism.pipeline_parallel_schedule_csv or parallelism.pipeline_parallel_schedule)
    num_microbatches = _num_microbatches(training, parallelism)
    names = parallelism.module_fqns_per_model_part or _module_names(choice, parallel_dims.pp, parallelism, model_config)
    placement = choice.placement(parallel_dims.pp, len(names))
    mesh = parallel_dims.get_mesh("pp")
    splits = choice.splits_backward
    stages = []
    for number in placement.stages_of(mesh.get_local_rank()):
        part = titan._split_module(model, names[number])
        if splits:
            defer(part)  # before torchtitan wraps the forward of its layers, which hides their type
        part = parallelize_fn(
            part,
            parallel_dims=parallel_dims,
            training=training,
            parallelism=parallelism,
            compile_config=compile_config,
            ac_config=ac_config,
            dump_folder=dump_folder,
        )
        get_mesh = titan._build_get_mesh_callback(parallel_dims)
        stages.append(PipelineStage(part, number, len(names), device, group=mesh.get_group("pp"), get_mesh=get_mesh))

    def scalar_loss(*args: Any, **kwargs: Any) -> Tensor:
        return loss_fn(*args, **kwargs)[0]

    schedule = choice.create_runtime(stages, num_microbatches, scalar_loss)
    logger.info(
        f"zeropipe runs {schedule.schedule.name} with {count_text(num_microbatches, 'microbatch')}, {placement.name} "
        f"placement: stages {', '.join(str(stage.stage_index) for stage in stages)} of {len(names)} on this rank"
    )
    _warn_about_loss_rank(parallel_dims, parallelism, placement.rank_of(len(names) - 1))
    parts = [stage.submod for stage in stages]
    return schedule, parts, any(stage.is_first for stage in stages), any(stage.is_last for stage in stages)


def _num_microbatches(training: Any, parallelism: Any) -> int:
    batch, size = training.local_batch_size, parallelism.pipeline_parallel_microbatch_size
    if size < 1 or batch % size:
        raise ConfigError(
            f"training.local_batch_size={batch} cannot be divided into microbatches of "
            f"parallelism.pipeline_parallel_microbatch_size={size}: must be a divisor"
        )
    return batch // size


def _module_names(choice: ScheduleChoice, num_ranks: int, parallelism: Any, model_config: Any) -> list[list[str]]:
    """The names of the modules of each stage, as torchtitan distributes them."""
    first_less = parallelism.pipeline_parallel_first_stage_less_layers
    last_less = parallelism.pipeline_parallel_last_stage_less_layers
    num_layers = len(model_config.layers)
    per_stage = parallelism.pipeline_parallel_layers_per_stage
    num_stages = choice.num_stages(num_ranks, num_layers, per_stage, first_less, last_less)
    return titan._generate_llm_fqn_per_model_part(num_stages, num_layers, first_less, last_less)


def _warn_about_loss_rank(parallel_dims: Any, parallelism: Any, last: int) -> None:
    """Warn if torchtitan logs metrics of a rank without a loss: it supports one schedule on a V."""
    name = parallelism.pipeline_parallel_schedule
    logs = metrics._get_metrics_rank(parallel_dims=parallel_dims, pp_schedule=name)
    has = parallel_dims.world_size // parallel_dims.pp * last
    if logs != has:
        logger.warning(
            f"the loss of this schedule is on rank {has}, and torchtitan logs rank {logs}, which would show -1: "
            f"set LOG_RANK={has} and metrics.save_for_all_ranks"
        )
