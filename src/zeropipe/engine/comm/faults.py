"""One rank fails, all ranks stop: with the first error, its rank and its place, in bounded time.

The rank that fails writes what happened on a board (the job's key-value store) and closes its connections. Whoever
waits for it then sees a closed connection, reads the board, closes its own, and raises the same line. Nobody closes a
connection before there is a reason on the board, so a rank whose connection closed without one is gone: the first
that misses it writes so.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from queue import SimpleQueue
from typing import Any, TypeVar

import torch.distributed as dist

from zeropipe.engine.comm.pulse import Pulse, lost_text, ranks_text
from zeropipe.engine.comm.threads import started
from zeropipe.engine.torch_private import comm as torch_comm
from zeropipe.errors import EngineError, first_line

Result = TypeVar("Result")
Key = Callable[[str], str]  # the name of something on the board -> its key in the store


class PeerLost(Exception):
    """A connection to other ranks (none named: which is not known) broke."""

    def __init__(self, peers: Iterable[int], reason: str) -> None:
        super().__init__(reason)
        self.peers, self.reason = tuple(peers), reason


class StoreLost(PeerLost):
    """The job's store does not answer."""

    def __init__(self, reason: str = "the job's store does not answer") -> None:
        super().__init__((), reason)


class UnlikeCalls(PeerLost):
    """Ranks make different calls, so that none can answer the other."""

    def __init__(self, calls: Sequence[str | None]) -> None:
        ranks = {call: rank for rank, call in reversed(list(enumerate(calls))) if call is not None}
        (one, rank), (other, another) = sorted(ranks.items(), key=lambda item: item[1])[:2]
        unlike = f"rank {rank} is at {one}, rank {another} at {other}"
        super().__init__((), f"{unlike}: every rank makes the same calls, in the same order")


class StoreThread:
    """The store, asked by a thread of its own: one whose host is stopped never answers, and nobody may wait for it.

    The thread opens it, too, which ends after `opening` seconds at the latest; every answer comes within `patience`.
    """

    def __init__(self, open_store: Callable[[], dist.Store], opening: float, patience: float) -> None:
        self._opening, self._patience = opening, patience
        self._lost: str | None = None
        self._is_open = False
        self._queue: SimpleQueue[tuple[Callable[[dist.Store], Any], list[Any], threading.Event] | None] = SimpleQueue()
        # only the thread holds the store: its connection closes when the thread ends
        self.thread = started("store", self._serve, open_store)

    def ask(self, question: Callable[[dist.Store], Result]) -> Result:
        """The store's answer; StoreLost if there is none."""
        if self._lost is not None:
            raise StoreLost(self._lost)
        answer: list[Any] = []
        done = threading.Event()
        self._queue.put((question, answer, done))
        if not done.wait(self._patience if self._is_open else self._opening) or not answer:
            self._lost = self._lost or "the job's store does not answer"
            raise StoreLost(self._lost)
        found: Result = answer[0]
        return found

    def close(self) -> None:
        """End the thread, once it is through with what it was asked."""
        self._lost = self._lost or "the job's store is closed"
        self._queue.put(None)

    def _serve(self, open_store: Callable[[], dist.Store]) -> None:
        store: dist.Store | None = None
        while (entry := self._queue.get()) is not None:
            question, answer, done = entry
            try:
                if store is None and self._lost is None:
                    store = open_store()
                    self._is_open = True
                if store is not None:
                    answer.append(question(store))
            except Exception as error:
                self._lost = "the job's store does not answer" if self._is_open else first_line(error).rstrip(".")
            finally:
                done.set()
                del entry, question, answer, done  # they may hold what closes files


