"""Stages made ready for a mesh: tensor parallelism inside, sharding around."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, TypeVar

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, OffloadPolicy, fully_shard

from zeropipe.engine.fsdp_private import units_of
from zeropipe.engine.layout import DATA_DIMENSIONS, Layout
from zeropipe.engine.mesh.tensor import spread
from zeropipe.errors import ConfigError, short

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
    unless stages are sharded, too. Compilation and checkpointing are options of the Engine.
    """
    if not isinstance(stages, Mapping):
        raise ConfigError(f"stages are a {type(stages).__name__}: give a dict, as module_stages and hf_stages make it")
    for name, kind in {"dtype": dtype, "reduce_dtype": reduce_dtype}.items():
        if kind is not None and not isinstance(kind, torch.dtype):
            raise ConfigError(f"{name}={short(kind)}: give a dtype of torch's, like torch.bfloat16")
    layout = Layout.of_mesh(mesh)
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
    for stage in stages.values():
        blocks = list(dict.fromkeys(getattr(stage, "blocks", ())))  # a module may stand in it twice
        _require_apart(blocks)
        for block in blocks:
            fully_shard(block, **options)
        fully_shard(stage, **options)
    return stages


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
