"""Stages made ready for a mesh: tensor parallelism inside, sharding around."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from typing import Any, TypeVar

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, OffloadPolicy, fully_shard
from torch.distributed.tensor import DTensor

from zeropipe.engine.fsdp_private import units_of
from zeropipe.engine.layout import DATA_DIMENSIONS, Layout
from zeropipe.engine.mesh.tensor import spread
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
) -> dict[int, S]:
    """This rank's stages, spread over `tp` and sharded over `dp_shard`, in place; give the Engine the same mesh.

    `plan`: how layers are spread over `tp`, by their names in the whole model, as transformers writes it; the model's
    own plan if not given. What a plan makes of a Hugging Face model is proven on a small copy, or refused.
    `sequence_parallel`: outside attention and MLP each process of `tp` has a part of every sequence only, also in the
    messages between stages. `dtype`: compute in this dtype with weights kept in their own; gradients are summed in
    `reduce_dtype`. `offload`: keep sharded weights and optimizer state in CPU memory. `dp_replicate` needs nothing here
    unless stages are sharded, too. Compilation and checkpointing are options of the Engine. Scalars, and weights that
    are trained in another dtype than most of their block (a float32 router, say), stay whole on every process.
    """
    if not isinstance(stages, Mapping):
        raise ConfigError(f"stages are a {type(stages).__name__}: give a dict, as module_stages and hf_stages make it")
    for name, kind in {"dtype": dtype, "reduce_dtype": reduce_dtype}.items():
        if kind is not None and not isinstance(kind, torch.dtype):
            raise ConfigError(f"{name}={short(kind)}: give a dtype of torch's, like torch.bfloat16")
    layout = Layout.from_mesh(mesh)
    if any(units_of(stage) for stage in stages.values()):
        raise ConfigError("a stage is sharded already: call parallelize() once, or leave out fully_shard")
    if layout.sizes.get("tp", 1) > 1:
        spread(stages.values(), mesh["tp"], plan, sequence=sequence_parallel)
    elif plan is not None or sequence_parallel:
        raise ConfigError("plan and sequence_parallel need layers that are spread: make a mesh with tp of 2 or more")
    names = tuple(name for name in DATA_DIMENSIONS if name in layout.sizes)
    if layout.sizes.get("dp_shard", 1) == 1:
        if dtype is not None or offload:
            raise ConfigError("dtype and offload need sharded stages: make a mesh with dp_shard of 2 or more")
        return stages
    if names != tuple(name for name in layout.sizes if name in DATA_DIMENSIONS):
        raise ConfigError(
            f"the mesh has the dimensions {', '.join(layout.sizes)}: put {names[0]} before {names[1]}, for FSDP"
        )
    options: dict[str, Any] = {
        "mesh": mesh[names] if len(names) > 1 else mesh[names[0]],
        "mp_policy": MixedPrecisionPolicy(dtype, reduce_dtype if dtype is not None else None),
        "offload_policy": CPUOffloadPolicy(pin_memory=mesh.device_type == "cuda") if offload else OffloadPolicy(),
    }
    for number, stage in stages.items():
        blocks = list(dict.fromkeys(getattr(stage, "blocks", ())))  # a module may stand in it twice
        _require_apart(blocks)
        _shard(number, stage, blocks, options)
        _move(stage, mesh.device_type)
    return stages


def _shard(number: int, stage: nn.Module, blocks: list[nn.Module], options: dict[str, Any]) -> None:
    inner = {parameter for block in blocks for parameter in block.parameters()}
    units: dict[nn.Module, set[nn.Parameter]] = {block: set(block.parameters()) for block in blocks}
    units[stage] = set(stage.parameters()) - inner
    for unit, parameters in units.items():
        try:
            fully_shard(unit, ignored_params=kept_whole(parameters), **options)
        except (AssertionError, NotImplementedError, RuntimeError, ValueError) as error:
            where = f"stage {number}" if unit is stage else f"block {blocks.index(unit)} of stage {number}"
            raise ConfigError(
                f"{where} cannot be sharded: {first_line(error)}: change it, or leave dp_shard out"
            ) from error


def kept_whole(parameters: Iterable[nn.Parameter]) -> set[nn.Parameter]:
    """The parameters of an FSDP unit that cannot be sharded with the others.

    These are scalars, and those that are trained in another dtype than most of the unit: one message sums all gradients
    of a unit.
    """
    parameters = list(parameters)
    sizes: Counter[torch.dtype] = Counter()
    for parameter in parameters:
        if parameter.requires_grad and parameter.dim():
            sizes[parameter.dtype] += parameter.numel()
    most = max(sizes, key=lambda dtype: (sizes[dtype], str(dtype)), default=None)
    return {p for p in parameters if not p.dim() or (p.requires_grad and p.dtype != most)}


def _move(stage: nn.Module, kind: str) -> None:
    """To the mesh's device, as FSDP does with what it shards: parameters that stay whole, and buffers beside them."""
    if kind == "cuda":
        whole = (parameter for parameter in stage.parameters() if not isinstance(parameter, DTensor))
        for tensor in (*whole, *stage.buffers()):
            tensor.data = tensor.data.to(torch.device(kind, torch.cuda.current_device()))


def _require_apart(blocks: list[nn.Module]) -> None:
    """ConfigError for blocks that share a parameter: each is gathered and reduced by itself."""
    owners: dict[int, tuple[int, str]] = {}
    for number, block in enumerate(blocks):
        for name, parameter in block.named_parameters():
            before, name_there = owners.setdefault(id(parameter), (number, name))
            if before != number:
                raise ConfigError(
                    f"blocks {before} and {number} of a stage share a parameter ({name_there}, {name}), and each is "
                    "sharded by itself: put both into one block, share the whole module, or leave dp_shard out"
                )
