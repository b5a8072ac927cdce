"""The all-to-alls of expert parallelism: rows go to the processes that have their experts, and come back."""

from __future__ import annotations

from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from zeropipe.engine.torch_private import comm as torch_comm


class Exchange(Protocol):
    """Moves rows between the processes that experts are divided over; all of them make the same calls."""

    def exchange_counts(self, counts: Tensor) -> Tensor:
        """The number of rows that each process (first dimension) sends to each expert of this one (second)."""
        ...

    def exchange_rows(self, x: Tensor, sent: list[int], received: list[int]) -> Tensor:
        """The rows for this process, in the order of processes; the first sent[0] rows of x go to the first one."""
        ...


class ExpertGroup(NamedTuple):
    """The processes of an `ep` dimension, and this process's rank among them: an Exchange by torch's all-to-all."""

    name: str
    rank: int
    size: int

    @staticmethod
    def from_mesh(mesh: DeviceMesh) -> ExpertGroup:
        """The group of a mesh with one dimension."""
        return ExpertGroup(mesh.get_group().group_name, mesh.get_local_rank(), mesh.size())

    def exchange_counts(self, counts: Tensor) -> Tensor:
        even = [len(counts) // self.size] * self.size
        return exchange(counts, even, even, self.name).view(self.size, -1)

    def exchange_rows(self, x: Tensor, sent: list[int], received: list[int]) -> Tensor:
        return _ExchangeRows.apply(x, sent, received, self.name)


@torch.library.custom_op("zeropipe::exchange", mutates_args=())
def exchange(x: Tensor, sent: list[int], received: list[int], group: str) -> Tensor:
    """One all-to-all of rows; an operator, so that selective checkpointing can keep its result."""
    return torch_comm.exchanged(x, sent, received, group)


@exchange.register_fake
def _(x: Tensor, sent: list[int], received: list[int], group: str) -> Tensor:
    return x.new_empty(sum(received), *x.shape[1:])


class _ExchangeRows(torch.autograd.Function):
    """An all-to-all of rows; their gradients go the way back."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, sent: list[int], received: list[int], group: str) -> Tensor:
        ctx.sent, ctx.received, ctx.group = sent, received, group
        return exchange(x, sent, received, group)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, None, None, None]:
        return exchange(dy, ctx.received, ctx.sent, ctx.group), None, None, None
