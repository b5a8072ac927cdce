"""AReaL's Archon engine with zeropipe's schedules: call `install()` in each process before creating an engine."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.checkpoint import SAC_IGNORED_OPS

from zeropipe.core.action import Kind, actions_of
from zeropipe.core.schedule import Schedule
from zeropipe.engine import defer
from zeropipe.errors import ConfigError
from zeropipe.integrations import experts  # noqa: F401  # registers them
from zeropipe.integrations.schedule_choice import choose_schedule
from zeropipe.pipelining.schedules import PipelineSchedule, get_schedule_class

try:
    from areal.experimental.engine import archon_engine, archon_runner, archon_utils
    from areal.experimental.models import archon as models
    from areal.experimental.models.archon import model_spec, pipeline_parallel
    from areal.experimental.models.archon.qwen2.model import model as qwen2
    from areal.experimental.models.archon.qwen3.model import model as qwen3
except ImportError as error:
    raise ConfigError(f"zeropipe.integrations.archon needs AReaL's Archon (areal 1.0.4): {error}") from error

_PARALLELISM = {"tp": "tensor", "cp": "context", "ep": "expert"}
# Profiler marks compute nothing. FSDP creates different ones when experts in checkpointed blocks are recomputed, which
# torch 2.13 takes for a different computation.
_PROFILER_MARKS = {
    torch.ops.profiler._record_function_enter_new.default,
    torch.ops.profiler._record_function_exit._RecordFunction,
}
_originals: list[tuple[Any, str, Any]] = []  # object, name, original value


def install() -> None:
    """Let Archon's engines run zeropipe's schedules, by replacing functions of Archon."""
    if _originals:
        return
    for where in (pipeline_parallel, archon_runner):
        _replace(where, "build_pipeline_schedule", build_pipeline_schedule)
    for where in (pipeline_parallel, models):
        _replace(where, "pipeline_llm", pipeline_llm)
    for spec in {id(spec): spec for spec in model_spec._MODEL_SPECS.values()}.values():
        if spec.pipelining_fn is not None:
            _replace(spec, "pipelining_fn", pipeline_llm)
    _replace(archon_utils, "validate_zero_bubble_compatibility", _keep_compile)
    _replace(archon_utils, "force_pad_to_maximum", _pad_for_compile_only(archon_utils.force_pad_to_maximum))
    engine = archon_engine.ArchonEngine
    _replace(archon_engine, "get_schedule_class", _schedule_class)
    _replace(engine, "_apply_pipeline_parallelism", _with_last_rank(engine._apply_pipeline_parallelism))
    _replace(engine, "_prepare_pipelined_mb_inputs", microbatches_of)
    SAC_IGNORED_OPS.update(_PROFILER_MARKS)


def uninstall() -> None:
    """Restore Archon's own functions; engines created in between must not be used any more."""
    while _originals:
        owner, name, value = _originals.pop()
        setattr(owner, name, value)
    SAC_IGNORED_OPS.difference_update(_PROFILER_MARKS)


def _replace(owner: Any, name: str, value: Any) -> None:
    _originals.append((owner, name, getattr(owner, name)))
    setattr(owner, name, value)


def pipeline_llm(
    model: nn.Module,
    device: torch.device,
    parallel_dims: Any,
    archon_config: Any,
    parallelize_fn: Callable[..., nn.Module],
    **parallelize_kwargs: Any,
) -> tuple[list[Any], list[nn.Module], bool, bool]:
    """As Archon's function of the same name: (stages of this rank, model parts, has first, has last stage).

    `pp_schedule` may be any schedule with one copy of each stage, by torch's name or ours, or a CSV or JSON file.
    """
    _require_supported(model, parallel_dims, bool(parallelize_kwargs.get("enable_compile")))
    mesh = parallel_dims.get_mesh("pp")
    choice, num_layers = choose_schedule(archon_config.pp_schedule), len(model.layers)
    less = archon_config.pp_first_stage_less_layers, archon_config.pp_last_stage_less_layers
    num_stages = choice.num_stages(mesh.size(), num_layers, archon_config.pp_layers_per_stage, *less)
    names = pipeline_parallel.generate_llm_fqn_per_model_part(
        num_stages, num_layers, *less, is_critic=getattr(model.model_args, "is_critic", False)
    )
    stages = []
    for number in choice.placement(mesh.size(), num_stages).stages_of(mesh.get_local_rank()):
        stage_mesh = _StageMesh(mesh, number, num_stages)
        [stage], [part] = pipeline_parallel.pipeline_module_split(model, stage_mesh, "1F1B", device, names)
        if choice.splits_backward:
            defer(part)  # before FSDP changes the class of its experts
        stage.submod = parallelize_fn(part, parallel_dims, **parallelize_kwargs)
        stages.append(stage)
    parts = [stage.submod for stage in stages]
    return stages, parts, any(stage.is_first for stage in stages), any(stage.is_last for stage in stages)


