"""Collectives of the `tp` dimension with their gradients, named as Megatron does: copy, reduce, gather, scatter.

The backward pass of each is the conjugate collective of the forward pass. `TPGroup` is a plain value of a name and
numbers, so a compiled graph can hold it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from zeropipe.engine.backward import turns
from zeropipe.engine.torch_private import comm as torch_comm


class FakeGroup:
    """The collectives of one rank without a process group: of a simulation, or where layers are only counted."""

    def gather(self, x: Tensor) -> list[Tensor]:
        """The x of every rank."""
        raise NotImplementedError

    def all_reduce(self, x: Tensor) -> Tensor:
        return torch.stack(self.gather(x)).sum(0)

    def all_reduce_max(self, x: Tensor) -> Tensor:
        return torch.stack(self.gather(x)).amax(0)

    def all_gather(self, x: Tensor, dimension: int) -> Tensor:
        return torch.cat(self.gather(x), dimension)

    def reduce_scatter(self, x: Tensor, dimension: int, group: TPGroup) -> Tensor:
        return take_chunk(self.all_reduce(x), dimension, group)

    def rotate(self, x: Tensor, group: TPGroup) -> Tensor:
        return self.gather(x)[group.rank - 1]

    def all_to_all(self, x: Tensor, group: TPGroup) -> Tensor:
        return torch.stack([other[group.rank] for other in self.gather(x)])


fake_groups: dict[str, FakeGroup] = {}  # by name


class TPGroup(NamedTuple):
    """The processes of a `tp` dimension, and this process's rank among them."""

    name: str
    rank: int
    size: int

    @staticmethod
    def from_mesh(mesh: DeviceMesh) -> TPGroup:
        """The group of a mesh with one dimension."""
        return TPGroup(mesh.get_group().group_name, mesh.get_local_rank(), mesh.size())


def _finish(pending: Tensor) -> Tensor:
    """The result of a collective; the other computation of an Overlap runs meanwhile."""
    if not torch.compiler.is_compiling():
        turns.turn()
    return torch_comm.finish(pending)


# In a compiled block that takes turns, a collective is one operator from its start to its end, so that Python runs in
# between. In others the compiler sees start and end.


def _is_operator() -> bool:
    return torch.compiler.is_compiling() and turns.in_graphs


@torch.library.custom_op("zeropipe::reduce", mutates_args=())
def reduce_op(x: Tensor, operation: str, group: str) -> Tensor:
    """The "sum" or "max" of x over all ranks."""
    return _finish(torch_comm.start_reduce(x, operation, group))


@reduce_op.register_fake
def _(x: Tensor, operation: str, group: str) -> Tensor:
    return torch.empty_like(x, memory_format=torch.contiguous_format)


@torch.library.custom_op("zeropipe::gather", mutates_args=())
def gather_op(x: Tensor, size: int, group: str) -> Tensor:
    """x of all ranks, concatenated along the first dimension."""
    return _finish(torch_comm.start_gather(x, group))


@gather_op.register_fake
def _(x: Tensor, size: int, group: str) -> Tensor:
    return x.new_empty(size * x.shape[0], *x.shape[1:])


@torch.library.custom_op("zeropipe::sum_scatter", mutates_args=())
def sum_scatter_op(x: Tensor, size: int, group: str) -> Tensor:
    """This rank's part, along the first dimension, of the sum of x over all ranks."""
    return _finish(torch_comm.start_sum_scatter(x, group))


