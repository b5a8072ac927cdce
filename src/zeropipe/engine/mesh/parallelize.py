"""parallelize(): divide the stages of a rank over `cp`, `tp`, `ep` and `dp_shard`."""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Iterable, Mapping
from typing import Any, TypeVar

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, OffloadPolicy, fully_shard
from torch.distributed.tensor import DTensor

from zeropipe.core.mesh import DATA_DIMENSIONS, EXPERTS
from zeropipe.engine.backward.experts import find_divided
from zeropipe.engine.fsdp_private import units_of
from zeropipe.engine.layout import EXPERT_DATA, SHARDS_AND_PARTS, Layout
from zeropipe.engine.mesh.context_parallel import apply_cp
from zeropipe.engine.mesh.expert_parallel import apply_ep, divide_mesh
from zeropipe.engine.mesh.tensor_parallel import apply_tp
from zeropipe.engine.torch_private import comm as torch_comm
from zeropipe.errors import ConfigError, first_line, short

S = TypeVar("S", bound=nn.Module)


def parallelize(
    stages: dict[int, S],
    mesh: DeviceMesh,
    *,
    plan: Mapping[str, str] | None = None,
    sequence_parallel: bool = False,
    dtype: torch.dtype | None = None,
    reduce_dtype: torch.dtype | None = torch.float32,
    offload: bool = False,
    ep: int = 1,
    dispatch: str = "expert",
    cp_exchange: str = "auto",
    shard_cp: bool = False,
    sequence: int | None = None,
) -> dict[int, S]:
    """Shard this rank's stages over `tp` and `dp_shard`, in place, and return them; pass the Engine the same mesh.

    With `cp` each process runs a part of every sequence of Hugging Face models; every process gets whole microbatches.
    `cp_exchange`: in attention, exchange "heads" for tokens, "gather" keys and values, or pass them round a "ring";
    "auto": heads if they divide, else a ring for a long `sequence` (its number of tokens), else gather.
    `shard_cp`: shard weights over `dp_shard` and `cp` together, not over `dp_shard` alone.

    `ep`: divide the experts of every layer over this many of the `dp_shard` processes (without `dp_shard`, of
    `dp_replicate`), which must be a divisor of their number; tokens are sent to the process that has their experts.
    `dispatch`: a token is sent once for each "expert" of it, or once to each "process" that has some of them.

    `plan`: how layers are sharded over `tp`, by their names in the full model, as transformers writes it; the model's
    own plan by default. For a Hugging Face model the plan is checked on a small copy. `sequence_parallel`: outside
    attention and MLP each process of `tp` has only a chunk of every sequence, also in the messages between stages.
    `dtype`: compute in this dtype, with weights stored in their own; gradients are summed in `reduce_dtype`. `offload`:
    keep sharded weights and optimizer state in CPU memory. `dp_replicate` needs nothing here unless stages are sharded,
    too. Compilation and checkpointing are options of the Engine. Scalars, and weights that are trained in another dtype
    than most of their block (a float32 router, say), stay unsharded on every process.
    """
    if not isinstance(stages, Mapping):
        raise ConfigError(f"stages are a {type(stages).__name__}: must be a dict, as of module_stages and hf_stages")
    for name, value in {"dtype": dtype, "reduce_dtype": reduce_dtype}.items():
        if value is not None and not isinstance(value, torch.dtype):
            raise ConfigError(f"{name}={short(value)}: must be a torch.dtype, like torch.bfloat16")
    layout = Layout.from_mesh(mesh)
    if any(hasattr(stage, "expert_mesh") for stage in stages.values()):
        raise ConfigError("the experts of a stage are already divided over ep; call parallelize() once")
    if any(units_of(stage) for stage in stages.values()):
        raise ConfigError("a stage is already sharded; call parallelize() once, or leave out fully_shard")
    if layout.sizes.get("tp", 1) == 1 and (plan is not None or sequence_parallel):
        raise ConfigError("plan and sequence_parallel need layers sharded over tp; use a mesh with tp of 2 or more")
    if shard_cp and (layout.sizes.get("cp", 1) == 1 or ep != 1):
        raise ConfigError("shard_cp=True shards weights over cp, without ep; use a mesh with cp of 2 or more and ep=1")
    expert_mesh = divide_mesh(mesh, layout, ep)
    for name in mesh.mesh_dim_names if expert_mesh is None else expert_mesh.mesh_dim_names:
        # the outer dimension first: the order in which a DTensor shards experts that both divide
        if name == "tp" and layout.sizes[name] > 1:
            apply_tp(stages.values(), mesh[name], plan, sequence=sequence_parallel)
        elif name == EXPERTS:
            apply_ep(stages.values(), expert_mesh, dispatch)
    if layout.sizes.get("cp", 1) > 1:
        apply_cp(stages.values(), mesh["cp"], cp_exchange, layout.sizes.get("tp", 1), sequence)
    if layout.sizes.get("dp_shard", 1) > 1 or shard_cp:
        data_mesh = _mesh_with_parts(mesh, layout, stages.values()) if shard_cp else _data_mesh(mesh, layout)
        options = _fsdp_options(data_mesh, dtype, reduce_dtype, offload)
        expert_options = _expert_options(options, expert_mesh)
        for number, stage in stages.items():
            _apply_fsdp(number, stage, options, expert_options)
            _move_unsharded(stage, mesh.device_type)
    elif dtype is not None or offload:
        raise ConfigError("dtype and offload need sharded stages; use a mesh with dp_shard of 2 or more")
    return stages