def _require_supported(model: nn.Module, parallel_dims: Any, compiles: bool) -> None:
    """ConfigError for settings with which Archon itself computes wrong gradients silently."""
    for name, kind in _PARALLELISM.items():
        if getattr(parallel_dims, f"{name}_enabled") and not isinstance(model, qwen2.Qwen2Model | qwen3.Qwen3Model):
            raise ConfigError(
                f"{name}={getattr(parallel_dims, name)}: Archon has {kind} parallelism for qwen2 and qwen3 only, and "
                f"trains its {type(model).__name__} without it; set it to 1"
            )
    if not parallel_dims.tp_enabled:
        return
    if getattr(model.model_args, "moe_enabled", False):
        raise ConfigError(
            f"tp={parallel_dims.tp} and experts: Archon's routers get a part of their gradient, with any pipeline; "
            "set it to 1 and use ep"
        )
    if compiles:
        raise ConfigError(
            f"tp={parallel_dims.tp} and enable_compile: Archon's embedding gets no gradient then, with any pipeline; "
            "leave out one of them"
        )


class _StageMesh:
    """A mesh on which every stage has a rank of its own, so that Archon creates exactly the requested stage."""

    def __init__(self, mesh: Any, stage: int, num_stages: int) -> None:
        self.get_group, self._stage, self._num_stages = mesh.get_group, stage, num_stages

    def get_local_rank(self) -> int:
        return self._stage

    def size(self) -> int:
        return self._num_stages


def build_pipeline_schedule(
    stages: Sequence[Any],
    pp_schedule: str,
    n_microbatches: int,
    pp_degree: int = 1,
    loss_fn: Callable[..., Tensor] | None = None,
) -> Any:
    """As Archon's function of the same name."""
    runtime = choose_schedule(pp_schedule).create_runtime(stages, n_microbatches, loss_fn)
    if loss_fn is not None:
        _require_order(runtime.schedule)
    return runtime


def _require_order(schedule: Schedule) -> None:
    """ConfigError where losses are not in the order of microbatches: Archon takes their contexts one by one."""
    last = schedule.num_stages - 1
    row = schedule.rows[schedule.placement.rank_of(last)]
    order = [action.microbatch for action in actions_of(row) if action.stage == last and action.kind is Kind.F]
    if order != sorted(order):
        raise ConfigError(
            f"{schedule.name} runs microbatches {order} on the last stage, and Archon takes losses in order 0, 1, 2: "
            "use a schedule that keeps the order there"
        )


def microbatches_of(engine: Any, mb_list: Any) -> tuple[tuple[()], dict[str, Any], None, list[Any]]:
    """The arguments of `step` and `eval` in Archon's runner: every microbatch with its own length."""
    args, kwargs, targets, contexts = [], [], [], []
    for item in mb_list:
        inputs, context = engine._prepare_mb_inputs(item)
        contexts.append(context)
        args.append((_add_batch_dimension(inputs["input_ids"]),))
        kwargs.append(
            {
                "positions": _add_batch_dimension(inputs["position_ids"]),
                "cu_seqlens": _add_batch_dimension(inputs["cu_seqlens"]),
                "max_seqlen": torch.tensor([int(inputs["max_seqlen"])]),
            }
        )
        targets.append(_add_batch_dimension(context.labels))
    lists: dict[str, Any] = {"kwarg_mbs": kwargs}
    if engine.pp_has_first_stage:
        lists["arg_mbs"] = args
    if engine.pp_has_last_stage:
        lists["target_mbs"] = targets
    return (), lists, None, contexts


def _add_batch_dimension(tensor: Tensor) -> Tensor:
    return tensor.unsqueeze(0) if tensor.ndim == 1 else tensor


def _keep_compile(pp_schedule: str, enable_compile: bool, model_config: Any, ac_config: Any, logger: Any) -> bool:
    """Split backward supports compiled blocks and every checkpointing mode: nothing is switched off."""
    return enable_compile


def _pad_for_compile_only(original: Callable[..., None]) -> Callable[..., None]:
    def force_pad_to_maximum(
        config: Any, parallel_dims: Any, enable_compile: bool, enable_tree_training: bool, logger: Any
    ) -> None:
        """Archon's function, without the padding that only torch's pipeline needs."""
        before = config.pad_to_maximum
        original(config, parallel_dims, enable_compile, enable_tree_training, logger)
        if not enable_compile and not enable_tree_training:
            config.pad_to_maximum = before

    return force_pad_to_maximum


def _schedule_class(pp_schedule: str) -> type[Any]:
    return PipelineSchedule if choose_schedule(pp_schedule).schedule else get_schedule_class(pp_schedule)


def _with_last_rank(original: Callable[..., None]) -> Callable[..., None]:
    def _apply_pipeline_parallelism(engine: Any, ac_config: Any, enable_compile: bool) -> None:
        """Archon's function, with the last stage's rank from the placement."""
        original(engine, ac_config, enable_compile)
        engine._pp_last_stage_rank = last_stage_rank(
            engine.config.archon.pp_schedule, engine.pp_stages[0].num_stages, engine.parallel_dims.get_group("pp")
        )

    return _apply_pipeline_parallelism


def last_stage_rank(pp_schedule: str, num_stages: int, group: dist.ProcessGroup) -> int:
    """The global rank that holds the last stage."""
    ranks = dist.get_process_group_ranks(group)
    return ranks[choose_schedule(pp_schedule).placement(len(ranks), num_stages).rank_of(num_stages - 1)]
