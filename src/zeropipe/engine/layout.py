"""Where this process is among those that train one model."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from zeropipe.core.mesh import DATA_DIMENSIONS, DIMENSIONS
from zeropipe.errors import ConfigError, short


@dataclass(frozen=True)
class Layout:
    """All processes that train one model, and which of them share something with this one.

    Ranks are numbered within the layout, from 0, in the order of the mesh. A pipeline's own ranks, which a Placement
    speaks of, are the places in `pipeline`.
    """

    members: tuple[int, ...]  # torch.distributed's rank of each
    rank: int  # of this process
    pipeline: tuple[int, ...]  # the ranks of this process's pipeline, in its order
    sizes: dict[str, int]
    place: dict[str, int]  # this process's number in each dimension
    mesh: Any = None

    @staticmethod
    def of(group: dist.ProcessGroup | None, mesh: Any = None) -> Layout:
        """From a process group that is one pipeline, or from a DeviceMesh."""
        if not dist.is_initialized():
            raise ConfigError("torch.distributed is not running: start with torchrun and call init_process_group()")
        if mesh is not None:
            if group is not None:
                raise ConfigError("group and mesh were both given: a mesh names the pipeline's ranks in its 'pp'")
            return Layout.of_mesh(mesh)
        if group is not None and not isinstance(group, dist.ProcessGroup):
            if group == dist.GroupMember.NON_GROUP_MEMBER:
                raise ConfigError("this process is not in the group: make the Engine on its processes only")
            raise ConfigError(f"group={short(group)}: give a process group, like mesh['pp'].get_group()")
        members = tuple(dist.get_process_group_ranks(group if group is not None else dist.group.WORLD))
        rank = dist.get_rank(group)
        return Layout(members, rank, tuple(range(len(members))), {"pp": len(members)}, {"pp": rank})

    @staticmethod
    def of_mesh(mesh: Any) -> Layout:
        """From a DeviceMesh with named dimensions."""
        if not isinstance(mesh, DeviceMesh):
            raise ConfigError(
                f"mesh={short(mesh)}: give a DeviceMesh, like init_device_mesh('cpu', (2, 2), mesh_dim_names=('pp', "
                "'dp_shard'))"
            )
        names = tuple(mesh.mesh_dim_names or ())
        for name in names:
            if name not in DIMENSIONS:
                raise ConfigError(f"the mesh has a dimension {name!r}: give some of {', '.join(DIMENSIONS)}")
        if not names:
            raise ConfigError(f"the mesh's dimensions have no names: give mesh_dim_names of {', '.join(DIMENSIONS)}")
        here = mesh.get_coordinate()
        if here is None:
            raise ConfigError("this process is not on the mesh: make the Engine on its processes only")
        members = tuple(mesh.mesh.flatten().tolist())
        rank = members.index(dist.get_rank())
        pipeline = _plane(mesh, members, ["pp"] if "pp" in names else [])
        return Layout(members, rank, pipeline, dict(zip(names, mesh.mesh.shape)), dict(zip(names, here)), mesh)

    @property
    def size(self) -> int:
        """The number of processes."""
        return len(self.members)

    @property
    def pipeline_rank(self) -> int:
        """This process's place in its pipeline."""
        return self.pipeline.index(self.rank)

    @property
    def num_pipelines(self) -> int:
        """How many pipelines have microbatches of their own."""
        return self.sizes.get("dp_replicate", 1) * self.sizes.get("dp_shard", 1)

    @property
    def speaks(self) -> bool:
        """Whether this process's losses count: processes that differ in `tp` only have the same ones."""
        return self.place.get("tp", 0) == 0

    @property
    def shares_stages(self) -> tuple[str, ...]:
        """The dimensions whose processes hold the same stages: torch's own groups work in them."""
        return tuple(name for name, size in self.sizes.items() if name != "pp" and size > 1)

    @property
    def same_stages(self) -> list[tuple[int, ...]]:
        """For every place in the pipeline the ranks that hold its stages, and run the same row of a Program."""
        ranks = torch.arange(self.size)
        if self.mesh is None:
            return [(rank,) for rank in range(self.size)]
        table = ranks.view(self.mesh.mesh.shape)
        if "pp" in self.sizes:
            table = table.movedim(list(self.sizes).index("pp"), 0)
        return [tuple(some) for some in table.reshape(self.sizes.get("pp", 1), -1).tolist()]

    @property
    def groups(self) -> list[Any]:
        """torch's own groups of this process in these dimensions."""
        return [self.mesh.get_group(name) for name in self.shares_stages]

    def place_in(self, *names: str) -> tuple[int, ...]:
        """This process's numbers in some dimensions."""
        return tuple(self.place.get(name, 0) for name in names)

    def plane(self, names: Iterable[str]) -> tuple[int, ...]:
        """The ranks that differ from this one in these dimensions only."""
        names = [name for name in names if name in self.sizes]
        if self.mesh is None:
            return self.pipeline if names else (self.rank,)
        return _plane(self.mesh, self.members, names)

    def uncovered(self, parameter: Tensor) -> tuple[str, ...]:
        """The data dimensions over which nobody has summed a parameter's gradient: all but those it is sharded in."""
        covered = _mesh_names(parameter)
        return tuple(name for name in DATA_DIMENSIONS if self.sizes.get(name, 1) > 1 and name not in covered)

    def holders(self, parameter: Tensor) -> int:
        """How many processes with the same place in the pipeline hold the same piece of a parameter."""
        total = self.size // len(self.pipeline)
        for number, placement in zip(*_shards(parameter)):
            if not placement.is_replicate():  # a strided shard says it is no shard
                total //= number
        return total

    def piece(self, parameter: Tensor) -> tuple[int, ...]:
        """Which piece of a parameter this process holds: its places where others have other pieces."""
        names = _mesh_names(parameter)
        spread = [name for name, way in zip(names, _shards(parameter)[1]) if not way.is_replicate()]
        return self.place_in(*spread)

    def is_whole_in(self, name: str, parameter: Tensor) -> bool:
        """Whether several processes that differ in a dimension only hold the same of a parameter."""
        ways = dict(zip(_mesh_names(parameter), _shards(parameter)[1]))
        return self.sizes.get(name, 1) > 1 and (name not in ways or ways[name].is_replicate())


def _plane(mesh: Any, members: Sequence[int], free: Sequence[str]) -> tuple[int, ...]:
    places = zip(mesh.mesh_dim_names, mesh.get_coordinate())
    index = tuple(slice(None) if name in free else place for name, place in places)
    return tuple(members.index(member) for member in mesh.mesh[index].flatten().tolist())


def _mesh_names(parameter: Tensor) -> tuple[str, ...]:
    mesh = getattr(parameter, "device_mesh", None)
    return tuple(mesh.mesh_dim_names or ()) if mesh is not None else ()


def _shards(parameter: Any) -> tuple[tuple[int, ...], tuple[Any, ...]]:
    """The sizes of the mesh a parameter is spread over, and how it is in each."""
    mesh = getattr(parameter, "device_mesh", None)
    return ((), ()) if mesh is None else (tuple(mesh.shape), tuple(parameter.placements))
