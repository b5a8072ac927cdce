"""The connections of one rank: a gloo group over all ranks for control, and one 2-rank group per edge for tensors."""

from __future__ import annotations

import struct
import threading
import time
import weakref
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from zeropipe.engine.comm.channels import Channel
from zeropipe.engine.comm.faults import AbortableStore, PeerLost, StoreLost, is_transport_error, transport_reason
from zeropipe.engine.comm.heartbeat import EVERYONE
from zeropipe.engine.comm.ranks import Ranks, default_store, rendezvous_error
from zeropipe.engine.comm.threads import ReceiveThread
from zeropipe.engine.layout import Layout
from zeropipe.engine.torch_private import comm as torch_comm
from zeropipe.errors import ConfigError, EngineError

SLOT_BYTES = 2048  # exchanged values up to this size need one collective
DISCONNECT_TAG, PROBE_TAG = 3, 4  # of receives that are never answered
ABORT_TIMEOUT_S, ABORT_TIMEOUT_CONNECTING_S = 20.0, 2.0  # for NCCL to abort groups; while some are connecting
FIND_LOST_S = 10.0  # at most, to find which connection broke

_aborted: weakref.WeakSet[dist.ProcessGroup] = weakref.WeakSet()  # torch's own groups that a Communicator has aborted


def _order_edges(edges: Iterable[tuple[int, int]]) -> list[tuple[int, int]]:
    """The edges in an order all ranks share, in rounds of disjoint edges, which connect at the same time."""
    next_round: Counter[int] = Counter()
    found = []
    for a, b in sorted(set(edges)):
        number = max(next_round[a], next_round[b])
        next_round[a] = next_round[b] = number + 1
        found.append((number, a, b))
    return [(a, b) for _, a, b in sorted(found)]


