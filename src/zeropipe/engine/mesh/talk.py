"""What the processes of a `tp` dimension say to each other, and what that means on the way back.

Each of these functions is one half of a pair: where the way forward sums, the way back hands on, and the other way
round. `Peers` is a plain value of a name and numbers, so that a compiled graph can hold it.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from zeropipe.engine.torch_private import comm as torch_comm


class Actor:
    """Stands for a process in a proof, or where a layer is only counted: no process group is asked."""

    def everybodys(self, x: Tensor) -> list[Tensor]:
        """Everybody's x."""
        raise NotImplementedError

    def total(self, x: Tensor) -> Tensor:
        return torch.stack(self.everybodys(x)).sum(0)

    def largest(self, x: Tensor) -> Tensor:
        return torch.stack(self.everybodys(x)).amax(0)

    def joined(self, x: Tensor, dimension: int) -> Tensor:
        return torch.cat(self.everybodys(x), dimension)


actors: dict[str, Actor] = {}  # by the name of their group


class Peers(NamedTuple):
    """The processes that share layers, as one of them sees them."""

    group: str
    place: int
    number: int

    @staticmethod
    def of(mesh: DeviceMesh) -> Peers:
        """Those of a mesh of one dimension."""
        return Peers(mesh.get_group().group_name, mesh.get_local_rank(), mesh.size())


def total(x: Tensor, peers: Peers) -> Tensor:
    """The sum of everybody's x."""
    if peers.group in actors:
        return actors[peers.group].total(x)
    return torch_comm.reduced(x, "sum", peers.group)


def largest(x: Tensor, peers: Peers) -> Tensor:
    """The largest of everybody's x, entry by entry."""
    if peers.group in actors:
        return actors[peers.group].largest(x)
    return torch_comm.reduced(x, "max", peers.group)


def joined(x: Tensor, dimension: int, peers: Peers) -> Tensor:
    """Everybody's x, one after the other."""
    if peers.group in actors:
        return actors[peers.group].joined(x, dimension)
    pieces = torch_comm.gathered(x, peers.group)
    return pieces if dimension == 0 else torch.cat(pieces.chunk(peers.number), dimension)


def part(x: Tensor, dimension: int, peers: Peers) -> Tensor:
    """This process's part of x."""
    return x.chunk(peers.number, dimension)[peers.place].contiguous()


def part_of_total(x: Tensor, dimension: int, peers: Peers) -> Tensor:
    """This process's part of the sum of everybody's x."""
    if peers.group in actors:
        return part(total(x, peers), dimension, peers)
    return torch_comm.sum_scattered(torch.cat(x.chunk(peers.number, dimension)), peers.group)


class Enter(torch.autograd.Function):
    """Into layers that are spread by columns: the input as it is; its gradients are summed."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, peers: Peers) -> Tensor:
        ctx.peers = peers
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, None]:
        return total(dy, ctx.peers), None


class Leave(torch.autograd.Function):
    """Out of a layer that is spread by rows: the sum; its gradient is handed on."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, peers: Peers) -> Tensor:
        return total(x, peers)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, None]:
        return dy, None


class Join(torch.autograd.Function):
    """Parts put together; of the gradient, which everybody has whole, each takes its part."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, dimension: int, peers: Peers) -> Tensor:
        ctx.dimension, ctx.peers = dimension, peers
        return joined(x, dimension, peers)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, None, None]:
        return part(dy, ctx.dimension, ctx.peers), None, None


class Take(torch.autograd.Function):
    """This process's part; the parts of the gradient are put together."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, dimension: int, peers: Peers) -> Tensor:
        ctx.dimension, ctx.peers = dimension, peers
        return part(x, dimension, peers)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, None, None]:
        return joined(dy, ctx.dimension, ctx.peers), None, None


class EnterJoined(torch.autograd.Function):
    """Join and Enter in one: of the sum of the gradients each takes its part."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, dimension: int, peers: Peers) -> Tensor:
        ctx.dimension, ctx.peers = dimension, peers
        return joined(x, dimension, peers)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, None, None]:
        return part_of_total(dy, ctx.dimension, ctx.peers), None, None


class LeaveTaken(torch.autograd.Function):
    """Leave and Take in one: this process's part of the sum."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, dimension: int, peers: Peers) -> Tensor:
        ctx.dimension, ctx.peers = dimension, peers
        return part_of_total(x, dimension, peers)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, None, None]:
        return joined(dy, ctx.dimension, ctx.peers), None, None