@sum_scatter_op.register_fake
def _(x: Tensor, size: int, group: str) -> Tensor:
    return x.new_empty(x.shape[0] // size, *x.shape[1:])


@torch.library.custom_op("zeropipe::exchange_even", mutates_args=())
def exchange_even_op(x: Tensor, size: int, group: str) -> Tensor:
    """x[i] goes to rank i; the result has at i what rank i sent."""
    even = [1] * size
    return _finish(torch_comm.start_exchange(x, even, even, group))


@exchange_even_op.register_fake
def _(x: Tensor, size: int, group: str) -> Tensor:
    return torch.empty_like(x, memory_format=torch.contiguous_format)


def all_reduce(x: Tensor, group: TPGroup) -> Tensor:
    """The sum of x over all ranks."""
    if group.name in fake_groups:
        return fake_groups[group.name].all_reduce(x)
    return _reduce(x, "sum", group)


def all_reduce_max(x: Tensor, group: TPGroup) -> Tensor:
    """The elementwise maximum of x over all ranks."""
    if group.name in fake_groups:
        return fake_groups[group.name].all_reduce_max(x)
    return _reduce(x, "max", group)


def _reduce(x: Tensor, operation: str, group: TPGroup) -> Tensor:
    if _is_operator():
        return reduce_op(x, operation, group.name)
    return _finish(torch_comm.start_reduce(x, operation, group.name))


def all_gather(x: Tensor, dimension: int, group: TPGroup) -> Tensor:
    """The x of all ranks, concatenated along a dimension."""
    if group.name in fake_groups:
        return fake_groups[group.name].all_gather(x, dimension)
    if _is_operator():
        gathered = gather_op(x, group.size, group.name)
    else:
        gathered = _finish(torch_comm.start_gather(x, group.name))
    return gathered if dimension == 0 else torch.cat(gathered.chunk(group.size), dimension)


def take_chunk(x: Tensor, dimension: int, group: TPGroup) -> Tensor:
    """This rank's chunk of x along a dimension."""
    return x.chunk(group.size, dimension)[group.rank].contiguous()


def reduce_scatter(x: Tensor, dimension: int, group: TPGroup) -> Tensor:
    """This rank's chunk of the sum of x over all ranks."""
    if group.name in fake_groups:
        return fake_groups[group.name].reduce_scatter(x, dimension, group)
    parts = torch.cat(x.chunk(group.size, dimension))
    if _is_operator():
        return sum_scatter_op(parts, group.size, group.name)
    return _finish(torch_comm.start_sum_scatter(parts, group.name))


def all_to_all(x: Tensor, group: TPGroup) -> Tensor:
    """x[i] goes to rank i; the result has at i what rank i sent."""
    if group.name in fake_groups:
        return fake_groups[group.name].all_to_all(x, group)
    if _is_operator():
        return exchange_even_op(x, group.size, group.name)
    even = [1] * group.size
    return _finish(torch_comm.start_exchange(x, even, even, group.name))


def rotate(x: Tensor, group: TPGroup) -> Callable[[], Tensor]:
    """Start to send a flat x to the next rank; the result waits for that of the rank before."""
    if group.size == 1:
        return lambda: x
    if group.name in fake_groups:
        received = fake_groups[group.name].rotate(x, group)
        return lambda: received
    sent, to_receive = [0] * group.size, [0] * group.size
    sent[(group.rank + 1) % group.size] = to_receive[group.rank - 1] = len(x)
    pending = torch_comm.start_exchange(x, sent, to_receive, group.name)
    return lambda: _finish(pending)


class Copy(torch.autograd.Function):
    """Into column-wise layers: the input as it is; its gradients are summed over ranks."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: TPGroup) -> Tensor:
        ctx.group = group
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, None]:
        return all_reduce(dy, ctx.group), None


class Reduce(torch.autograd.Function):
    """Out of a row-wise layer: the sum over ranks; its gradient is passed on as it is."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: TPGroup) -> Tensor:
        return all_reduce(x, group)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, None]:
        return dy, None


class Gather(torch.autograd.Function):
    """The chunks of all ranks; of the gradient, which is the same on all ranks, each takes its chunk."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, dimension: int, group: TPGroup) -> Tensor:
        ctx.dimension, ctx.group = dimension, group
        return all_gather(x, dimension, group)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, None, None]:
        return take_chunk(dy, ctx.dimension, ctx.group), None, None


class Scatter(torch.autograd.Function):
    """This rank's chunk; the chunks of the gradient are gathered."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, dimension: int, group: TPGroup) -> Tensor:
        ctx.dimension, ctx.group = dimension, group
        return take_chunk(x, dimension, group)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, None, None]:
        return all_gather(dy, ctx.dimension, ctx.group), None, None


class GatherCopy(torch.autograd.Function):
    """Gather, then Copy: each rank takes its chunk of the sum of the gradients."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, dimension: int, group: TPGroup) -> Tensor:
        ctx.dimension, ctx.group = dimension, group
        return all_gather(x, dimension, group)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, None, None]:
        return reduce_scatter(dy, ctx.dimension, ctx.group), None, None


class ReduceScatter(torch.autograd.Function):
    """Reduce, then Scatter: this rank's chunk of the sum."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, dimension: int, group: TPGroup) -> Tensor:
        ctx.dimension, ctx.group = dimension, group
        return reduce_scatter(x, dimension, group)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, None, None]:
        return all_gather(dy, ctx.dimension, ctx.group), None, None
