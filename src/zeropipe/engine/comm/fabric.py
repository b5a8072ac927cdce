"""The connections of one rank: a gloo group over all ranks for words, and one 2-rank group per edge for tensors."""

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

from zeropipe.engine.comm.edges import Wire
from zeropipe.engine.comm.faults import AbortableStore, PeerLost, StoreLost, is_closed, reason
from zeropipe.engine.comm.listener import Listener
from zeropipe.engine.comm.pulse import EVERYONE
from zeropipe.engine.comm.ranks import Ranks, default_store, unmet
from zeropipe.engine.layout import Layout
from zeropipe.engine.torch_private import comm as torch_comm
from zeropipe.errors import ConfigError, EngineError

SLOT = 2048  # bytes of an exchanged value that cost one collective only
LISTEN_TAG = 3  # nothing is ever sent with it
PROBE_TAG = 4  # nor with this
ABORTING, CONNECTING = 20.0, 2.0  # seconds for NCCL to abort groups, and where some of them may not be connected
LATER = 10.0  # seconds that a watchdog may take longer than its time-out

_broken: weakref.WeakSet[dist.ProcessGroup] = weakref.WeakSet()  # torch's own groups that an abort has stopped


def rounds(edges: Iterable[tuple[int, int]]) -> list[tuple[int, int]]:
    """The edges in an order all ranks share, in rounds of disjoint edges, so that they connect side by side."""
    free: Counter[int] = Counter()
    placed = []
    for a, b in sorted(set(edges)):
        turn = max(free[a], free[b])
        free[a] = free[b] = turn + 1
        placed.append((turn, a, b))
    return [(a, b) for _, a, b in sorted(placed)]


