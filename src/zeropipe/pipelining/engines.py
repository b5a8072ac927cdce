"""The engines under torch's stages: made at the first step, kept as long as the stages live."""

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
from zeropipe.engine.stages.contract import Microbatch, StageInfo
from zeropipe.errors import ConfigError, short
from zeropipe.pipelining import private

KEPT = 4  # engines of one set of stages: schedules that are used in turn

Blocks = str | Callable[[nn.Module], Sequence[nn.Module]] | None


@dataclass(frozen=True)
class Settings:
    """What `configure` was told."""

    options: Options
    record: bool = False
    blocks: Blocks = None
    mesh: DeviceMesh | None = None


_settings = Settings(Options())


def configure(*, record: bool = False, blocks: Blocks = None, mesh: DeviceMesh | None = None, **options: Any) -> None:
    """How all steps from here on run; what is not given is as it was in the beginning. Every rank calls it alike.

    `options`: `compile`, `ac`, `timeout` and the other fields of zeropipe.engine.Options. `blocks`: the transformer
    blocks in a stage's module, for `compile` and `ac`: the name of the list that holds them, or a function from the
    module to its blocks; if not given, the list with most of the parameters. `record`: measure a Timeline of every
    step, for `timeline()`. `mesh`: all pipelines that share weights, with the dimensions pp, dp_replicate, dp_shard and
    tp. They may then have different numbers of microbatches, and an error in one of them stops all.
    """
    global _settings
    chosen = Options.of(options)
    chosen.check()
    require_switch("record", record)
    if not (blocks is None or isinstance(blocks, str) or callable(blocks)):
        raise ConfigError(f"blocks={short(blocks)}: give the name of a list in a stage's module, or a function")
    if mesh is not None:
        Layout.from_mesh(mesh)
    _settings = Settings(chosen, record, blocks, mesh)


def settings() -> Settings:
    """What holds now."""
    return _settings


def engine_of(stages: Sequence[Any], schedule: Schedule, key: Hashable) -> Engine:
    """The engine that runs `schedule` on these stages. All ranks come here together when it is made."""
    stages = sorted(stages, key=lambda stage: stage.stage_index)
    kept: dict[Hashable, Engine] = stages[0].__dict__.setdefault("_zeropipe_engines", {})
    full = (key, _settings, tuple(id(stage.submod) for stage in stages))
    engine = kept.pop(full, None)
    if engine is None:
        for old in [other for other in kept if other[1:] != full[1:]]:  # type: ignore[index]
            kept.pop(old).close()  # its modules are gone, or prepared in another way
        while len(kept) >= KEPT:
            kept.pop(next(iter(kept))).close()
        engine = _engine(stages, schedule)
    kept[full] = engine
    return engine


def drop(stages: Sequence[Any], engine: Engine) -> None:
    """Forget an engine that has stopped: the next step makes a new one."""
    for stage in stages:
        kept = stage.__dict__.get("_zeropipe_engines", {})
        for key in [key for key, other in kept.items() if other is engine]:
            del kept[key]


def _engine(stages: Sequence[Any], schedule: Schedule) -> Engine:
    options = {name: getattr(_settings.options, name) for name in vars(_settings.options)}
    infos = {stage.stage_index: _describe(stage) for stage in stages}
    if schedule.rebuild is not None:
        # it runs any number of microbatches: made for one number, it is the same on pipelines that have different ones
        schedule = resize(schedule, 2 * schedule.num_stages)
    warn_of_copies(stages)
    where: dict[str, Any] = {"group": stages[0].group}
    if _settings.mesh is not None:
        check_pipeline(_settings.mesh, stages[0].group)
        warn_of_replicas(_settings.mesh, stages)
        where = {"mesh": _settings.mesh}
    return Engine(schedule, infos, device=stages[0].device, record=_settings.record, **where, **options)


def check_pipeline(mesh: DeviceMesh, group: Any) -> None:
    """ConfigError unless the mesh's pipelines are those of the stages."""
    layout = Layout.from_mesh(mesh)
    of_mesh = [layout.global_ranks[rank] for rank in layout.pipeline]
    of_stages = dist.get_process_group_ranks(group if group is not None else dist.group.WORLD)
    if of_mesh != of_stages:
        raise ConfigError(
            f"the mesh has ranks {of_mesh} in its pp, the stages have {of_stages} in their group: give "
            "PipelineStage(group=mesh['pp'].get_group())"
        )


def warn_of_replicas(mesh: DeviceMesh, stages: Sequence[Any]) -> None:
    """A warning where pipelines have the same weights and nobody sums their gradients."""
    layout = Layout.from_mesh(mesh)
    learning = [p for stage in stages for p in stage.submod.parameters() if p.requires_grad]
    names = sorted({name for parameter in learning for name in layout.unsummed_dims(parameter)})
    if names:
        warnings.warn(
            f"gradients of stages that are not sharded are not summed over {' and '.join(names)}: do that after step(),"
            " or shard the stages with fully_shard, which does it",
            stacklevel=2,
        )


def warn_of_copies(stages: Sequence[Any]) -> None:
    """A warning where traced stages have copies of one parameter and nobody sums their gradients."""
    names = sorted({name for stage in stages for name in private.copied(stage)})
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
        _first if stage.is_first else _later,
        _blocks(stage) if _settings.options.changes_blocks else None,
        (),
        (),
        build_weights=stage.dw_builder,
        keeps_factors=True,
    )


def _first(microbatch: Microbatch) -> tuple[tuple[Any, ...], dict[str, Any]]:
    return microbatch["args"], microbatch["kwargs"]


def _later(microbatch: Microbatch) -> tuple[tuple[Any, ...], dict[str, Any]]:
    return (), microbatch["kwargs"]


def _blocks(stage: Any) -> tuple[nn.Module, ...]:
    module, wish = stage.submod, _settings.blocks
    if callable(wish):
        return tuple(wish(module))
    if wish is not None:
        try:
            return tuple(module.get_submodule(wish).children())
        except AttributeError:
            raise ConfigError(
                f"blocks={wish!r}: the module of stage {stage.stage_index} has no such list; give the name of its list "
                "of transformer blocks, or a function from the module to its blocks"
            ) from None
    lists = [child for child in module.modules() if isinstance(child, nn.ModuleList | nn.ModuleDict | nn.Sequential)]
    if not lists:
        raise ConfigError(
            f"the module of stage {stage.stage_index} holds no list of blocks to compile or checkpoint: give "
            "configure(blocks=...), a name or a function from the module to its blocks"
        )
    return tuple(max(lists, key=lambda each: sum(p.numel() for p in each.parameters())).children())
