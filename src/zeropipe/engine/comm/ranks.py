"""Processes of a job that monitor each other over the job's store.

Set-up uses Ranks before there is an Engine: from the first contact with the store on, a rank that is gone, stopped or
cut off is named on all others. The Communicator of an Engine adds connections between the ranks.
"""

from __future__ import annotations

import hashlib
import pickle
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from types import TracebackType
from typing import Any, TypeVar

import torch.distributed as dist

from zeropipe.engine.comm.faults import (
    ErrorBoard,
    MismatchedCalls,
    PeerLost,
    StoreLost,
    StoreThread,
    describe_lost_store,
    transport_reason,
)  # fmt: skip
from zeropipe.engine.comm.heartbeat import EVERYONE, RankStatus, heartbeat_limit, ranks_text
from zeropipe.engine.comm.rendezvous import rendezvous
from zeropipe.engine.comm.threads import BackgroundCall, join_threads
from zeropipe.engine.comm.watchdog import Watchdog
from zeropipe.engine.torch_private import comm as torch_comm
from zeropipe.errors import EngineError

DEFAULT_TIMEOUT_S = 600.0
JOIN_TIMEOUT_S, JOIN_TIMEOUT_AFTER_FAULT_S = 10.0, 1.0
LINGER_S = 2.0  # the host of the store stays after a fault, so that other ranks can read the error
OPEN_MARGIN_S = 3.0  # a store may take longer to open than its own timeout, whose error says more
PROBE_S = 5.0  # without a heartbeat for this long, a rank is the one that is gone, where one is known to be

Result = TypeVar("Result")
_num_created: Counter[str] = Counter()  # Ranks of each set of members
_store_hosts: set[int] = set()  # the processes that are known to be on the machine of the store


