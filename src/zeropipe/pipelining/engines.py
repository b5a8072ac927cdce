"""The engines of torch's stages: created at the first step, engines as long as the stages exist."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from typing import Any

import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from zeropipe.core.resize import resize
from zeropipe.core.schedule import Schedule
from zeropipe.engine.engine import Engine
from zeropipe.engine.layout import Layout
from zeropipe.engine.options import Options, require_switch
from zeropipe.engine.stages.contract import Microbatch, StageInfo, Tie
from zeropipe.errors import ConfigError, short
from zeropipe.pipelining import private

MAX_ENGINES = 4  # of one set of stages, for schedules that are used in turn

Blocks = str | Callable[[nn.Module], Sequence[nn.Module]] | None


@dataclass(frozen=True)
class Settings:
    """The arguments of `configure`."""

    options: Options
    record: bool = False
    blocks: Blocks = None
    mesh: DeviceMesh | None = None


_settings = Settings(Options())


def configure(*, record: bool = False, blocks: Blocks = None, mesh: DeviceMesh | None = None, **options: Any) -> None:
    """Set how all later steps run; arguments that are left out get their defaults. Every rank passes the same.

    `options`: `compile`, `ac`, `timeout` and the other fields of zeropipe.engine.Options. `blocks`: the transformer
    blocks in a stage's module, for `compile` and `ac`: the name of the list that holds them, or a function from the
    module to its blocks; by default the list with most of the parameters. `record`: measure a Timeline of every
    step, for `timeline()`. `mesh`: all pipelines that share weights, with the dimensions pp, dp_replicate, dp_shard and
    tp. They may then have different numbers of microbatches, and an error in one of them stops all of them.
    """
    global _settings
    checked = Options.of(options)
    checked.check()
    require_switch("record", record)
    if not (blocks is None or isinstance(blocks, str) or callable(blocks)):
        raise ConfigError(f"blocks={short(blocks)}: must be the name of a list in a stage's module, or a function")
    if mesh is not None:
        Layout.from_mesh(mesh)
    _settings = Settings(checked, record, blocks, mesh)


def current_settings() -> Settings:
    """The current_settings of the last `configure`."""
    return _settings


def get_engine(stages: Sequence[Any], schedule: Schedule, key: Hashable) -> Engine:
    """The engine that runs `schedule` on these stages; all ranks call this together when it is created."""
    stages = sorted(stages, key=lambda stage: stage.stage_index)
    engines: dict[Hashable, Engine] = stages[0].__dict__.setdefault("_zeropipe_engines", {})
    full = (key, _settings, tuple(id(stage.submod) for stage in stages))
    engine = engines.pop(full, None)
    if engine is None:
        for old in [other for other in engines if other[1:] != full[1:]]:  # type: ignore[index]
            engines.pop(old).close()  # its modules are gone, or prepared differently
        while len(engines) >= MAX_ENGINES:
            engines.pop(next(iter(engines))).close()
        engine = _create_engine(stages, schedule)
    engines[full] = engine
    return engine


def drop_engine(stages: Sequence[Any], engine: Engine) -> None:
    """Drop an engine that has stopped; the next step creates a new one."""
    for stage in stages:
        engines = stage.__dict__.get("_zeropipe_engines", {})
        for key in [key for key, other in engines.items() if other is engine]:
            del engines[key]


def _create_engine(stages: Sequence[Any], schedule: Schedule) -> Engine:
    options = {name: getattr(_settings.options, name) for name in vars(_settings.options)}
    infos = {stage.stage_index: _describe(stage) for stage in stages}
    if schedule.rebuild is not None:
        # built for one number of microbatches, it is the same on pipelines that have different numbers
        schedule = resize(schedule, 2 * schedule.num_stages)
    warn_about_copies(stages)
    scope: dict[str, Any] = {"group": stages[0].group}
    if _settings.mesh is not None:
        check_mesh(_settings.mesh, stages[0].group)
        warn_about_replicas(_settings.mesh, stages)
        scope = {"mesh": _settings.mesh}
    return Engine(schedule, infos, device=stages[0].device, record=_settings.record, **scope, **options)


def check_mesh(mesh: DeviceMesh, group: Any) -> None:
    """ConfigError unless the mesh's pipelines are those of the stages."""
    layout = Layout.from_mesh(mesh)
    of_mesh = [layout.global_ranks[rank] for rank in layout.pipeline]
    of_stages = dist.get_process_group_ranks(group if group is not None else dist.group.WORLD)
    if of_mesh != of_stages:
        raise ConfigError(
            f"the mesh has ranks {of_mesh} in its pp, the stages have {of_stages} in their group; use "
            "PipelineStage(group=mesh['pp'].get_group())"
        )


def warn_about_replicas(mesh: DeviceMesh, stages: Sequence[Any]) -> None:
    """Warn where pipelines have the same weights and their gradients are not summed."""
    layout = Layout.from_mesh(mesh)
    trained = [p for stage in stages for p in stage.submod.parameters() if p.requires_grad]
    names = sorted({name for parameter in trained for name in layout.unsummed_dims(parameter)})
    if names:
        warnings.warn(
            f"gradients of stages that are not sharded are not summed over {' and '.join(names)}: do that after step(),"
            " or shard the stages with fully_shard, which does it",
            stacklevel=2,
        )


def warn_about_copies(stages: Sequence[Any]) -> None:
    """Warn where traced stages have copies of one parameter, whose gradients are not summed."""
    names = sorted({name for stage in stages for name in private.find_shared_parameters(stage)})
    if names:
        warnings.warn(
            f"several stages use {' and '.join(names)}, and each has a copy, whose gradients are not summed: do that "
            "after step(), as with torch's classes, or cut the model so that one stage uses it",
            stacklevel=2,
        )


def _describe(stage: Any) -> StageInfo:
    """Describe a PipelineStage to the engine."""
    return StageInfo(
        stage.stage_index,
        stage.submod,
        _pick_first if stage.is_first else _pick_later,
        _find_blocks(stage) if _settings.options.changes_blocks else None,
        tuple(Tie(stage.stage_index, *pair) for pair in getattr(stage.submod, "tied_pairs", ())),
        (),
        build_weights=stage.dw_builder,
        keeps_factors=True,
    )


def _pick_first(microbatch: Microbatch) -> tuple[tuple[Any, ...], dict[str, Any]]:
    return microbatch["args"], microbatch["kwargs"]


def _pick_later(microbatch: Microbatch) -> tuple[tuple[Any, ...], dict[str, Any]]:
    return (), microbatch["kwargs"]


def _find_blocks(stage: Any) -> tuple[nn.Module, ...]:
    module, blocks = stage.submod, _settings.blocks
    if callable(blocks):
        return tuple(blocks(module))
    if blocks is not None:
        try:
            return tuple(module.get_submodule(blocks).children())
        except AttributeError:
            raise ConfigError(
                f"blocks={blocks!r}: the module of stage {stage.stage_index} has no such list; use the name of its "
                "list of transformer blocks, or a function from the module to its blocks"
            ) from None
    lists = [child for child in module.modules() if isinstance(child, nn.ModuleList | nn.ModuleDict | nn.Sequential)]
    if not lists:
        raise ConfigError(
            f"the module of stage {stage.stage_index} has no list of blocks to compile or checkpoint; use "
            "configure(blocks=...) with a name or a function from the module to its blocks"
        )
    return tuple(max(lists, key=lambda each: sum(p.numel() for p in each.parameters())).children())