class Fabric(Ranks):
    """Who this rank talks to, and how it stops talking when something fails."""

    def __init__(self, layout: Layout, device: torch.device, timeout: float) -> None:
        if any(group in _broken for group in layout.groups):
            raise ConfigError("the mesh was broken when an Engine on it failed: start the processes anew")
        self.layout, self.device = layout, device
        self.nccl = device.type == "cuda" and "cuda:nccl" in dist.get_backend_config()
        # inside a kernel this rank waits for anybody, inside torch's own groups for those that share its stages
        near = range(layout.size) if self.nccl else layout.plane(layout.shares_stages)
        self.unsaid = tuple(rank for rank in near if rank != layout.rank)
        self._devices: list[Any] = []  # of all gloo groups
        self._groups: dict[tuple[str, tuple[int, ...]], Any] = {}
        self._listeners: list[Listener] = []
        self.control: Any = None
        self._words: Any = None  # of this pipeline only, where there are several
        try:
            super().__init__(default_store, layout.members, layout.rank, timeout, "made its Engine")
        except StoreLost as lost:
            raise unmet(lost, layout.members, layout.rank, "set-up") from None
        try:
            self.control = self._connected("control", tuple(range(self.size)), nccl=False)
            torch_comm.calm_gloo()
            self._meet("connected")  # one whose making failed has closed connections without a word
            self._watchdog.listen(self)
            self._try_out_mesh()
        except BaseException as error:
            explained = self.board.explain(error, self.place.where)
            self.abort()
            self.close()
            if not isinstance(error, Exception):
                raise
            raise explained from (None if isinstance(error, PeerLost) else error)

    # words

    def _gather(self, data: bytes) -> list[bytes]:
        lengths, pieces = self._gather_slots(data, SLOT)
        if max(lengths) > SLOT:
            lengths, pieces = self._gather_slots(data, max(lengths))
        return [piece[:length] for piece, length in zip(pieces, lengths)]

    def _gather_slots(self, data: bytes, room: int) -> tuple[list[int], list[bytes]]:
        framed = struct.pack("<q", len(data)) + data[:room].ljust(room, b"\0")
        mine = torch.frombuffer(bytearray(framed), dtype=torch.uint8)
        self.place.round += 1
        with self.waiting(EVERYONE):
            pieces = torch_comm.allgather_bytes(self.control, self.size, mine)
        heads = [bytes(piece.numpy()) for piece in pieces]
        return [struct.unpack_from("<q", head)[0] for head in heads], [head[8:] for head in heads]

    def broadcast(self, tensor: Tensor, root: int) -> None:
        """The tensor of place `root` in the pipeline, in the tensors of all its ranks."""
        if len(self.layout.pipeline) == self.size:
            self.place.round += 1
            with self.waiting(EVERYONE):
                torch_comm.broadcast(self.control, tensor, root)
            return
        name = f"words/{'-'.join(map(str, self.layout.pipeline))}"
        if self._words is None:  # every rank of the pipeline comes here at the same time
            self._words = self._connected(name, self.layout.pipeline, nccl=False)
        with self.waiting(tuple(rank for rank in self.layout.pipeline if rank != self.rank)):
            torch_comm.broadcast(self._words, tensor, root)

    def hand_out(self, tensor: Tensor, root: int, ranks: tuple[int, ...]) -> None:
        """The root's tensor, which is contiguous, in the tensors of all `ranks`; they all call this, in one order."""
        data = tensor.reshape(-1).view(torch.uint8)
        if not data.numel():
            return
        group = self._group("weights", ranks)
        passed = data if self.nccl else data.cpu()
        with self.waiting(tuple(rank for rank in ranks if rank != self.rank)):
            torch_comm.broadcast(group, passed, ranks.index(root))
        if passed is not data and self.rank != root:
            data.copy_(passed)

    def send(self, tensor: Tensor, peer: int, tag: int) -> None:
        """A word to one rank."""
        with self.waiting((peer,)):
            torch_comm.wait(self.control.send([tensor], peer, tag))

    def receive(self, tensor: Tensor, peer: int, tag: int) -> None:
        """A word from one rank."""
        with self.waiting((peer,)):
            torch_comm.wait(self.control.recv([tensor], peer, tag))

    @contextmanager
    def waiting(self, peers: tuple[int, ...]) -> Iterator[None]:
        """Around a wait for other ranks: the watchdog knows of it, and a broken connection is PeerLost."""
        self.place.waits = peers
        try:
            yield
        except RuntimeError as error:
            if len(peers) > 1 or peers == EVERYONE:  # it was one of them
                gone = self._gone()
                peers = gone if peers == EVERYONE else tuple(peer for peer in peers if peer in gone)
            raise PeerLost(peers, reason(error)) from error
        finally:
            self.place.waits = ()

    def _gone(self) -> tuple[int, ...]:
        """Whose connection is closed: a collective that failed does not say."""
        found: list[int] = []
        for peer in range(self.size):
            if peer != self.rank:
                try:
                    self.control.recv([torch.empty(1, device="cpu")], peer, PROBE_TAG)
                except RuntimeError:
                    found.append(peer)
        return tuple(found)

    # groups

    def connect(self, edges: Iterable[tuple[int, int]], listen: bool = False) -> dict[tuple[int, int], Wire]:
        """The directed edges of this rank, connected and tried out; all ranks call this with the same edges.

        Edges are pairs of places in the pipeline. `listen`: it can be asked whether a message is here.
        """
        wires = {}
        for place, other in rounds(edges):
            a, b = self.layout.pipeline[place], self.layout.pipeline[other]
            if self.rank not in (a, b):
                continue
            group = self._group("edge", (a, b))
            peer = b if self.rank == a else a
            staged = self.device.type == "cuda" and not self.nccl
            self._try_out(lambda group=group, sends=self.rank == a: self._word(group, sends), (peer,))
            listener = None
            if listen and self.rank == b and not self.nccl:
                listener = Listener(peer)
                self._listeners.append(listener)
            wires[place, other] = Wire(
                group, peer, int(self.rank == a), self.control, staged, self.device, self.place, {}, listener
            )
        return wires

    def _try_out(self, exchange: Callable[[], None], peers: tuple[int, ...]) -> None:
        """The first exchange with some ranks. NCCL connects them in it, where nobody could stop it."""
        if not self.nccl:
            with self.waiting(peers):
                exchange()
            return

        def apart() -> None:
            torch.cuda.set_device(self.device)  # a thread starts on the first GPU
            exchange()
            torch.cuda.synchronize(self.device)

        self.call(apart, peers)

    def _word(self, group: Any, sends: bool) -> None:
        word = torch.zeros(1, device=self.device if self.nccl else "cpu")
        work = group.send([word], 1, 0) if sends else group.recv([word], 0, 0)
        if self.nccl:
            work.wait()
        else:
            torch_comm.wait(work)

    def summing_group(self, ranks: tuple[int, ...]) -> Summing:
        """A group for sums over some ranks, tried out; every one of them calls this, in the same order."""
        group, peers = self._group("sum", ranks), tuple(rank for rank in ranks if rank != self.rank)
        if self.nccl:  # gloo is connected as soon as it is made
            self._try_out(lambda: torch_comm.allreduce_sum(group, torch.zeros(1, device=self.device)), peers)
        return Summing(self, group, peers)

    def _group(self, use: str, ranks: tuple[int, ...]) -> Any:
        if (use, ranks) not in self._groups:
            made = self._connected(f"{use}/{'-'.join(map(str, ranks))}", ranks, self.nccl)
            with self._lock:
                if self.closed:
                    raise PeerLost((), "stopped in set-up")
                self._groups[use, ranks] = made
        return self._groups[use, ranks]

    def _connected(self, name: str, ranks: tuple[int, ...], nccl: bool) -> Any:
        """A new group; all its ranks call this."""
        store, own, size = AbortableStore(self.board, name), ranks.index(self.rank), len(ranks)

        def make() -> Any:
            if nccl:
                store.set(f"here/{own}", b"")
                store.wait([f"here/{rank}" for rank in range(size)])
                own_store = dist.PrefixStore(f"{self.name}/{name}", torch_comm.default_store())
                return torch_comm.nccl_group(own_store, own, size)
            self._devices = self._devices or torch_comm.gloo_devices()
            return torch_comm.gloo_group(store, own, size, self.connecting, self._devices)

        return self.call(make, tuple(rank for rank in ranks if rank != self.rank))

    def _try_out_mesh(self) -> None:
        """Connect torch's own groups of the mesh, which NCCL would else do inside the first step."""
        if self.nccl and self.layout.groups:
            self._try_out(self._sums_of_mesh, self.unsaid)

    def _sums_of_mesh(self) -> None:
        for group in self.layout.groups:
            dist.all_reduce(torch.zeros(1, device=self.device), group=group)

    def _meet(self, name: str) -> None:
        """Wait until all ranks are here."""
        self.place.waits = self.others
        self.board.note(f"{name}/{self.rank}")
        self.board.wait(*(f"{name}/{rank}" for rank in range(self.size)))
        self.place.waits = ()

    # the end

    def _break(self) -> None:
        """All of this rank's groups, those that torch made for the mesh too: others may wait for this rank in them."""
        groups = [self.control, self._words, *self._groups.values()]
        for group in self.layout.groups:
            _broken.add(group)
            groups += torch_comm.backends(group)
        # one that is still connecting cannot be aborted
        patience = CONNECTING if self._calls else ABORTING
        torch_comm.abort([group for group in groups if group is not None], patience)

    def explain(self, error: BaseException, where: str) -> EngineError:
        """The error every rank raises for this one; where torch's own groups broke, it says who is gone."""
        return self.board.explain(self._lost(error) if self.unsaid and is_closed(error) else error, where)

    def _lost(self, error: BaseException) -> PeerLost:
        end = time.monotonic() + LATER
        gone: tuple[int, ...] = ()
        with suppress(StoreLost):
            while not gone and self.board.read() is None and time.monotonic() < end:
                time.sleep(0.01)  # the connections of a process that is gone close one by one
                gone = () if self.closed else self._gone()
        return PeerLost(gone, reason(error))

    def settle(self) -> None:
        """Wait until everything sent on NCCL is received by everybody: to drop a group stops its transfers."""
        with suppress(PeerLost):
            torch.cuda.synchronize(self.device)
            self.exchange(None)

    def listen(self, peer: int) -> None:
        """Wait until the process of `peer` is gone, or this fabric closes: RuntimeError then."""
        torch_comm.wait(self.control.recv([torch.empty(1, device="cpu")], peer, LISTEN_TAG))

    def _drop(self) -> None:
        if not self.closed and self.control is not None:
            torch_comm.abort_gloo(self.control)  # the listener waits on it
        self._groups.clear()
        self._devices.clear()
        self.control = self._words = None

    def close(self, more: Iterable[threading.Thread] = ()) -> None:
        """Let go of the connections; after a good run, the others are told first. Threads have ended, `more` too."""
        for listener in self._listeners:
            listener.close()
        super().close((*(listener.thread for listener in self._listeners), *more))


class Summing:
    """Sums over some ranks."""

    def __init__(self, fabric: Fabric, group: Any, peers: tuple[int, ...]) -> None:
        self._fabric, self._group, self._peers = fabric, group, peers

    def add(self, tensor: Tensor) -> None:
        """The sum of everybody's tensor, in place."""
        with self._fabric.waiting(self._peers):
            torch_comm.allreduce_sum(self._group, tensor)
