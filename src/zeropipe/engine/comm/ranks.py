"""Some processes of a job that watch over each other, over the job's store alone.

This is what set-up uses before an Engine is made: from the first contact with the store on, a rank that is gone,
stopped or cut off is named on all others. An Engine's Fabric is the same with connections between the ranks.
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

from zeropipe.engine.comm.faults import Board, PeerLost, StoreLost, StoreThread, UnlikeCalls, reason, without_store
from zeropipe.engine.comm.meeting import meet
from zeropipe.engine.comm.pulse import EVERYONE, Place, ranks_text, silence
from zeropipe.engine.comm.threads import Call, wait_for
from zeropipe.engine.comm.watchdog import Watchdog
from zeropipe.engine.torch_private import comm as torch_comm
from zeropipe.errors import EngineError

TIMEOUT = 600.0  # seconds, where nobody gives another time-out
AFTER_ALL, AFTER_A_FAULT = 10.0, 1.0  # seconds for threads to end
LINGER = 2.0  # seconds that the host of the store stays after a fault, so that others can read it
LATER = 3.0  # seconds that a store may take longer to open than its own time-out, which says more
FEW_BEATS = 5.0  # seconds without a beat that tell who is gone, where it is known that somebody is

Result = TypeVar("Result")
_counts: Counter[str] = Counter()
_hosts: set[int] = set()  # the processes that are known to be on the machine of the store


class Ranks:
    """The processes `members`, of which this one is number `rank`. All of them make this, in the same order.

    Waits have no time-out of their own: the watchdog ends them when there is a reason to, which it first writes on the
    board. So whoever fails in a wait finds the reason there. `open_store` gives a connection to the job's store. `goal`
    is what a rank has not done that does not come here, `hint` the way out.
    """

    unsaid: tuple[int, ...] = ()

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
        self.place, self.closed = Place(), False
        self._calls: list[threading.Thread] = []  # that have not come back
        self._lock = threading.Lock()  # who breaks or drops connections holds it
        self._watchdog = Watchdog(timeout)
        # every rank makes these in the same order, so the count names this one
        digest = hashlib.sha256(repr(tuple(members)).encode()).hexdigest()[:16]
        key = f"zeropipe/{digest}/{_counts[digest]}"
        _counts[digest] += 1
        self._store = StoreThread(open_store, timeout + LATER, min(10.0, max(2.0, timeout / 2)))
        try:
            self.name, hosts = meet(
                self._store, key, rank, self.size, timeout, lambda away: self._missing(away, goal, hint)
            )  # fmt: skip
            _hosts.update(members[host] for host in hosts)
            self.board = Board(self._store, self.name, rank, self.size, hosts)
            self._watchdog.start(self)
        except BaseException as error:
            if self._hosts_store and isinstance(error, EngineError):  # the others read there who is missing
                time.sleep(LINGER)
            self._store.close()
            raise

    def _missing(self, away: Sequence[int], goal: str, hint: str) -> str:
        have = "have" if len(away) > 1 else "has"
        line = f"{ranks_text(away)} {have} not {goal}: rank {self.rank} waits for {self._timeout:g} s"
        return f"{line}; {hint}" if hint else line

    @property
    def others(self) -> tuple[int, ...]:
        """All but this one."""
        return tuple(rank for rank in range(self.size) if rank != self.rank)

    @property
    def _hosts_store(self) -> bool:
        return torch_comm.store_is_on_rank_0() and self.rank == 0

    @property
    def connecting(self) -> float:
        """Seconds for gloo to connect: less than the time-out, so that its own words about what is wrong come first."""
        return 0.8 * self._timeout

    def enter(self, name: str, busy: bool = False) -> None:
        """Begin another part of set-up, and tell the others. `busy`: with work of its own that may take long."""
        self.place.enter(name, busy)
        self._watchdog.say(self, busy=busy)

    # words

    def exchange(self, value: object) -> list[Any]:
        """Everybody's value, in rank order; UnlikeCalls if others have come here to do something else."""
        said = [pickle.loads(piece) for piece in self._gather(pickle.dumps((self.place.call, value)))]
        if len({call for call, _ in said if call is not None}) > 1:
            raise UnlikeCalls([call for call, _ in said])
        return [value for _, value in said]

    def _gather(self, data: bytes) -> list[bytes]:
        """Everybody's data, by the hand of the first rank."""
        self.place.round += 1
        key, busy = f"exchange/{self.place.round}", self.place.busy
        self.place.waits, self.place.busy = EVERYONE, False
        try:
            self.board.note(f"{key}/{self.rank}", data)
            if self.rank != 0:
                self.board.wait(f"{key}/all")
                found: list[bytes] = pickle.loads(self.board.get(f"{key}/all"))
                return found
            self.board.wait(*(f"{key}/{rank}" for rank in range(self.size)))
            everyone = [self.board.get(f"{key}/{rank}") for rank in range(self.size)]
            self.board.note(f"{key}/all", pickle.dumps(everyone))
            self._forget(self.place.round - 1)
            return everyone
        finally:
            self.place.waits, self.place.busy = (), busy

    def _forget(self, number: int) -> None:
        """All have come to the next exchange, so all have read this one."""
        for rank in range(self.size if number else 0):
            self.board.forget(f"exchange/{number}/{rank}")
        if number:
            self.board.forget(f"exchange/{number}/all")

    def call(self, function: Callable[[], Result], peers: tuple[int, ...] | None = None) -> Result:
        """`function()`, which waits for `peers` (all, if not given) inside torch, where nobody could stop it.

        So it runs in a thread of its own, and this rank stops waiting for that when another one has failed or is lost.
        """
        self.place.waits = peers = self.others if peers is None else peers
        running = Call(f"calling-{self.place.where}", function)
        self._calls.append(running.thread)
        try:
            while not running.wait(0.05):
                if self.board.read() is not None:
                    raise PeerLost((), "another rank failed")
            self._calls.remove(running.thread)
            return running.result()
        except RuntimeError as error:
            if isinstance(error, EngineError):
                raise
            if gone := self._silent(peers):
                raise PeerLost(gone, reason(error)) from error
            raise ConnectionError(reason(error)) from error
        finally:
            self.place.waits = ()

    def _silent(self, peers: tuple[int, ...]) -> tuple[int, ...]:
        """Which of the peers is gone: an error of torch does not say. PeerLost if somebody else has found out."""
        before = self.board.pulses()
        end = time.monotonic() + min(FEW_BEATS, silence(self._timeout))
        while time.monotonic() < end:
            if self.board.read() is not None:
                raise PeerLost((), "another rank failed")
            time.sleep(0.05)
        now = self.board.pulses()
        return tuple(peer for peer in peers if now[peer] == before[peer])

    # the end

    def explain(self, error: BaseException, where: str) -> EngineError:
        """The error every rank raises for this one."""
        return self.board.explain(error, where)

    def listen(self, peer: int) -> None:
        """Wait until the connection to `peer` closes: there is none here."""
        raise NotImplementedError

    def abort(self) -> None:
        """Break every connection, so that nobody waits for this rank any more. Any thread may call it, at any time."""
        with self._lock:
            if not self.closed:
                self.closed = True
                self._break()

    def _break(self) -> None:
        """There are none but the store's."""

    def close(self, more: Iterable[threading.Thread] = ()) -> None:
        """Let go of the connections; after a good run, the others are told first. Threads have ended, `more` too."""
        self._watchdog.stop()
        patience = AFTER_A_FAULT if self.closed else AFTER_ALL
        with suppress(StoreLost):
            self._leave()
        with self._lock:  # an abort that has begun ends first
            self._drop()
            self.closed = True
        self._store.close()
        wait_for((*self._watchdog.threads, self._store.thread, *self._calls, *more), patience)

    def _leave(self) -> None:
        if not self.closed:
            self.board.leave()
            return
        self.board.note(f"heard/{self.rank}")
        if self._hosts_store:  # the others' error is in it
            end = time.monotonic() + LINGER
            while time.monotonic() < end and not self.board.noted(*(f"heard/{rank}" for rank in range(self.size))):
                time.sleep(0.05)

    def _drop(self) -> None:
        """Let go of what this holds."""

    def __enter__(self) -> Ranks:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """An error in here is one on all ranks."""
        try:
            if error is not None:
                explained = self.explain(error, self.place.where)
                self.abort()
                if isinstance(error, PeerLost):  # the transport's own words help nobody
                    raise explained from None
        finally:
            self.close()


def job_ranks(timeout: float, goal: str, group: dist.ProcessGroup | None = None) -> Ranks:
    """The processes of a group, all if none is given, of the running torch.distributed job."""
    members = dist.get_process_group_ranks(group if group is not None else dist.group.WORLD)
    rank = dist.get_rank(group)
    try:
        return Ranks(default_store, members, rank, timeout, goal)
    except StoreLost as lost:
        raise unmet(lost, members, rank, "the start") from None


def unmet(lost: StoreLost, members: Sequence[int], rank: int, where: str) -> EngineError:
    """The error of a rank that has not met the others: the store was lost."""
    hosts = [number for number, member in enumerate(members) if member in _hosts]
    return EngineError(without_store(lost, rank, where, hosts))


def default_store() -> dist.Store:
    """The store of the running job, over a connection of its own: one that waits for a key lets nobody else in."""
    return torch_comm.clone(torch_comm.default_store())