class Ranks:
    """The processes `members`, of which this one is number `rank`. All of them create this, in the same order.

    Waits have no timeout of their own: the watchdog ends them, after it has posted the error on the board. So a rank
    that fails in a wait finds the error there. `open_store` returns a connection to the job's store. `goal` completes
    the error "rank 1 has not ..." for ranks that are missing, `hint` is the way out.
    """

    implicit_peers: tuple[int, ...] = ()

    def __init__(
        self,
        open_store: Callable[[], dist.Store],
        members: Sequence[int],
        rank: int,
        timeout: float,
        goal: str,
        hint: str = "",
    ) -> None:
        self.rank, self.size, self._timeout = rank, len(members), timeout
        self.status, self.closed = RankStatus(), False
        self._running_calls: list[threading.Thread] = []
        self._lock = threading.Lock()  # held while connections are broken or dropped
        self._watchdog = Watchdog(timeout)
        digest = hashlib.sha256(repr(tuple(members)).encode()).hexdigest()[:16]
        key = f"zeropipe/{digest}/{_num_created[digest]}"
        _num_created[digest] += 1
        self._store = StoreThread(open_store, timeout + OPEN_MARGIN_S, min(10.0, max(2.0, timeout / 2)))

        def describe_missing(missing: Sequence[int]) -> str:
            have = "have" if len(missing) > 1 else "has"
            line = f"{ranks_text(missing)} {have} not {goal}: rank {rank} waits for {timeout:g} s"
            return f"{line}; {hint}" if hint else line

        try:
            self.name, hosts = rendezvous(self._store, key, rank, self.size, timeout, describe_missing)
            _store_hosts.update(members[host] for host in hosts)
            self.board = ErrorBoard(self._store, self.name, rank, self.size, hosts)
            self._watchdog.start(self)
        except BaseException as error:
            if self._hosts_store and isinstance(error, EngineError):  # the other ranks read there which are missing
                time.sleep(LINGER_S)
            self._store.close()
            raise

    @property
    def peers(self) -> tuple[int, ...]:
        """All ranks but this one."""
        return tuple(rank for rank in range(self.size) if rank != self.rank)

    @property
    def _hosts_store(self) -> bool:
        return torch_comm.store_is_on_rank_0() and self.rank == 0

    @property
    def connect_timeout(self) -> float:
        """Seconds for gloo to connect: below the timeout, so that gloo's own error comes first."""
        return 0.8 * self._timeout

    def enter(self, name: str, busy: bool = False) -> None:
        """Begin another part of set-up, and publish it. `busy`: with long work of its own."""
        self.status.enter(name, busy)
        self._watchdog.publish(self, is_busy=busy)

    # exchanges

    def exchange(self, value: object) -> list[Any]:
        """The values of all ranks, in rank order; MismatchedCalls if ranks exchange in different calls."""
        everyone = [pickle.loads(data) for data in self._gather(pickle.dumps((self.status.call, value)))]
        if len({call for call, _ in everyone if call is not None}) > 1:
            raise MismatchedCalls([call for call, _ in everyone])
        return [value for _, value in everyone]

    def _gather(self, data: bytes) -> list[bytes]:
        """The data of all ranks, which the first rank collects."""
        self.status.num_exchanges += 1
        key, is_busy = f"exchange/{self.status.num_exchanges}", self.status.is_busy
        self.status.is_busy = False
        try:
            with self.status.waiting_for(EVERYONE):
                self.board.set(f"{key}/{self.rank}", data)
                if self.rank != 0:
                    self.board.wait(f"{key}/all")
                    found: list[bytes] = pickle.loads(self.board.get(f"{key}/all"))
                    return found
                self.board.wait(*(f"{key}/{rank}" for rank in range(self.size)))
                everyone = [self.board.get(f"{key}/{rank}") for rank in range(self.size)]
                self.board.set(f"{key}/all", pickle.dumps(everyone))
                self._delete_exchange(self.status.num_exchanges - 1)
                return everyone
        finally:
            self.status.is_busy = is_busy

    def _delete_exchange(self, number: int) -> None:
        """Delete the keys of an exchange: all ranks have reached the next one, so all have read them."""
        for rank in range(self.size if number else 0):
            self.board.delete(f"exchange/{number}/{rank}")
        if number:
            self.board.delete(f"exchange/{number}/all")

    def call(self, function: Callable[[], Result], peers: tuple[int, ...] | None = None) -> Result:
        """Return `function()`, which waits for `peers` (default: all) inside torch, where it cannot be stopped.

        It runs in a thread of its own, and this rank stops waiting for it when another one has failed or is lost.
        """
        peers = self.peers if peers is None else peers
        with self.status.waiting_for(peers):
            running = BackgroundCall(f"calling-{self.status.where}", function)
            self._running_calls.append(running.thread)
            try:
                while not running.wait(0.05):
                    if self.board.read_error() is not None:
                        raise PeerLost((), "another rank failed")
                self._running_calls.remove(running.thread)
                return running.result()
            except RuntimeError as error:
                if isinstance(error, EngineError):
                    raise
                if gone := self._find_silent(peers):
                    raise PeerLost(gone, transport_reason(error)) from error
                raise ConnectionError(transport_reason(error)) from error

    def _find_silent(self, peers: tuple[int, ...]) -> tuple[int, ...]:
        """The peers that are gone, which an error of torch does not name. PeerLost if another rank has posted them."""
        before = self.board.heartbeats()
        end = time.monotonic() + min(PROBE_S, heartbeat_limit(self._timeout))
        while time.monotonic() < end:
            if self.board.read_error() is not None:
                raise PeerLost((), "another rank failed")
            time.sleep(0.05)
        now = self.board.heartbeats()
        return tuple(peer for peer in peers if now[peer] == before[peer])

    # faults and the end

    def explain(self, error: BaseException, where: str) -> EngineError:
        """The error that every rank raises for an error of this one."""
        return self.board.explain(error, where)

    def wait_for_disconnect(self, peer: int) -> None:
        """Wait until the connection to `peer` closes: a Communicator has one."""
        raise NotImplementedError

    def abort(self) -> None:
        """Break every connection, so that no rank waits for this one. Any thread may call it, at any time."""
        with self._lock:
            if not self.closed:
                self.closed = True
                self._break_connections()

    def _break_connections(self) -> None:
        """Nothing: there is no connection but the store's."""

    def close(self, more: Iterable[threading.Thread] = ()) -> None:
        """Close the connections and join the threads, `more` too. After a successful run the other ranks learn it."""
        self._watchdog.stop()
        timeout = JOIN_TIMEOUT_AFTER_FAULT_S if self.closed else JOIN_TIMEOUT_S
        with suppress(StoreLost):
            self._announce_end()
        with self._lock:  # an abort that has begun ends first
            self._drop_connections()
            self.closed = True
        self._store.close()
        join_threads((*self._watchdog.threads, self._store.thread, *self._running_calls, *more), timeout)

    def _announce_end(self) -> None:
        if not self.closed:
            self.board.mark_closed()
            return
        self.board.set(f"stopped/{self.rank}")
        if self._hosts_store:
            end = time.monotonic() + LINGER_S
            while time.monotonic() < end and not self.board.has(*(f"stopped/{rank}" for rank in range(self.size))):
                time.sleep(0.05)

    def _drop_connections(self) -> None:
        """Nothing: there is no connection but the store's."""

    def __enter__(self) -> Ranks:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Close; an error of the block stops all ranks."""
        try:
            if error is not None:
                explained = self.explain(error, self.status.where)
                self.abort()
                if isinstance(error, PeerLost):  # the transport's own text adds nothing
                    raise explained from None
        finally:
            self.close()


def job_ranks(timeout: float, goal: str, group: dist.ProcessGroup | None = None) -> Ranks:
    """The processes of a group (default: all) of the running torch.distributed job."""
    members = dist.get_process_group_ranks(group if group is not None else dist.group.WORLD)
    rank = dist.get_rank(group)
    try:
        return Ranks(default_store, members, rank, timeout, goal)
    except StoreLost as lost:
        raise rendezvous_error(lost, members, rank, "the start") from None


def rendezvous_error(lost: StoreLost, members: Sequence[int], rank: int, where: str) -> EngineError:
    """The error of a rank that lost the store before the rendezvous."""
    hosts = [number for number, member in enumerate(members) if member in _store_hosts]
    return EngineError(describe_lost_store(lost, rank, where, hosts))


def default_store() -> dist.Store:
    """The store of the running job, over a new connection: one that waits for a key blocks all other requests."""
    return torch_comm.clone(torch_comm.default_store())
