"""The all-to-alls of expert parallelism: rows go to the processes that have their experts, and come back."""

from __future__ import annotations

from functools import cache
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from zeropipe.engine.backward import turns
from zeropipe.engine.backward.exchange_times import COUNTS, RETURN, timed_exchange
from zeropipe.engine.backward.turn_times import COMBINE, DISPATCH
from zeropipe.engine.torch_private import comm as torch_comm


class Exchange(Protocol):
    """Moves rows between the processes that experts are divided over; all of them make the same calls."""

    rank: int
    size: int
    once_per_process: bool  # a token goes once to each process that has some of its experts, not once for each expert

    def exchange_counts(self, counts: Tensor, rows: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """The counts that each process has for this one; a row of `counts` is for one process.

        `rows` are what `exchange_rows` sends next: they are computed by now. The first column has numbers of rows, the
        others what experts have of them. Also returns, in CPU memory, the numbers of rows that this process sends to
        each process and gets from each, and what its experts get in total.
        """
        ...

    def exchange_rows(self, x: Tensor, splits: Tensor, num_rows: int | None = None) -> Tensor:
        """The rows for this process, in the order of processes; the first splits[0, 0] rows of x go to the first one.

        `splits` is what `exchange_counts` returns, or that with its two rows exchanged for the way back. Rows of x
        after the last that is sent stay here. `num_rows`: how many to return, on the way back, the last of them zeros
        if fewer arrive.
        """
        ...


class ExpertGroup(NamedTuple):
    """The processes of an `ep` dimension, and this process's rank among them: an Exchange by torch's all-to-all."""

    name: str
    rank: int
    size: int
    once_per_process: bool = False

    @staticmethod
    def from_mesh(mesh: DeviceMesh, once_per_process: bool = False) -> ExpertGroup:
        """The group of a mesh with one dimension."""
        return ExpertGroup(mesh.get_group().group_name, mesh.get_local_rank(), mesh.size(), once_per_process)

    def exchange_counts(self, counts: Tensor, rows: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        return exchange_counts(counts, rows.detach(), self.name)

    def exchange_rows(self, x: Tensor, splits: Tensor, num_rows: int | None = None) -> Tensor:
        return _ExchangeRows.apply(x, splits, num_rows, self.name)


# Operators, so that selective checkpointing can keep their results, and compiled blocks stay one graph. The numbers of
# rows that go to and come from each process are a tensor in CPU memory, which is read inside: in a graph, the number of
# rows that arrive is then one unknown size, and a device is waited for once. The other computation of an Overlap runs
# between the start and the end of each.


@torch.library.custom_op("zeropipe::exchange_counts", mutates_args=())
def exchange_counts(counts: Tensor, rows: Tensor, group: str) -> tuple[Tensor, Tensor, Tensor]:
    """One row of counts to each process: see `Exchange.exchange_counts`."""
    with timed_exchange(COUNTS):
        if counts.is_cuda:
            _mark_computed(rows)
        even = [1] * len(counts)
        pending = torch_comm.start_exchange(counts, even, even, group)
        if not counts.is_cuda:
            turns.turn()
        arriving = torch_comm.finish(pending)
        splits = torch.stack([counts[:, 0].long(), arriving[:, 0].long(), arriving[:, 1:].sum(1)])
        if counts.is_cuda:
            host = torch.empty_like(splits, device="cpu", pin_memory=True)
            host.copy_(splits, non_blocking=True)
            copied = torch.cuda.Event()
            copied.record()
            turns.turn()  # the device has work of the other computation when the host waits
            copied.synchronize()
            splits = host
    return arriving, splits[:2].clone(), splits[2].sum()


@exchange_counts.register_fake
def _(counts: Tensor, rows: Tensor, group: str) -> tuple[Tensor, Tensor, Tensor]:
    splits = torch.empty(2, len(counts), dtype=torch.int64, device="cpu")
    return torch.empty_like(counts), splits, torch.empty((), dtype=torch.int64, device="cpu")


@torch.library.custom_op("zeropipe::exchange", mutates_args=())
def exchange(x: Tensor, splits: Tensor, num_rows: int | None, group: str, turn_first: bool = False) -> Tensor:
    """One all-to-all of rows: splits[0, i] go to process i, splits[1, i] come from it; then zeros, up to `num_rows`.

    `turn_first`: the other computation also runs before it starts.
    """
    if turn_first:
        turns.turn(is_waiting=False)
    sent, received = splits.tolist()
    message = DISPATCH if turn_first or num_rows is None else COMBINE
    with timed_exchange(RETURN if turn_first else message):
        pending = _start(x[: sum(sent)], sent, received, group)
        turns.turn(message=message)
        rows = torch_comm.finish(pending)
    turns.resume(message)
    if num_rows is None or num_rows == len(rows):
        return rows
    return torch.cat([rows, rows.new_zeros(num_rows - len(rows), *rows.shape[1:])])


def _mark_computed(rows: Tensor) -> None:
    """Remember when these rows are computed, for their dispatch by one of two computations."""
    if turns.running() is not None:
        computed = torch.cuda.Event()
        computed.record()
        turns.set_computed(rows.data_ptr(), computed)


def _start(x: Tensor, sent: list[int], received: list[int], group: str) -> Tensor:
    """Start an exchange of rows.

    What was launched since the rows were computed, while the host waited for counts, is of the other computation: the
    exchange does not wait for it.
    """
    computed = turns.pop_computed(x.data_ptr()) if x.is_cuda else None
    if computed is None:
        return torch_comm.start_exchange(x, sent, received, group)
    stream = _dispatch_stream(x.device)
    stream.wait_event(computed)
    with torch.cuda.stream(stream):
        pending = torch_comm.start_exchange(x, sent, received, group)
    pending.record_stream(torch.cuda.current_stream())  # its memory is of the other stream
    return pending


@cache
def _dispatch_stream(device: torch.device) -> torch.cuda.Stream:
    return torch.cuda.Stream(device)


@exchange.register_fake
def _(x: Tensor, splits: Tensor, num_rows: int | None, group: str, turn_first: bool = False) -> Tensor:
    if num_rows is None:
        num_rows = torch.library.get_ctx().new_dynamic_size()
    return x.new_empty(num_rows, *x.shape[1:])


class _ExchangeRows(torch.autograd.Function):
    """An all-to-all of rows; their gradients go the way back."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, splits: Tensor, num_rows: int | None, group: str) -> Tensor:
        ctx.save_for_backward(splits)
        ctx.num_rows, ctx.group, ctx.is_dispatch = len(x), group, num_rows is None
        return exchange(x, splits, num_rows, group)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, None, None, None]:
        (splits,) = ctx.saved_tensors
        # With a turn before a dispatch's way back, a layer has three turns in each direction, and both computations
        # change at the same points: after counts, dispatch and combine of one, combine, experts and dispatch of the
        # other one's backward.
        return exchange(dy, splits.flip(0), ctx.num_rows, ctx.group, ctx.is_dispatch), None, None, None
