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

    def exchange_rows(self, x: Tensor, splits: Tensor, num_rows: int | None = None) -> Tensor:
        """The rows for this process, in the order of processes; the first splits[0, 0] rows of x go to the first one.

        `splits` is what `read_splits` returns, or that with its two rows exchanged for the way back. Rows of x after
        the last that is sent stay here. `num_rows`: how many to return, the last of them zeros if fewer arrive.
        """
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
        even = torch.full((2, self.size), len(counts) // self.size, device="cpu")
        return exchange(counts, even, len(counts), self.name).view(self.size, -1)

    def exchange_rows(self, x: Tensor, splits: Tensor, num_rows: int | None = None) -> Tensor:
        return _ExchangeRows.apply(x, splits, num_rows, self.name)


# Operators, so that selective checkpointing can keep their results, and compiled blocks stay one graph. The numbers of
# rows that go to and come from each process are a tensor in CPU memory, which is read inside: in a graph, the number of
# rows that arrive is then one unknown size, and a device is waited for once.


@torch.library.custom_op("zeropipe::read_splits", mutates_args=())
def read_splits(counts: Tensor, arriving: Tensor) -> Tensor:
    """The numbers of rows that this process sends to each process, and gets from each, in CPU memory."""
    return torch.stack([counts.view_as(arriving).sum(1), arriving.sum(1)]).cpu()


@read_splits.register_fake
def _(counts: Tensor, arriving: Tensor) -> Tensor:
    return torch.empty(2, arriving.shape[0], dtype=torch.int64, device="cpu")


@torch.library.custom_op("zeropipe::exchange", mutates_args=())
def exchange(x: Tensor, splits: Tensor, num_rows: int | None, group: str) -> Tensor:
    """One all-to-all of rows: splits[0, i] go to process i, splits[1, i] come from it; then zeros, up to `num_rows`."""
    sent, received = splits.tolist()
    rows = torch_comm.exchanged(x[: sum(sent)], sent, received, group)
    if num_rows is None or num_rows == len(rows):
        return rows
    return torch.cat([rows, rows.new_zeros(num_rows - len(rows), *rows.shape[1:])])


@exchange.register_fake
def _(x: Tensor, splits: Tensor, num_rows: int | None, group: str) -> Tensor:
    if num_rows is None:
        num_rows = torch.library.get_ctx().new_dynamic_size()
    return x.new_empty(num_rows, *x.shape[1:])


class _ExchangeRows(torch.autograd.Function):
    """An all-to-all of rows; their gradients go the way back."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, splits: Tensor, num_rows: int | None, group: str) -> Tensor:
        ctx.save_for_backward(splits)
        ctx.num_rows, ctx.group = len(x), group
        return exchange(x, splits, num_rows, group)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, None, None, None]:
        (splits,) = ctx.saved_tensors
        return exchange(dy, splits.flip(0), ctx.num_rows, ctx.group), None, None, None
