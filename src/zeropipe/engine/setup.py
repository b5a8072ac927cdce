"""Set-up: every rank looks at what it was given, and all of them raise the same error if one finds fault."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping
from dataclasses import asdict

import torch
from torch import nn

from zeropipe.core.action import Kind
from zeropipe.core.check import check
from zeropipe.core.packed import kind_of
from zeropipe.core.schedule import Schedule, require_schedule
from zeropipe.core.units import count_text
from zeropipe.engine.comm.collective import on_all_ranks, require_equal
from zeropipe.engine.comm.communicator import Communicator
from zeropipe.engine.layout import Layout
from zeropipe.engine.mesh.shards import require_one_dtype, sharded
from zeropipe.engine.options import Options
from zeropipe.engine.stages.contract import StageInfo
from zeropipe.engine.stages.devices import parse_device
from zeropipe.errors import ConfigError

_WRAPPERS = {"DistributedDataParallel", "FullyShardedDataParallel"}  # they reduce gradients by hooks


def require_same_setup(comm: Communicator, look: Callable[[], Mapping[str, object]]) -> None:
    """ConfigError on all ranks unless they have the same schedule and the same options."""
    _, everyone = on_all_ranks(comm, look)
    for rank, facts in enumerate(everyone):
        if facts["schedule"] != everyone[0]["schedule"]:
            raise ConfigError(f"rank {rank} has another schedule than rank 0: build the same one on every rank")
    require_equal(everyone)


def facts(schedule: Schedule, options: Options, device: torch.device) -> dict[str, object]:
    """What must be the same on every rank."""
    packed = schedule.packed
    digest = hashlib.sha256(packed.codes + repr((packed.offsets, schedule.placement)).encode()).hexdigest()
    return {"schedule": digest, "torch": torch.__version__, "device": device.type} | asdict(options)


def check_given(schedule: object, stages: object) -> None:
    """ConfigError for what is no schedule, and for stages without their numbers."""
    require_schedule(schedule)
    if not isinstance(stages, Mapping):
        raise ConfigError(
            f"stages are a {type(stages).__name__}: give a dict of this rank's, stage to module; module_stages and "
            "hf_stages make one"
        )
    for stage, module in stages.items():
        if not isinstance(module, nn.Module | StageInfo):
            raise ConfigError(f"stage {stage!r} is a {type(module).__name__}: an nn.Module is needed")


def check_sizes(schedule: Schedule, layout: Layout) -> None:
    """ConfigError for a schedule that is not for the ranks that run."""
    if len(layout.pipeline) == schedule.num_ranks:
        return
    if layout.mesh is None:
        raise ConfigError(
            f"the schedule {schedule.name} is for {count_text(schedule.num_ranks, 'rank')}, {layout.size} are "
            f"running: start {count_text(schedule.num_ranks, 'process')}, or build the schedule for another number of "
            "ranks"
        )
    raise ConfigError(
        f"the schedule {schedule.name} is for {count_text(schedule.num_ranks, 'rank')}, the mesh has "
        f"pp={len(layout.pipeline)}: make a mesh with pp={schedule.num_ranks}, or build the schedule for "
        f"{count_text(len(layout.pipeline), 'rank')}"
    )


def check_stages(schedule: Schedule, layout: Layout, stages: Mapping[int, StageInfo], options: Options) -> None:
    """ConfigError for stages that this schedule cannot run with these options."""
    for stage, info in stages.items():
        wrapped = next((name for child in info.module.modules() for name in _WRAPPERS & _kinds(child)), None)
        if wrapped:
            way_out = "give plain modules and a mesh, or shard them with parallelize()"
            if info.keeps_factors:
                way_out = "shard it with fully_shard, or give the plain module and sum its gradients after step()"
            raise ConfigError(
                f"stage {stage} holds {wrapped}, which reduces gradients at the wrong time for a pipeline: {way_out}"
            )
        empty = next((name for name, p in info.module.named_parameters() if p.is_meta), None)
        if empty is not None:
            raise ConfigError(
                f"{empty} of stage {stage} is on the meta device, without values: call to_empty(device=...) and fill "
                "it, or load weights with assign=True"
            )
        if sharded(info.module) and layout.mesh is None and not info.keeps_factors:
            raise ConfigError(f"stage {stage} is sharded: give the Engine the mesh it is sharded on")
        if sharded(info.module) and layout.mesh is None and options.regather:
            raise ConfigError(
                f"stage {stage} is sharded: with regather=True all pipelines must have the same number of "
                "microbatches, which is not known without a mesh: give configure(mesh=...), or leave regather out"
            )
        require_one_dtype(stage, info.module)
        if options.changes_blocks and info.blocks is None:
            raise ConfigError(f"stage {stage} names no blocks to compile or checkpoint: use module_stages()")
        for tie in info.ties:
            info.module.get_parameter(tie.name)
    wanted = schedule.placement.stages_of(layout.pipeline_rank)
    if tuple(sorted(stages)) != wanted:
        raise ConfigError(f"stages {sorted(stages)} were given, the placement puts {list(wanted)} here")
    check(schedule)


def splits(schedule: Schedule, rank: int) -> bool:
    """Whether this rank's row has backward passes that are split."""
    return any(kind_of(code) == Kind.I for code in schedule.packed.row(rank))


def device_of(device: torch.device | str | None, stages: Mapping[int, nn.Module]) -> torch.device:
    """The device given, or that of the stages' parameters; a GPU becomes the current one."""
    found = parse_device(device) if device is not None else _first_device(stages)
    if found.type == "cuda":  # streams and events belong to the current device
        found = torch.device("cuda", torch.cuda.current_device() if found.index is None else found.index)
        torch.cuda.set_device(found)
    return found


def _first_device(stages: Mapping[int, nn.Module]) -> torch.device:
    parameters = (parameter for stage in stages.values() for parameter in stage.parameters())
    return next((parameter.device for parameter in parameters), torch.device("cpu"))


def _kinds(module: nn.Module) -> set[str]:
    return {kind.__name__ for kind in type(module).__mro__}
