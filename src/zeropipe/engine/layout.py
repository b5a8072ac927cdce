"""The position of this process among those that train one model."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from zeropipe.core.mesh import COPY_DIMENSIONS, DIMENSIONS, EXPERTS
from zeropipe.errors import ConfigError, short

SHARDS_AND_PARTS = "dp_shard_cp"  # dp_shard and cp as one dimension, over which weights are sharded
EXPERT_DATA = "edp"  # the rest of the data dimension that ep divides: processes with the same experts


@dataclass(frozen=True)
class Layout:
    """All processes that train one model, and which of them share stages, pipelines or shards with this one.

    Ranks are numbered within the layout, from 0, in the order of the mesh. The ranks of a Placement are indices into
    `pipeline`.
    """

    global_ranks: tuple[int, ...]  # torch.distributed's rank of each process
    rank: int  # of this process
    pipeline: tuple[int, ...]  # the ranks of this process's pipeline, in its order
    sizes: dict[str, int]
    coordinates: dict[str, int]  # of this process, by mesh dimension
    mesh: Any = None
    expert_mesh: Any = None  # the mesh with `edp` and `ep` in place of the data dimension that ep divides
    shard_mesh: Any = None  # that of SHARDS_AND_PARTS, if weights are sharded over both

    @staticmethod
    def create(
        group: dist.ProcessGroup | None, mesh: Any = None, expert_mesh: Any = None, shard_mesh: Any = None
    ) -> Layout:
        """From a process group that is one pipeline, or from a DeviceMesh.

        `expert_mesh` is that of divided experts, `shard_mesh` that of weights sharded over dp_shard and cp.
        """
        if not dist.is_initialized():
            raise ConfigError("torch.distributed is not running: start with torchrun and call init_process_group()")
        if mesh is not None:
            if group is not None:
                raise ConfigError("group and mesh were both passed: a mesh names the pipeline's ranks in its 'pp'")
            return Layout.from_mesh(mesh, expert_mesh, shard_mesh)
        if expert_mesh is not None or shard_mesh is not None:
            what = "weights are sharded over cp" if expert_mesh is None else "experts are divided over ep"
            raise ConfigError(f"{what}: pass the Engine the mesh that parallelize() got")
        if group is not None and not isinstance(group, dist.ProcessGroup):
            if group == dist.GroupMember.NON_GROUP_MEMBER:
                raise ConfigError("this process is not in the group: create the Engine on its processes only")
            raise ConfigError(f"group={short(group)}: must be a process group, like mesh['pp'].get_group()")
        global_ranks = tuple(dist.get_process_group_ranks(group if group is not None else dist.group.WORLD))
        rank, size = dist.get_rank(group), len(global_ranks)
        return Layout(global_ranks, rank, tuple(range(size)), {"pp": size}, {"pp": rank})

    @staticmethod
    def from_mesh(mesh: Any, expert_mesh: Any = None, shard_mesh: Any = None) -> Layout:
        """From a DeviceMesh with named dimensions."""
        if not isinstance(mesh, DeviceMesh):
            raise ConfigError(
                f"mesh={short(mesh)}: must be a DeviceMesh, like init_device_mesh('cpu', (2, 2), "
                "mesh_dim_names=('pp', 'dp_shard'))"
            )
        names = tuple(mesh.mesh_dim_names or ())
        for name in names:
            if name not in DIMENSIONS:
                raise ConfigError(f"the mesh has a dimension {name!r}: must be one of {', '.join(DIMENSIONS)}")
        if not names:
            raise ConfigError(f"the mesh's dimensions have no names: pass mesh_dim_names of {', '.join(DIMENSIONS)}")
        coordinates = mesh.get_coordinate()
        if coordinates is None:
            raise ConfigError("this process is not on the mesh: create the Engine on its processes only")
        global_ranks = tuple(mesh.mesh.flatten().tolist())
        rank = global_ranks.index(dist.get_rank())
        pipeline = _ranks_along(mesh, global_ranks, ["pp"] if "pp" in names else [])
        sizes, coordinates = dict(zip(names, mesh.mesh.shape)), dict(zip(names, coordinates))
        if expert_mesh is not None:
            if mesh.mesh.flatten().tolist() != expert_mesh.mesh.flatten().tolist():
                raise ConfigError("the Engine's mesh is not the one that parallelize() got; pass both the same")
            coordinates |= dict(zip(expert_mesh.mesh_dim_names, expert_mesh.get_coordinate()))
        return Layout(global_ranks, rank, pipeline, sizes, coordinates, mesh, expert_mesh, shard_mesh)

    @property
    def size(self) -> int:
        """The number of processes."""
        return len(self.global_ranks)

    @property
    def pipeline_rank(self) -> int:
        """This process's rank in its pipeline."""
        return self.pipeline.index(self.rank)

    @property
    def num_pipelines(self) -> int:
        """The number of pipelines with microbatches of their own."""
        return self.sizes.get("dp_replicate", 1) * self.sizes.get("dp_shard", 1)

    @property
    def counts_losses(self) -> bool:
        """Whether this process's losses are counted: processes that differ in `tp` only compute the same ones."""
        return self.coordinates.get("tp", 0) == 0

    @property
    def counts_tokens(self) -> bool:
        """Whether this process counts its microbatches' tokens: those that differ in `cp` or `tp` have the same."""
        return self.counts_losses and self.coordinates.get("cp", 0) == 0

    @property
    def stage_dims(self) -> tuple[str, ...]:
        """The mesh dimensions along which processes hold the same stages: torch's own groups work in them."""
        return tuple(name for name, size in self.sizes.items() if name != "pp" and size > 1)

    @property
    def stage_groups(self) -> list[Any]:
        """torch's own groups of this process along `stage_dims`, and those of divided experts."""
        experts = [name for name in (EXPERT_DATA, EXPERTS) if self.expert_sizes.get(name, 1) > 1]
        return [
            *(self.mesh.get_group(name) for name in self.stage_dims),
            *(self.expert_mesh.get_group(name) for name in experts),
            *([] if self.shard_mesh is None else [self.shard_mesh.get_group()]),
        ]

    @property
    def expert_sizes(self) -> dict[str, int]:
        """The sizes of the dimensions of `expert_mesh`; empty without one."""
        return {} if self.expert_mesh is None else dict(zip(self.expert_mesh.mesh_dim_names, self.expert_mesh.shape))

    @property
    def stage_holders(self) -> list[tuple[int, ...]]:
        """For every pipeline rank, the ranks that hold its stages and run the same row of a Program."""
        ranks = torch.arange(self.size)
        if self.mesh is None:
            return [(rank,) for rank in range(self.size)]
        table = ranks.view(self.mesh.mesh.shape)
        if "pp" in self.sizes:
            table = table.movedim(list(self.sizes).index("pp"), 0)
        return [tuple(holders) for holders in table.reshape(self.sizes.get("pp", 1), -1).tolist()]

    @property
    def ep(self) -> int:
        """The number of processes that the experts of a layer are divided over."""
        return self.expert_sizes.get(EXPERTS, 1)

    def coordinates_in(self, *names: str) -> tuple[int, ...]:
        """This process's coordinates in some mesh dimensions."""
        return tuple(self.coordinates.get(name, 0) for name in names)

    def ranks_along(self, names: Iterable[str]) -> tuple[int, ...]:
        """The ranks that differ from this one in these mesh dimensions only."""
        names = [name for name in names if name in self.coordinates]
        if self.mesh is None:
            return self.pipeline if names else (self.rank,)
        mesh = self.expert_mesh if EXPERT_DATA in names else self.mesh
        return _ranks_along(mesh, self.global_ranks, names)

    def same_pipeline(self, one: int, other: int) -> bool:
        """Whether two ranks process the same microbatches: they differ in `pp`, `cp` and `tp` only."""
        if self.mesh is None:
            return True
        table = self.mesh.mesh
        one_at, other_at = ((table == self.global_ranks[rank]).nonzero()[0].tolist() for rank in (one, other))
        return all(a == b for name, a, b in zip(self.sizes, one_at, other_at) if name not in ("pp", "cp", "tp"))

    def unsummed_dims(self, parameter: Tensor) -> tuple[str, ...]:
        """The dimensions with other tokens over which torch does not sum a parameter's gradient, not sharded there."""
        summed = [own for name in _mesh_dims(parameter) for own in _parts_of(name)]
        sizes: Mapping[str, int] = self.sizes
        if EXPERTS in summed:  # its process has the gradient of the tokens of all `ep` processes
            sizes = self.expert_sizes
        return tuple(name for name in (*COPY_DIMENSIONS, EXPERT_DATA) if sizes.get(name, 1) > 1 and name not in summed)

    def num_holders(self, parameter: Tensor) -> int:
        """The number of processes with the same pipeline rank that hold the same shard of a parameter."""
        total = self.size // len(self.pipeline)
        for size, placement in zip(*_placements(parameter)):
            if not placement.is_replicate():  # `is_shard` is False for a strided shard
                total //= size
        return total

    def shard_index(self, parameter: Tensor) -> tuple[int, ...]:
        """Which shard of a parameter this process holds: its coordinates in the dimensions that shard it."""
        placements = zip(_mesh_dims(parameter), _placements(parameter)[1])
        names = (name for name, placement in placements if not placement.is_replicate())
        return self.coordinates_in(*(own for name in names for own in _parts_of(name)))

    def is_replicated_over(self, name: str, parameter: Tensor) -> bool:
        """Whether several processes that differ in one mesh dimension hold the same values of a parameter."""
        pairs = zip(_mesh_dims(parameter), _placements(parameter)[1])
        placements = {own: placement for dim, placement in pairs for own in _parts_of(dim)}
        return self.sizes.get(name, 1) > 1 and (name not in placements or placements[name].is_replicate())


def _ranks_along(mesh: Any, global_ranks: Sequence[int], names: Sequence[str]) -> tuple[int, ...]:
    coordinates = zip(mesh.mesh_dim_names, mesh.get_coordinate())
    index = tuple(slice(None) if name in names else coordinate for name, coordinate in coordinates)
    return tuple(global_ranks.index(rank) for rank in mesh.mesh[index].flatten().tolist())


def _mesh_dims(parameter: Tensor) -> tuple[str, ...]:
    mesh = getattr(parameter, "device_mesh", None)
    return tuple(mesh.mesh_dim_names or ()) if mesh is not None else ()


def _parts_of(name: str) -> tuple[str, ...]:
    """The dimensions of a mesh that a dimension of a parameter's mesh consists of."""
    return ("dp_shard", "cp") if name == SHARDS_AND_PARTS else (name,)


def _placements(parameter: Any) -> tuple[tuple[int, ...], tuple[Any, ...]]:
    """The sizes of the mesh dimensions of a DTensor, and its placement in each."""
    mesh = getattr(parameter, "device_mesh", None)
    return ((), ()) if mesh is None else (tuple(mesh.shape), tuple(parameter.placements))