def _data_mesh(mesh: DeviceMesh, layout: Layout) -> DeviceMesh:
    """The mesh that shards weights over its last dimension, and copies them over the one before."""
    names = tuple(name for name in DATA_DIMENSIONS if name in layout.sizes)
    if names != tuple(name for name in layout.sizes if name in DATA_DIMENSIONS):
        raise ConfigError(
            f"the mesh has the dimensions {', '.join(layout.sizes)}: {names[0]} must be before {names[1]}, for FSDP"
        )
    return mesh[names] if len(names) > 1 else mesh[names[0]]


def _mesh_with_parts(mesh: DeviceMesh, layout: Layout, stages: Iterable[nn.Module]) -> DeviceMesh:
    """The same, with dp_shard and cp as its last dimension."""
    if layout.sizes.get("dp_shard", 1) == 1:
        shard_mesh = mesh["cp"]
    else:
        names = tuple(name for name in layout.sizes if name in ("dp_shard", "cp"))
        shard_mesh = torch_comm.flatten(mesh, names, SHARDS_AND_PARTS)
        for stage in stages:
            stage.shard_mesh = shard_mesh
    if layout.sizes.get("dp_replicate", 1) == 1:
        return shard_mesh
    return torch_comm.concatenate(mesh["dp_replicate"], shard_mesh)


def _fsdp_options(
    data_mesh: DeviceMesh, dtype: torch.dtype | None, reduce_dtype: torch.dtype | None, offload: bool
) -> dict[str, Any]:
    """Arguments of fully_shard."""
    return {
        "mesh": data_mesh,
        "mp_policy": MixedPrecisionPolicy(dtype, reduce_dtype if dtype is not None else None),
        "offload_policy": CPUOffloadPolicy(pin_memory=data_mesh.device_type == "cuda") if offload else OffloadPolicy(),
    }


def _expert_options(options: dict[str, Any], expert_mesh: DeviceMesh | None) -> dict[str, Any] | None:
    """Arguments of fully_shard for stacks of divided experts; None if ep leaves nothing to shard them over."""
    if expert_mesh is None or expert_mesh[EXPERT_DATA].size() == 1:
        if expert_mesh is not None and isinstance(options["offload_policy"], CPUOffloadPolicy):
            raise ConfigError("offload=True with ep=dp_shard: experts are not sharded then; use a smaller ep")
        return None
    names = tuple(name for name in ("dp_replicate", EXPERT_DATA) if name in expert_mesh.mesh_dim_names)
    # the weights of a token's experts stay in the dtype of the router
    policy = dataclasses.replace(options["mp_policy"], cast_forward_inputs=False)
    return {**options, "mesh": expert_mesh[names], "mp_policy": policy}


