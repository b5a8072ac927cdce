"""Set-up: every rank checks its arguments, and all of them raise the same error if one check fails."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict
from typing import Any

import torch
from torch import nn

from zeropipe.core.action import Kind
from zeropipe.core.check import check
from zeropipe.core.model.head import row_adds_in_forward
from zeropipe.core.packed import is_joined, kind_of
from zeropipe.core.schedule import Schedule, require_schedule
from zeropipe.core.units import count_text
from zeropipe.engine.comm.collective import on_all_ranks, require_equal
from zeropipe.engine.comm.communicator import Communicator
from zeropipe.engine.layout import Layout
from zeropipe.engine.mesh.cp_stage import ContextPart
from zeropipe.engine.mesh.sharded_stage import is_sharded, require_one_dtype
from zeropipe.engine.options import Options
from zeropipe.engine.stages.contract import StageInfo, Tie, describe_stage, list_ties
from zeropipe.engine.stages.devices import parse_device
from zeropipe.errors import ConfigError

_WRAPPERS = {"DistributedDataParallel", "FullyShardedDataParallel"}  # they reduce gradients by hooks


def agree_on_setup(
    comm: Communicator,
    schedule: Schedule,
    options: Options,
    device: torch.device,
    stages: Mapping[int, nn.Module | StageInfo],
) -> tuple[dict[int, StageInfo], bool]:
    """Describe and check this rank's stages, and say whether any rank has ties.

    ConfigError on all ranks unless schedule, options and ties match.
    """

    def check_all() -> tuple[dict[int, StageInfo], dict[str, object]]:
        infos = {stage: describe_stage(stage, module) for stage, module in stages.items()}
        options.check()
        check_stages(schedule, comm.layout, infos, options)
        return infos, _list_facts(schedule, options, device) | {"ep": comm.layout.ep}

    (infos, _), everyone = on_all_ranks(comm, check_all, share=lambda own: (own[1], list_ties(own[0])))
    for rank, (facts, _) in enumerate(everyone):
        if facts["schedule"] != everyone[0][0]["schedule"]:
            raise ConfigError(f"rank {rank} has another schedule than rank 0: build the same one on every rank")
    require_equal([facts for facts, _ in everyone])
    error = _find_unmatched_tie([ties for _, ties in everyone])
    if error is not None:
        raise ConfigError(error)
    return infos, any(ties for _, ties in everyone)


def _find_unmatched_tie(tied: Sequence[Iterable[Tie]]) -> str | None:
    """The error for a tie that one stage names and its partner does not; None if there is none."""
    named = {tuple(tie) for some in tied for tie in some}
    for stage, name, partner, partner_name in sorted(named):
        if (partner, partner_name, stage, name) not in named:
            return (
                f"stage {stage} ties its {name} to {partner_name} of stage {partner}, which names no such tie: "
                "both must name it in tied_pairs"
            )
    return None


def _list_facts(schedule: Schedule, options: Options, device: torch.device) -> dict[str, object]:
    """The facts that must be the same on every rank."""
    packed = schedule.packed
    offloading = b"" if schedule.offloading is None else schedule.offloading.codes
    others = repr((packed.offsets, schedule.placement, sorted(schedule.checkpointed)))
    digest = hashlib.sha256(packed.codes + offloading + others.encode()).hexdigest()
    return {"schedule": digest, "torch": torch.__version__, "device": device.type} | asdict(options)


def check_types(schedule: object, stages: object) -> None:
    """ConfigError unless these are a Schedule, and a dict of stage numbers and modules."""
    require_schedule(schedule)
    if not isinstance(stages, Mapping):
        raise ConfigError(
            f"stages are a {type(stages).__name__}: must be a dict of stage number to module; module_stages and "
            "hf_stages return one"
        )
    for stage, module in stages.items():
        if not isinstance(module, nn.Module | StageInfo):
            raise ConfigError(f"stage {stage!r} is a {type(module).__name__}: must be an nn.Module")


def check_sizes(schedule: Schedule, layout: Layout) -> None:
    """ConfigError for a schedule with another number of ranks than the pipeline."""
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
        f"pp={len(layout.pipeline)}: create a mesh with pp={schedule.num_ranks}, or build the schedule for "
        f"{count_text(len(layout.pipeline), 'rank')}"
    )


def check_stages(schedule: Schedule, layout: Layout, stages: Mapping[int, StageInfo], options: Options) -> None:
    """ConfigError for stages that this schedule cannot run with these options."""
    if schedule.checkpointed and options.ac != "none":
        raise ConfigError(
            f"ac={options.ac!r} with the checkpointed F of {schedule.name}: both choose what is computed again; use "
            "ac='none', or a schedule without marks"
        )
    cp = layout.sizes.get("cp", 1)
    for stage, info in stages.items():
        if cp > 1 and find_part([info.module]) is None:
            raise ConfigError(f"stage {stage} is not divided over cp={cp}: pass the stages to parallelize() first")
        wrapped = next((name for child in info.module.modules() for name in _WRAPPERS & _class_names(child)), None)
        if wrapped:
            way_out = "pass plain modules and a mesh, or shard them with parallelize()"
            if info.keeps_factors:
                way_out = "shard it with fully_shard, or pass the plain module and sum its gradients after step()"
            raise ConfigError(
                f"stage {stage} holds {wrapped}, which reduces gradients at the wrong time for a pipeline: {way_out}"
            )
        empty = next((name for name, p in info.module.named_parameters() if p.is_meta), None)
        if empty is not None:
            raise ConfigError(
                f"{empty} of stage {stage} is on the meta device, without values: call to_empty(device=...) and fill "
                "it, or load weights with assign=True"
            )
        if is_sharded(info.module) and layout.mesh is None and not info.keeps_factors:
            raise ConfigError(f"stage {stage} is sharded: pass the Engine the mesh it is sharded on")
        if is_sharded(info.module) and layout.mesh is None and options.regather:
            raise ConfigError(
                f"stage {stage} is sharded: with regather=True all pipelines must have the same number of "
                "microbatches, which is not known without a mesh: pass configure(mesh=...), or leave out regather"
            )
        require_one_dtype(stage, info.module)
        marks = any(stage == marked for marked, _ in schedule.checkpointed)
        if (options.changes_blocks or marks) and info.blocks is None:
            raise ConfigError(f"stage {stage} names no blocks to compile or checkpoint: use module_stages()")
        for tie in info.ties:
            info.module.get_parameter(tie.name)
    expected = schedule.placement.stages_of(layout.pipeline_rank)
    if tuple(sorted(stages)) != expected:
        raise ConfigError(f"stages {sorted(stages)} were passed, the placement puts {list(expected)} on this rank")
    check(schedule)


def find_mesh(stages: Mapping[int, nn.Module | StageInfo], name: str) -> Any:
    """The `expert_mesh` or `shard_mesh` that parallelize() gave these stages; None if it gave none."""
    modules = (stage.module if isinstance(stage, StageInfo) else stage for stage in stages.values())
    meshes = (getattr(module, name, None) for module in modules)
    return next((mesh for mesh in meshes if mesh is not None), None)


def find_part(stages: Iterable[nn.Module]) -> ContextPart | None:
    """This process's part of every sequence, with cp; None without it."""
    parts = (getattr(stage, "context", None) for stage in stages)
    return next((part for part in parts if isinstance(part, ContextPart)), None)