class Communicator(Ranks):
    """Connections to the other ranks, exchanges and groups over them, and how they break when a rank fails."""

    def __init__(self, layout: Layout, device: torch.device, timeout: float) -> None:
        if any(group in _aborted for group in layout.stage_groups):
            raise ConfigError("the mesh was aborted when an Engine on it failed: restart the processes")
        self.layout, self.device = layout, device
        self.is_nccl = device.type == "cuda" and "cuda:nccl" in dist.get_backend_config()
        # a CUDA kernel may wait for any rank, torch's own groups for the ranks that share stages with this one
        near = range(layout.size) if self.is_nccl else layout.ranks_along(layout.stage_dims)
        self.implicit_peers = tuple(rank for rank in near if rank != layout.rank)
        self._gloo_devices: list[Any] = []  # shared by all gloo groups
        self._groups: dict[tuple[str, tuple[int, ...]], Any] = {}
        self._receive_threads: list[ReceiveThread] = []
        self.control: Any = None
        self._pipeline_control: Any = None  # where there are several pipelines
        try:
            super().__init__(default_store, layout.global_ranks, layout.rank, timeout, "created its Engine")
        except StoreLost as lost:
            raise rendezvous_error(lost, layout.global_ranks, layout.rank, "set-up") from None
        try:
            self.control = self._create_group("control", tuple(range(self.size)), nccl=False)
            torch_comm.lower_gloo_priority()
            self._wait_until_connected()
            self._watchdog.monitor_next_rank(self)
            if self.is_nccl and layout.stage_groups:  # NCCL would connect them inside the first step otherwise
                self._run_first(self._sum_in_mesh, self.implicit_peers)
        except BaseException as error:
            explained = self.board.explain(error, self.status.where)
            self.abort()
            self.close()
            if not isinstance(error, Exception):
                raise
            raise explained from (None if isinstance(error, PeerLost) else error)

    def _wait_until_connected(self) -> None:
        """Wait for all ranks over the store: one whose connecting failed has closed its connections."""
        with self.status.waiting_for(self.peers):
            self.board.set(f"connected/{self.rank}")
            self.board.wait(*(f"connected/{rank}" for rank in range(self.size)))

    def _sum_in_mesh(self) -> None:
        for group in self.layout.stage_groups:
            dist.all_reduce(torch.zeros(1, device=self.device), group=group)

    # exchanges

    def _gather(self, data: bytes) -> list[bytes]:
        lengths, slots = self._gather_slots(data, SLOT_BYTES)
        if max(lengths) > SLOT_BYTES:
            lengths, slots = self._gather_slots(data, max(lengths))
        return [slot[:length] for slot, length in zip(slots, lengths)]

    def _gather_slots(self, data: bytes, size: int) -> tuple[list[int], list[bytes]]:
        framed = struct.pack("<q", len(data)) + data[:size].ljust(size, b"\0")
        own = torch.frombuffer(bytearray(framed), dtype=torch.uint8)
        self.status.num_exchanges += 1
        with self.waiting_for(EVERYONE):
            gathered = torch_comm.allgather_bytes(self.control, self.size, own)
        slots = [bytes(slot.numpy()) for slot in gathered]
        return [struct.unpack_from("<q", slot)[0] for slot in slots], [slot[8:] for slot in slots]

    def broadcast(self, tensor: Tensor, root: int) -> None:
        """Broadcast the tensor of pipeline rank `root` into those of all ranks of its pipeline."""
        if len(self.layout.pipeline) == self.size:
            self.status.num_exchanges += 1
            with self.waiting_for(EVERYONE):
                torch_comm.broadcast(self.control, tensor, root)
            return
        if self._pipeline_control is None:  # on every rank of the pipeline at the same time
            name = f"pipeline/{'-'.join(map(str, self.layout.pipeline))}"
            self._pipeline_control = self._create_group(name, self.layout.pipeline, nccl=False)
        with self.waiting_for(tuple(rank for rank in self.layout.pipeline if rank != self.rank)):
            torch_comm.broadcast(self._pipeline_control, tensor, root)

    def broadcast_among(self, tensor: Tensor, root: int, ranks: tuple[int, ...]) -> None:
        """Broadcast the root's contiguous tensor into those of all `ranks`; they all call this, in one order."""
        data = tensor.reshape(-1).view(torch.uint8)
        if not data.numel():
            return
        group = self._get_group("weights", ranks)
        buffer = data if self.is_nccl else data.cpu()
        with self.waiting_for(tuple(rank for rank in ranks if rank != self.rank)):
            torch_comm.broadcast(group, buffer, ranks.index(root))
        if buffer is not data and self.rank != root:
            data.copy_(buffer)

    def send(self, tensor: Tensor, peer: int, tag: int) -> None:
        """Send a CPU tensor to one rank."""
        with self.waiting_for((peer,)):
            torch_comm.wait(self.control.send([tensor], peer, tag))

    def receive(self, tensor: Tensor, peer: int, tag: int) -> None:
        """Receive a CPU tensor from one rank."""
        with self.waiting_for((peer,)):
            torch_comm.wait(self.control.recv([tensor], peer, tag))

    @contextmanager
    def waiting_for(self, peers: tuple[int, ...]) -> Iterator[None]:
        """Around a wait for other ranks: it is in this rank's status, and a broken connection is a PeerLost."""
        with self.status.waiting_for(peers):
            try:
                yield
            except RuntimeError as error:
                if len(peers) > 1 or peers == EVERYONE:
                    disconnected = self._find_disconnected()
                    everyone = peers == EVERYONE
                    peers = disconnected if everyone else tuple(peer for peer in peers if peer in disconnected)
                raise PeerLost(peers, transport_reason(error)) from error

    def _find_disconnected(self) -> tuple[int, ...]:
        """The ranks whose connection is closed: the error of a collective does not name them."""
        found: list[int] = []
        for peer in self.peers:
            try:
                self.control.recv([torch.empty(1, device="cpu")], peer, PROBE_TAG)
            except RuntimeError:
                found.append(peer)
        return tuple(found)

    # groups

    def connect(self, edges: Iterable[tuple[int, int]], polls: bool = False) -> dict[tuple[int, int], Channel]:
        """Connect the directed edges of this rank, and use each once; all ranks call this with the same edges.

        Edges are pairs of pipeline ranks. `polls`: receivers ask whether a message has arrived.
        """
        channels = {}
        for source, target in _order_edges(edges):
            a, b = self.layout.pipeline[source], self.layout.pipeline[target]
            if self.rank not in (a, b):
                continue
            group, is_sender = self._get_group("edge", (a, b)), self.rank == a
            peer = b if is_sender else a
            self._run_first(lambda group=group, is_sender=is_sender: self._send_first(group, is_sender), (peer,))
            thread = None
            if polls and not is_sender and not self.is_nccl:
                thread = ReceiveThread(peer)
                self._receive_threads.append(thread)
            is_staged = self.device.type == "cuda" and not self.is_nccl
            channels[source, target] = Channel(
                group, peer, int(is_sender), self.control, is_staged, self.device, self.status, thread
            )
        return channels

    def _run_first(self, function: Callable[[], None], peers: tuple[int, ...]) -> None:
        """Run the first operation of a group, in which NCCL connects: it cannot be stopped there."""
        if not self.is_nccl:
            with self.waiting_for(peers):
                function()
            return

        def run() -> None:
            torch.cuda.set_device(self.device)  # a new thread has the first GPU
            function()
            torch.cuda.synchronize(self.device)

        self.call(run, peers)

    def _send_first(self, group: Any, is_sender: bool) -> None:
        tensor = torch.zeros(1, device=self.device if self.is_nccl else "cpu")
        work = group.send([tensor], 1, 0) if is_sender else group.recv([tensor], 0, 0)
        if self.is_nccl:
            work.wait()
        else:
            torch_comm.wait(work)

    def sum_group(self, ranks: tuple[int, ...]) -> SumGroup:
        """A connected group for sums over `ranks`; each of them calls this, in the same order."""
        group, peers = self._get_group("sum", ranks), tuple(rank for rank in ranks if rank != self.rank)
        if self.is_nccl:  # gloo connects when the group is created
            self._run_first(lambda: torch_comm.allreduce_sum(group, torch.zeros(1, device=self.device)), peers)
        return SumGroup(self, group, peers)

    def _get_group(self, use: str, ranks: tuple[int, ...]) -> Any:
        if (use, ranks) not in self._groups:
            created = self._create_group(f"{use}/{'-'.join(map(str, ranks))}", ranks, self.is_nccl)
            with self._lock:
                if self.closed:
                    raise PeerLost((), "stopped in set-up")
                self._groups[use, ranks] = created
        return self._groups[use, ranks]

    def _create_group(self, name: str, ranks: tuple[int, ...], nccl: bool) -> Any:
        """A new group; all its ranks call this."""
        store, own, size = AbortableStore(self.board, name), ranks.index(self.rank), len(ranks)

        def create() -> Any:
            if nccl:
                store.set(f"here/{own}", b"")
                store.wait([f"here/{rank}" for rank in range(size)])
                own_store = dist.PrefixStore(f"{self.name}/{name}", torch_comm.default_store())
                return torch_comm.nccl_group(own_store, own, size)
            self._gloo_devices = self._gloo_devices or torch_comm.gloo_devices()
            return torch_comm.gloo_group(store, own, size, self.connect_timeout, self._gloo_devices)

        return self.call(create, tuple(rank for rank in ranks if rank != self.rank))

    # faults and the end

    def _break_connections(self) -> None:
        """Abort this rank's groups, torch's own groups of the mesh too: other ranks may wait for this one in them."""
        groups = [self.control, self._pipeline_control, *self._groups.values()]
        for group in self.layout.stage_groups:
            _aborted.add(group)
            groups += torch_comm.backends(group)
        # a group that is still connecting cannot be aborted
        timeout = ABORT_TIMEOUT_CONNECTING_S if self._running_calls else ABORT_TIMEOUT_S
        torch_comm.abort([group for group in groups if group is not None], timeout)

    def explain(self, error: BaseException, where: str) -> EngineError:
        """The error that every rank raises for this one; where torch's own groups broke, it names the lost ranks."""
        is_in_mesh = bool(self.implicit_peers) and is_transport_error(error)
        return self.board.explain(self._find_lost(error) if is_in_mesh else error, where)

    def _find_lost(self, error: BaseException) -> PeerLost:
        end = time.monotonic() + FIND_LOST_S
        lost: tuple[int, ...] = ()
        with suppress(StoreLost):
            while not lost and self.board.read_error() is None and time.monotonic() < end:
                time.sleep(0.01)  # the connections of a process that is gone close one by one
                lost = () if self.closed else self._find_disconnected()
        return PeerLost(lost, transport_reason(error))

    def synchronize(self) -> None:
        """Wait until all ranks have received what was sent on NCCL: deleting a group stops its transfers."""
        with suppress(PeerLost):
            torch.cuda.synchronize(self.device)
            self.exchange(None)

    def wait_for_disconnect(self, peer: int) -> None:
        """Wait until the process of `peer` is gone, or this communicator closes: RuntimeError then."""
        torch_comm.wait(self.control.recv([torch.empty(1, device="cpu")], peer, DISCONNECT_TAG))

    def _drop_connections(self) -> None:
        if not self.closed and self.control is not None:
            torch_comm.abort_gloo(self.control)  # ends wait_for_disconnect
        self._groups.clear()
        self._gloo_devices.clear()
        self.control = self._pipeline_control = None

    def close(self, more: Iterable[threading.Thread] = ()) -> None:
        """Close the connections and join the threads, `more` too. After a successful run the other ranks learn it."""
        for thread in self._receive_threads:
            thread.close()
        super().close((*(thread.thread for thread in self._receive_threads), *more))


class SumGroup:
    """Sums over some ranks."""

    def __init__(self, comm: Communicator, group: Any, peers: tuple[int, ...]) -> None:
        self._comm, self._group, self._peers = comm, group, peers

    def sum_(self, tensor: Tensor) -> None:
        """Sum the tensors of all ranks, in place."""
        with self._comm.waiting_for(self._peers):
            torch_comm.allreduce_sum(self._group, tensor)