def _apply_fsdp(number: int, stage: nn.Module, options: dict[str, Any], expert_options: dict[str, Any] | None) -> None:
    """Make each block of a stage an FSDP unit, then the rest of the stage; before them each stack of divided experts.

    Without `expert_options` such a stack has no unit, and is left out of that of its block.
    """
    blocks = list(dict.fromkeys(getattr(stage, "blocks", ())))  # a module may be listed twice
    _require_disjoint(blocks)
    stacks = find_divided(stage)
    for index, stack in enumerate(stacks if expert_options is not None else ()):
        _shard_unit(f"stack {index} of experts of stage {number}", stack, set(stack.parameters()), expert_options)
    divided = {parameter for stack in stacks for parameter in stack.parameters()}
    units: dict[nn.Module, set[nn.Parameter]] = {block: set(block.parameters()) for block in blocks}
    units[stage] = set(stage.parameters()).difference(*units.values())
    for unit, parameters in units.items():
        name = f"stage {number}" if unit is stage else f"block {blocks.index(unit)} of stage {number}"
        _shard_unit(name, unit, parameters - divided, options, divided & parameters)


def _shard_unit(
    name: str,
    unit: nn.Module,
    parameters: set[nn.Parameter],
    options: Mapping[str, Any],
    left_out: Iterable[nn.Parameter] = (),
) -> None:
    """Make a module an FSDP unit of these parameters, without those that cannot be sharded, and those left out."""
    try:
        fully_shard(unit, ignored_params=find_unshardable(parameters).union(left_out), **options)
    except (AssertionError, NotImplementedError, RuntimeError, ValueError) as error:
        raise ConfigError(f"{name} cannot be sharded: {first_line(error)}; change it, or leave out dp_shard") from error


def find_unshardable(parameters: Iterable[nn.Parameter]) -> set[nn.Parameter]:
    """The parameters of an FSDP unit that cannot be sharded with the others.

    These are scalars, and those that are trained in another dtype than most of the unit: one message reduces all
    gradients of a unit.
    """
    parameters = list(parameters)
    sizes: Counter[torch.dtype] = Counter()
    for parameter in parameters:
        if parameter.requires_grad and parameter.dim():
            sizes[parameter.dtype] += parameter.numel()
    common = max(sizes, key=lambda dtype: (sizes[dtype], str(dtype)), default=None)
    return {p for p in parameters if not p.dim() or (p.requires_grad and p.dtype != common)}


def _move_unsharded(stage: nn.Module, device_type: str) -> None:
    """Move unsharded parameters and buffers to the mesh's device, as FSDP does with sharded ones."""
    if device_type == "cuda":
        unsharded = (parameter for parameter in stage.parameters() if not isinstance(parameter, DTensor))
        for tensor in (*unsharded, *stage.buffers()):
            tensor.data = tensor.data.to(torch.device(device_type, torch.cuda.current_device()))


def _require_disjoint(blocks: list[nn.Module]) -> None:
    """ConfigError for blocks that share a parameter: each is gathered and reduced on its own."""
    owners: dict[int, tuple[int, str]] = {}
    for number, block in enumerate(blocks):
        for name, parameter in block.named_parameters():
            owner, name_there = owners.setdefault(id(parameter), (number, name))
            if owner != number:
                raise ConfigError(
                    f"blocks {owner} and {number} of a stage share a parameter ({name_there}, {name}), and each is "
                    "sharded on its own; put both into one block, share the full module, or leave out dp_shard"
                )
