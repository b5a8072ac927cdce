"""The connections of one rank: a gloo group over the pipeline for words, and one 2-rank group per edge for tensors."""

from __future__ import annotations

import contextlib
import pickle
import struct
from collections import Counter
from collections.abc import Iterable
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from zeropipe.engine import torch_private
from zeropipe.engine.comm.edges import Wire
from zeropipe.engine.comm.faults import Board, PeerLost, reason

SLOT = 2048  # bytes of an exchanged value that cost one collective only
LISTEN_TAG = 3  # nothing is ever sent with it

_pipelines: Counter[tuple[int, ...]] = Counter()


def rounds(edges: Iterable[tuple[int, int]]) -> list[tuple[int, int]]:
    """The edges in an order all ranks share, in rounds of disjoint edges, so that they connect side by side."""
    free: Counter[int] = Counter()
    placed = []
    for a, b in sorted(set(edges)):
        turn = max(free[a], free[b])
        free[a] = free[b] = turn + 1
        placed.append((turn, a, b))
    return [(a, b) for _, a, b in sorted(placed)]


class Fabric:
    """Who this rank talks to, and how it stops talking when something fails."""

    def __init__(self, group: dist.ProcessGroup | None, device: torch.device, timeout: float) -> None:
        self.rank, self.size = dist.get_rank(group), dist.get_world_size(group)
        self.device, self._timeout = device, timeout
        self.nccl = device.type == "cuda" and "cuda:nccl" in dist.get_backend_config(group)
        members = tuple(dist.get_process_group_ranks(group if group is not None else dist.group.WORLD))
        # every rank makes its pipelines in the same order, so the count names this one
        name = f"zeropipe/{'-'.join(map(str, members))}/{_pipelines[members]}"
        _pipelines[members] += 1
        self._store = dist.PrefixStore(name, torch_private.default_store())
        # a store of its own: one that waits for a key lets nobody else in
        self.board = Board(torch_private.clone(self._store), self.rank)
        self.control = torch_private.gloo_group(self._store, self.rank, self.size, timeout)
        self._groups: dict[tuple[str, tuple[int, ...]], Any] = {}
        self.closed = False

    def exchange(self, value: object) -> list[Any]:
        """Everybody's value, in rank order."""
        data = pickle.dumps(value)
        lengths, payload = self._gather(data, SLOT)
        if max(lengths) > SLOT:
            lengths, payload = self._gather(data, max(lengths))
        return [pickle.loads(piece[:length]) for piece, length in zip(payload, lengths)]

    def _gather(self, data: bytes, room: int) -> tuple[list[int], list[bytes]]:
        framed = struct.pack("<q", len(data)) + data[:room].ljust(room, b"\0")
        mine = torch.frombuffer(bytearray(framed), dtype=torch.uint8)
        try:
            pieces = [bytes(piece.numpy()) for piece in torch_private.allgather_bytes(self.control, self.size, mine)]
        except RuntimeError as error:
            raise PeerLost(None, reason(error)) from error  # a collective does not say who is missing
        return [struct.unpack_from("<q", piece)[0] for piece in pieces], [piece[8:] for piece in pieces]

    def connect(self, edges: Iterable[tuple[int, int]]) -> dict[tuple[int, int], Wire]:
        """The directed edges of this rank, connected and tried out; all ranks call this with the same edges."""
        wires = {}
        for a, b in rounds(edges):
            if self.rank not in (a, b):
                continue
            group = self._group("edge", (a, b))
            peer = b if self.rank == a else a
            staged = self.device.type == "cuda" and not self.nccl
            wires[a, b] = Wire(group, peer, int(self.rank == a), self.control, staged, self.device, {})
            self._try_out(group, sending=self.rank == a)
        return wires

    def _try_out(self, group: Any, sending: bool) -> None:
        word = torch.zeros(1, device=self.device if self.nccl else "cpu")
        (group.send([word], 1, 0) if sending else group.recv([word], 0, 0)).wait()
        if self.nccl:
            torch.cuda.synchronize(self.device)

    def summing_group(self, ranks: tuple[int, ...]) -> Any:
        """A group for sums over some ranks, tried out; every one of them calls this, in the same order."""
        group = self._group("sum", ranks)
        if self.nccl:  # gloo is connected as soon as it is made
            torch_private.allreduce_sum(group, torch.zeros(1, device=self.device))
            torch.cuda.synchronize(self.device)
        return group

    def _group(self, use: str, ranks: tuple[int, ...]) -> Any:
        if (use, ranks) not in self._groups:
            store = dist.PrefixStore(f"{use}/{'-'.join(map(str, ranks))}", self._store)
            make = torch_private.nccl_group if self.nccl else torch_private.gloo_group
            self._groups[use, ranks] = make(store, ranks.index(self.rank), len(ranks), self._timeout)
        return self._groups[use, ranks]

    def abort(self) -> None:
        """Break every connection, so that the others stop waiting for this rank."""
        if self.closed:
            return
        self.closed = True
        torch_private.abort_gloo(self.control)
        if self.nccl:
            torch_private.abort_nccl(list(self._groups.values()))
            return
        for group in self._groups.values():
            torch_private.abort_gloo(group)

    def settle(self) -> None:
        """Wait until everything sent on NCCL is received by everybody: to drop a group stops its transfers."""
        with contextlib.suppress(PeerLost):
            torch.cuda.synchronize(self.device)
            self.exchange(None)

    def listen(self, peer: int) -> None:
        """Wait until the process of `peer` is gone, or this fabric closes: RuntimeError then."""
        self.control.recv([torch.empty(1)], peer, LISTEN_TAG).wait(timedelta(days=365))

    def close(self) -> None:
        """Let go of the connections after a good run."""
        if self.nccl and not self.closed:
            torch_private.abort_gloo(self.control)  # the watchdog listens on it
        self.closed = True
        self._groups.clear()
        self.control = None