class Board:
    """What some ranks can all read: the first error, everybody's pulse, who came and who left.

    `name` is that of their meeting; `hosts` are those of them on the machine of the store.
    """

    def __init__(self, store: StoreThread, name: str, rank: int, size: int, hosts: Sequence[int] = ()) -> None:
        self._store, self._name, self._rank, self._size, self._hosts = store, name, rank, size, hosts

    def post(self, text: str) -> str:
        """Write the error unless another rank was first; return the one that stands."""
        try:
            return self._ask(lambda store, key: store.compare_set(key("error"), "", text)).decode()
        except StoreLost:
            return text

    def read(self) -> str | None:
        """The error on the board; StoreLost if nobody can know."""
        return self._ask(_error)

    def beat(self, pulse: Pulse) -> str | None:
        """Say where this rank is; the error on the board."""

        def say(store: dist.Store, key: Key) -> str | None:
            store.set(key(f"pulse/{self._rank}"), pulse.text())
            return _error(store, key)

        return self._ask(say)

    def pulse(self, rank: int) -> Pulse | None:
        """What a rank said last."""

        def look(store: dist.Store, key: Key) -> Pulse | None:
            own = key(f"pulse/{rank}")
            return Pulse.read(store.get(own)) if store.check([own]) else None

        return self._ask(look)

    def pulses(self) -> dict[int, Pulse | None]:
        """What every rank said last."""
        return {rank: self.pulse(rank) for rank in range(self._size)}

    def note(self, name: str, value: str | bytes = "") -> None:
        """Write something else."""
        self._ask(lambda store, key: store.set(key(name), value))

    def noted(self, *names: str) -> bool:
        """Whether all of these were written."""
        return self._ask(lambda store, key: store.check([key(name) for name in names]))

    def wait(self, *names: str) -> None:
        """Wait until all of these were written, however long it takes; PeerLost if there is an error instead."""

        def look(store: dist.Store, key: Key) -> tuple[bool, str | None]:
            is_there = store.check([key(name) for name in names])
            return is_there, None if is_there else _error(store, key)

        pause = 0.0005
        while True:
            is_there, error = self._ask(look)
            if is_there:
                return
            if error is not None:
                raise PeerLost((), "another rank failed")
            time.sleep(pause)
            pause = min(2 * pause, 0.05)

    def get(self, name: str) -> bytes:
        """What was written."""
        return self._ask(lambda store, key: store.get(key(name)))

    def forget(self, name: str) -> None:
        """Take something away that was written: the store would keep it as long as the job runs."""
        self._ask(lambda store, key: store.delete_key(key(name)))

    def _ask(self, question: Callable[[dist.Store, Key], Result]) -> Result:
        return self._store.ask(lambda store: question(store, self._key))

    def _key(self, name: str) -> str:
        return f"{self._name}/{name}"

    def leave(self) -> None:
        """Say that this rank closes its connections in good order."""
        with suppress(StoreLost):
            self.note(f"left/{self._rank}")

    def left(self, rank: int) -> bool:
        """Whether a rank has said so."""
        return self.noted(f"left/{rank}")

    def explain(self, error: BaseException, where: str) -> EngineError:
        """The error every rank raises for this one."""
        if isinstance(error, UnlikeCalls):
            text = self.post(error.reason)
        elif isinstance(error, PeerLost):
            try:
                text = self.read() or self.post(self._missed(error, where))
            except StoreLost:
                text = without_store(error, self._rank, where, self._hosts)
        else:
            what = f"{type(error).__name__}: {error}".removesuffix(": ")
            text = self.post(f"rank {self._rank} failed at {where}: {what}")
        return EngineError(text)

    def _missed(self, error: PeerLost, where: str) -> str:
        gone = [peer for peer in error.peers if not self.left(peer)]
        if gone or not error.peers:
            names = [lost_text(peer, self.pulse(peer), error.reason) for peer in gone]
            return (
                "; ".join(names) or f"a rank was lost while rank {self._rank} waited for it at {where}: {error.reason}"
            )
        return (
            f"rank {error.peers[0]} has closed its Engine while rank {self._rank} waits for it at {where}: "
            "every rank makes the same calls"
        )


def without_store(error: PeerLost, rank: int, where: str, hosts: Sequence[int] = ()) -> str:
    """Nobody can say what came first, but the store is gone, so its machine is. `hosts`: the ranks on it, if known."""
    here = f"(rank {rank} was at {where})"
    if torch_comm.store_is_on_rank_0() and rank != 0:
        return f"rank 0 was lost: the job's store, which it hosts, does not answer {here}"
    if hosts and rank not in hosts:
        was, its = ("was", "its") if len(hosts) == 1 else ("were", "their")
        return f"{ranks_text(hosts)} {was} lost: the job's store, on {its} machine, does not answer {here}"
    if error.peers:
        return f"the job's store was lost, and {ranks_text(error.peers)} too: {error.reason} {here}"
    address = ":".join(filter(None, map(os.environ.get, ("MASTER_ADDR", "MASTER_PORT"))))
    served = f", at {address}," if address else ""
    return f"the job's store was lost: the process or machine that serves it{served} is gone {here}"


class AbortableStore(dist.Store):
    """The store as a group sees it while it is made: to wait for another rank ends when there is an error."""

    def __init__(self, board: Board, name: str) -> None:
        super().__init__()
        self._board, self._name = board, name

    def set(self, key: str, value: bytes) -> None:  # type: ignore[override]
        """Write."""
        self._board.note(f"{self._name}/{key}", value)

    def get(self, key: str) -> bytes:
        """Read, once it is there."""
        self.wait([key])
        return self._board.get(f"{self._name}/{key}")

    def wait(self, keys: list[str], timeout: object = None) -> None:  # type: ignore[override]
        """Wait for all keys, however long it takes: that is the watchdog's to judge."""
        self._board.wait(*(f"{self._name}/{key}" for key in keys))


def _error(store: dist.Store, key: Key) -> str | None:
    own = key("error")
    return store.get(own).decode() if store.check([own]) else None


CLOSED = ("closed by peer", "reset by peer", "pair closure", "Broken pipe")  # what gloo says of a connection that broke


def is_closed(error: BaseException) -> bool:
    """Whether this is the error of a transport whose connection broke: in a collective of torch's own groups, say."""
    return isinstance(error, RuntimeError) and any(word in str(error) for word in (*CLOSED, "NCCL", "gloo/transport"))


def reason(error: BaseException) -> str:
    """The part of a transport error that a person can use."""
    return "its connection closed" if any(word in str(error) for word in CLOSED) else first_line(error)
