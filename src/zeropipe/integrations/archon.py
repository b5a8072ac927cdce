"""AReaL's Archon engine under our schedules: call `install()` once in each process, before the engine is made."""

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
from zeropipe.integrations.chosen import chosen
from zeropipe.pipelining.schedules import PipelineSchedule, get_schedule_class

try:
    from areal.experimental.engine import archon_engine, archon_runner, archon_utils
    from areal.experimental.models import archon as models
    from areal.experimental.models.archon import model_spec, pipeline_parallel
    from areal.experimental.models.archon.qwen2.model import model as qwen2
    from areal.experimental.models.archon.qwen3.model import model as qwen3
except ImportError as error:
    raise ConfigError(f"zeropipe.integrations.archon needs AReaL's Archon (areal 1.0.4): {error}") from error

_KINDS = {"tp": "tensor", "cp": "context", "ep": "expert"}
# Marks for profilers compute nothing. FSDP makes other ones when experts in checkpointed blocks are computed again, and
# torch 2.13 takes that for another computation.
_RECORDS = {
    torch.ops.profiler._record_function_enter_new.default,
    torch.ops.profiler._record_function_exit._RecordFunction,
}
_theirs: list[tuple[Any, str, Any]] = []  # where, name, what it was


def install() -> None:
    """From here on Archon's engines run our schedules; its code finds ours in the place of these functions."""
    if _theirs:
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
    SAC_IGNORED_OPS.update(_RECORDS)


def uninstall() -> None:
    """Archon's own functions are back; engines that were made in between must not be used any more."""
    while _theirs:
        where, name, value = _theirs.pop()
        setattr(where, name, value)
    SAC_IGNORED_OPS.difference_update(_RECORDS)


def _replace(where: Any, name: str, ours: Any) -> None:
    _theirs.append((where, name, getattr(where, name)))
    setattr(where, name, ours)


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
    _require_right(model, parallel_dims, bool(parallelize_kwargs.get("enable_compile")))
    mesh = parallel_dims.get_mesh("pp")
    choice, num_layers = chosen(archon_config.pp_schedule), len(model.layers)
    less = archon_config.pp_first_stage_less_layers, archon_config.pp_last_stage_less_layers
    num_stages = choice.num_stages(mesh.size(), num_layers, archon_config.pp_layers_per_stage, *less)
    names = pipeline_parallel.generate_llm_fqn_per_model_part(
        num_stages, num_layers, *less, is_critic=getattr(model.model_args, "is_critic", False)
    )
    stages = []
    for number in choice.placement(mesh.size(), num_stages).stages_of(mesh.get_local_rank()):
        seat = _Seat(mesh, number, num_stages)
        [stage], [part] = pipeline_parallel.pipeline_module_split(model, seat, "1F1B", device, names)
        if choice.splits_backward:
            defer(part)  # before FSDP makes other classes of its experts, which hides what they are
        stage.submod = parallelize_fn(part, parallel_dims, **parallelize_kwargs)
        stages.append(stage)
    parts = [stage.submod for stage in stages]
    return stages, parts, any(stage.is_first for stage in stages), any(stage.is_last for stage in stages)


def _require_right(model: nn.Module, parallel_dims: Any, compiles: bool) -> None:
    """ConfigError for what Archon itself computes wrong gradients with, without a word."""
    for name, kind in _KINDS.items():
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
            "leave one of them out"
        )


class _Seat:
    """A mesh on which every stage has a rank of its own, so that Archon cuts out the one that is asked for."""

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
    made = chosen(pp_schedule).make(stages, n_microbatches, loss_fn)
    if loss_fn is not None:
        _require_order(made.schedule)
    return made


def _require_order(schedule: Schedule) -> None:
    """ConfigError where losses come in another order than microbatches: Archon takes their contexts one by one."""
    last = schedule.num_stages - 1
    row = schedule.rows[schedule.placement.rank_of(last)]
    order = [action.microbatch for action in actions_of(row) if action.stage == last and action.kind is Kind.F]
    if order != sorted(order):
        raise ConfigError(
            f"{schedule.name} runs microbatches {order} on the last stage, and Archon takes losses in order 0, 1, 2: "
            "use a schedule that keeps the order there"
        )


def microbatches_of(engine: Any, mb_list: Any) -> tuple[tuple[()], dict[str, Any], None, list[Any]]:
    """What Archon's runner hands to `step` and `eval`: every microbatch with its own length."""
    args, kwargs, targets, contexts = [], [], [], []
    for item in mb_list:
        inputs, context = engine._prepare_mb_inputs(item)
        contexts.append(context)
        args.append((_rows(inputs["input_ids"]),))
        kwargs.append(
            {
                "positions": _rows(inputs["position_ids"]),
                "cu_seqlens": _rows(inputs["cu_seqlens"]),
                "max_seqlen": torch.tensor([int(inputs["max_seqlen"])]),
            }
        )
        targets.append(_rows(context.labels))
    lists: dict[str, Any] = {"kwarg_mbs": kwargs}
    if engine.pp_has_first_stage:
        lists["arg_mbs"] = args
    if engine.pp_has_last_stage:
        lists["target_mbs"] = targets
    return (), lists, None, contexts


def _rows(tensor: Tensor) -> Tensor:
    return tensor.unsqueeze(0) if tensor.ndim == 1 else tensor


def _keep_compile(pp_schedule: str, enable_compile: bool, model_config: Any, ac_config: Any, logger: Any) -> bool:
    """Split backward runs compiled blocks and every checkpointing mode here: nothing is switched off."""
    return enable_compile


def _pad_for_compile_only(theirs: Callable[..., None]) -> Callable[..., None]:
    def force_pad_to_maximum(
        config: Any, parallel_dims: Any, enable_compile: bool, enable_tree_training: bool, logger: Any
    ) -> None:
        """Archon's, without the padding that torch's pipeline alone would need."""
        before = config.pad_to_maximum
        theirs(config, parallel_dims, enable_compile, enable_tree_training, logger)
        if not enable_compile and not enable_tree_training:
            config.pad_to_maximum = before

    return force_pad_to_maximum


def _schedule_class(pp_schedule: str) -> type[Any]:
    return PipelineSchedule if chosen(pp_schedule).schedule else get_schedule_class(pp_schedule)


def _with_last_rank(theirs: Callable[..., None]) -> Callable[..., None]:
    def _apply_pipeline_parallelism(engine: Any, ac_config: Any, enable_compile: bool) -> None:
        """Archon's, with the last stage's rank from the placement."""
        theirs(engine, ac_config, enable_compile)
        engine._pp_last_stage_rank = last_stage_rank(
            engine.config.archon.pp_schedule, engine.pp_stages[0].num_stages, engine.parallel_dims.get_group("pp")
        )

    return _apply_pipeline_parallelism


def last_stage_rank(pp_schedule: str, num_stages: int, group: dist.ProcessGroup) -> int:
    """The global rank that holds the last stage."""
    ranks = dist.get_process_group_ranks(group)
    return ranks[chosen(pp_schedule).placement(len(ranks), num_stages).rank_of(num_stages - 1)]
