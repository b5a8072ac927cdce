"""The connections of one rank: a gloo group over all ranks for words, and one 2-rank group per edge for tensors."""

from __future__ import annotations

import os
import pickle
import struct
import threading
import time
import weakref
from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from zeropipe.engine import torch_private
from zeropipe.engine.comm.edges import Wire
from zeropipe.engine.comm.faults import Board, Desk, Meeting, PeerLost, StoreLost, UnlikeCalls, is_closed, reason
from zeropipe.engine.comm.listener import Listener
from zeropipe.engine.comm.pulse import EVERYONE, Place
from zeropipe.engine.comm.threads import started, wait_for
from zeropipe.engine.comm.watchdog import Watchdog
from zeropipe.engine.layout import Layout
from zeropipe.errors import ConfigError, EngineError

SLOT = 2048  # bytes of an exchanged value that cost one collective only
LISTEN_TAG = 3  # nothing is ever sent with it
PROBE_TAG = 4  # nor with this
LATER = 10.0  # seconds that a watchdog may take longer than its time-out
AFTER_ALL, AFTER_A_FAULT = 10.0, 1.0  # seconds for threads to end

_pipelines: Counter[tuple[int, ...]] = Counter()
_broken: weakref.WeakSet[dist.ProcessGroup] = weakref.WeakSet()  # torch's own groups that an abort has stopped


_start = ""


def restarts() -> str:
    """How often torchrun has started these processes anew: its store still has the words of those before."""
    return os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")