def leaves_weights(schedule: Schedule, rank: int, options: Options) -> bool:
    """Whether backward passes of this rank's row are split, or leave weight gradients to waits for a message."""
    row = schedule.packed.row(rank)
    takes_turns = options.overlap == "turns" and any(map(is_joined, row))
    return takes_turns or any(kind_of(code) == Kind.I for code in row)


def adds_in_forward(schedule: Schedule, rank: int, options: Options) -> bool:
    """Whether F of a last stage may add the weight gradients of its head.

    With `split="whole"` an I computes what a B does, so no W follows.
    """
    row = schedule.packed.row(rank)
    return row_adds_in_forward(row) or (options.split == "whole" and not any(map(is_joined, row)))


def choose_device(device: torch.device | str | None, stages: Mapping[int, nn.Module]) -> torch.device:
    """The device passed, or that of the stages' parameters; a GPU becomes the current device."""
    found = parse_device(device) if device is not None else _first_device(stages)
    if found.type == "cuda":  # streams and events belong to the current device
        found = torch.device("cuda", torch.cuda.current_device() if found.index is None else found.index)
        torch.cuda.set_device(found)
    return found


def _first_device(stages: Mapping[int, nn.Module]) -> torch.device:
    parameters = (parameter for stage in stages.values() for parameter in stage.parameters())
    return next((parameter.device for parameter in parameters), torch.device("cpu"))


def _class_names(module: nn.Module) -> set[str]:
    return {kind.__name__ for kind in type(module).__mro__}