def name_start(name: str) -> None:
    """Give this start of the job's processes a name that all of them share and no earlier start had.

    Agents on several machines do not count restarts alike, so who can ask all processes does better than `restarts`.
    """
    global _start
    _start = name


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
    """Who this rank talks to, and how it stops talking when something fails.

    Waits have no time-out of their own: the watchdog breaks the connections when there is a reason to, which it first
    writes on the board. So whoever fails in a wait finds the reason there.
    """

    def __init__(self, layout: Layout, device: torch.device, timeout: float) -> None:
        if any(group in _broken for group in layout.groups):
            raise ConfigError("the mesh was broken when an Engine on it failed: start the processes anew")
        self.layout, self.rank, self.size = layout, layout.rank, layout.size
        self.device, self._timeout = device, timeout
        self.nccl = device.type == "cuda" and "cuda:nccl" in dist.get_backend_config()
        members = layout.members
        # every rank makes its engines in the same order, so the count names this one
        name = f"zeropipe/{_start or restarts()}/{'-'.join(map(str, members))}/{_pipelines[members]}"
        _pipelines[members] += 1
        self._store = dist.PrefixStore(name, torch_private.default_store())
        # a store of its own: one that waits for a key lets nobody else in
        self._desk = Desk(torch_private.clone(self._store), min(10.0, max(2.0, timeout / 2)))
        self.board, self.place = Board(self._desk, self.rank, self.size), Place()
        # inside a kernel this rank waits for anybody, inside torch's own groups for those that share its stages
        near = range(self.size) if self.nccl else layout.plane(layout.shares_stages)
        self.unsaid = tuple(rank for rank in near if rank != self.rank)
        self._lock = threading.Lock()  # who breaks or drops connections holds it
        self._devices: list[Any] = []  # of all gloo groups
        self._groups: dict[tuple[str, tuple[int, ...]], Any] = {}
        self._listeners: list[Listener] = []
        self.control: Any = None
        self._words: Any = None  # of this pipeline only, where there are several
        self.closed = False
        self._watchdog = Watchdog(timeout)
        try:
            self._watchdog.start(self)
            self.control = self._connected("control", tuple(range(self.size)), nccl=False)
            torch_private.calm_gloo()
            self._meet("connected")  # one whose making failed has closed connections without a word
            self._watchdog.listen(self)
        except BaseException as error:
            explained = self.board.explain(error, self.place.where)
            self.abort()
            self.close()
            if not isinstance(error, Exception):
                raise
            raise explained from (None if isinstance(error, PeerLost) else error)

    # words

    def exchange(self, value: object) -> list[Any]:
        """Everybody's value, in rank order; UnlikeCalls if others have come here to do something else."""
        data = pickle.dumps((self.place.call, value))
        lengths, payload = self._gather(data, SLOT)
        if max(lengths) > SLOT:
            lengths, payload = self._gather(data, max(lengths))
        said = [pickle.loads(piece[:length]) for piece, length in zip(payload, lengths)]
        if len({call for call, _ in said if call is not None}) > 1:
            raise UnlikeCalls([call for call, _ in said])
        return [value for _, value in said]

    def _gather(self, data: bytes, room: int) -> tuple[list[int], list[bytes]]:
        framed = struct.pack("<q", len(data)) + data[:room].ljust(room, b"\0")
        mine = torch.frombuffer(bytearray(framed), dtype=torch.uint8)
        self.place.round += 1
        with self.waiting(EVERYONE):
            pieces = torch_private.allgather_bytes(self.control, self.size, mine)
        heads = [bytes(piece.numpy()) for piece in pieces]
        return [struct.unpack_from("<q", head)[0] for head in heads], [head[8:] for head in heads]

    def broadcast(self, tensor: Tensor, root: int) -> None:
        """The tensor of place `root` in the pipeline, in the tensors of all its ranks."""
        if len(self.layout.pipeline) == self.size:
            self.place.round += 1
            with self.waiting(EVERYONE):
                torch_private.broadcast(self.control, tensor, root)
            return
        name = f"words/{'-'.join(map(str, self.layout.pipeline))}"
        if self._words is None:  # every rank of the pipeline comes here at the same time
            self._words = self._connected(name, self.layout.pipeline, nccl=False)
        with self.waiting(tuple(rank for rank in self.layout.pipeline if rank != self.rank)):
            torch_private.broadcast(self._words, tensor, root)

    def hand_out(self, tensor: Tensor, root: int, ranks: tuple[int, ...]) -> None:
        """The root's tensor, which is contiguous, in the tensors of all `ranks`; they all call this, in one order."""
        data = tensor.reshape(-1).view(torch.uint8)
        if not data.numel():
            return
        group = self._group("weights", ranks)
        passed = data if self.nccl else data.cpu()
        with self.waiting(tuple(rank for rank in ranks if rank != self.rank)):
            torch_private.broadcast(group, passed, ranks.index(root))
        if passed is not data and self.rank != root:
            data.copy_(passed)

    def send(self, tensor: Tensor, peer: int, tag: int) -> None:
        """A word to one rank."""
        with self.waiting((peer,)):
            torch_private.wait(self.control.send([tensor], peer, tag))

    def receive(self, tensor: Tensor, peer: int, tag: int) -> None:
        """A word from one rank."""
        with self.waiting((peer,)):
            torch_private.wait(self.control.recv([tensor], peer, tag))

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
            with self.waiting((peer,)):
                self._try_out(group, sending=self.rank == a)
            listener = None
            if listen and self.rank == b and not self.nccl:
                listener = Listener(peer)
                self._listeners.append(listener)
            wires[place, other] = Wire(
                group, peer, int(self.rank == a), self.control, staged, self.device, self.place, {}, listener
            )
        return wires

    def _try_out(self, group: Any, sending: bool) -> None:
        word = torch.zeros(1, device=self.device if self.nccl else "cpu")
        work = group.send([word], 1, 0) if sending else group.recv([word], 0, 0)
        if self.nccl:
            work.wait()
            torch.cuda.synchronize(self.device)
        else:
            torch_private.wait(work)

    def summing_group(self, ranks: tuple[int, ...]) -> Summing:
        """A group for sums over some ranks, tried out; every one of them calls this, in the same order."""
        summing = Summing(self, self._group("sum", ranks), tuple(rank for rank in ranks if rank != self.rank))
        if self.nccl:  # gloo is connected as soon as it is made
            summing.add(torch.zeros(1, device=self.device))
            torch.cuda.synchronize(self.device)
        return summing

    def _group(self, use: str, ranks: tuple[int, ...]) -> Any:
        if (use, ranks) not in self._groups:
            made = self._connected(f"{use}/{'-'.join(map(str, ranks))}", ranks, self.nccl)
            with self._lock:
                if self.closed:
                    raise PeerLost((), "stopped in set-up")
                self._groups[use, ranks] = made
        return self._groups[use, ranks]

    def _connected(self, name: str, ranks: tuple[int, ...], nccl: bool) -> Any:
        """A new group; all its ranks call this.

        A thread of its own makes it: torch's way to connect cannot be stopped, but this rank can stop waiting for it.
        """
        self.place.waits = others = tuple(rank for rank in ranks if rank != self.rank)
        meeting, own, size = Meeting(self.board, name), ranks.index(self.rank), len(ranks)
        made: list[Any] = []
        done = threading.Event()

        def make() -> None:
            try:
                if nccl:
                    meeting.set(f"here/{own}", b"")
                    meeting.wait([f"here/{rank}" for rank in range(size)])
                    made.append(torch_private.nccl_group(dist.PrefixStore(name, self._store), own, size))
                else:
                    self._devices = self._devices or torch_private.gloo_devices()
                    made.append(torch_private.gloo_group(meeting, own, size, self._timeout, self._devices))
            except Exception as error:
                made.append(error)
            finally:
                done.set()

        started(f"making-{name}", make)
        while not done.wait(0.05):
            if self.board.read() is not None:
                raise PeerLost((), "another rank failed")
        if isinstance(made[0], RuntimeError):
            if size > 2:
                self._await_verdict()
            raise PeerLost(others if size == 2 else (), reason(made[0])) from made[0]
        if isinstance(made[0], Exception):
            raise made[0]
        self.place.waits = ()
        return made[0]

    def _await_verdict(self) -> None:
        """A group of many does not say who is to blame; the watchdog finds out."""
        end = time.monotonic() + self._timeout + LATER
        while self.board.read() is None and time.monotonic() < end:
            time.sleep(0.05)

    def _meet(self, name: str) -> None:
        """Wait until all ranks are here."""
        self.place.waits = tuple(rank for rank in range(self.size) if rank != self.rank)
        meeting = Meeting(self.board, name)
        meeting.set(str(self.rank), b"")
        meeting.wait([str(rank) for rank in range(self.size)])
        self.place.waits = ()

    # the end

    def abort(self) -> None:
        """Break every connection, so that nobody waits for this rank any more. Any thread may call it, at any time."""
        with self._lock:
            if self.closed:
                return
            self.closed = True
            self._break()

    def _break(self) -> None:
        """All of this rank's groups, those that torch made for the mesh too: others may wait for this rank in them."""
        groups = [self.control, self._words, *self._groups.values()]
        for group in self.layout.groups:
            _broken.add(group)
            groups += torch_private.backends(group)
        torch_private.abort(group for group in groups if group is not None)

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
        torch_private.wait(self.control.recv([torch.empty(1, device="cpu")], peer, LISTEN_TAG))

    def close(self, more: Iterable[threading.Thread] = ()) -> None:
        """Let go of the connections; after a good run, the others are told first. Threads have ended, `more` too."""
        self._watchdog.stop()
        patience = AFTER_A_FAULT if self.closed else AFTER_ALL
        if not self.closed:
            self.board.leave()
        with self._lock:  # an abort that has begun ends first
            if not self.closed and self.control is not None:
                torch_private.abort_gloo(self.control)  # the listener waits on it
            self.closed = True
            self._groups.clear()
            self._devices.clear()
            self.control = self._words = None
        for listener in self._listeners:
            listener.close()
        self._desk.close()
        own = (*self._watchdog.threads, *(listener.thread for listener in self._listeners), self._desk.thread)
        wait_for((*own, *more), patience)


class Summing:
    """Sums over some ranks."""

    def __init__(self, fabric: Fabric, group: Any, peers: tuple[int, ...]) -> None:
        self._fabric, self._group, self._peers = fabric, group, peers

    def add(self, tensor: Tensor) -> None:
        """The sum of everybody's tensor, in place."""
        with self._fabric.waiting(self._peers):
            torch_private.allreduce_sum(self._group, tensor)
