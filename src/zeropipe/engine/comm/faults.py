"""One rank fails, all ranks stop: with the first error, its rank and its place, in bounded time.

The rank that fails writes what happened on a board (the job's key-value store) and closes its connections. Whoever
waits for it then sees a closed connection, reads the board, closes its own, and raises the same line. Nobody closes a
connection before there is a reason on the board, so a rank whose connection closed without one is gone: the first
that misses it writes so.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from queue import SimpleQueue
from typing import Any, TypeVar

import torch.distributed as dist

from zeropipe.engine import torch_private
from zeropipe.engine.comm.pulse import Pulse, lost_text
from zeropipe.engine.comm.threads import started
from zeropipe.errors import EngineError, first_line

Result = TypeVar("Result")


class PeerLost(Exception):
    """A connection to other ranks (none named: which is not known) broke."""

    def __init__(self, peers: Iterable[int], reason: str) -> None:
        super().__init__(reason)
        self.peers, self.reason = tuple(peers), reason


class StoreLost(PeerLost):
    """The job's store does not answer."""

    def __init__(self) -> None:
        super().__init__((), "the job's store does not answer")


class UnlikeCalls(PeerLost):
    """Ranks make different calls, so that none can answer the other."""

    def __init__(self, calls: Sequence[str | None]) -> None:
        ranks = {call: rank for rank, call in reversed(list(enumerate(calls))) if call is not None}
        (one, rank), (other, another) = sorted(ranks.items(), key=lambda item: item[1])[:2]
        unlike = f"rank {rank} is at {one}, rank {another} at {other}"
        super().__init__((), f"{unlike}: every rank makes the same calls, in the same order")


class Desk:
    """The store, asked by a thread of its own: one whose host is stopped never answers, and nobody may wait for it."""

    def __init__(self, store: dist.Store, patience: float) -> None:
        self._patience, self._lost = patience, False
        self._queue: SimpleQueue[tuple[Callable[[dist.Store], Any], list[Any], threading.Event] | None] = SimpleQueue()
        # only the thread holds the store: its connection closes when the thread ends
        self.thread = started("store", self._serve, store)

    def ask(self, question: Callable[[dist.Store], Result]) -> Result:
        """The store's answer; StoreLost if there is none."""
        if self._lost:
            raise StoreLost
        answer: list[Any] = []
        done = threading.Event()
        self._queue.put((question, answer, done))
        if not done.wait(self._patience) or not answer:
            self._lost = True
            raise StoreLost
        found: Result = answer[0]
        return found

    def close(self) -> None:
        """End the thread, once it is through with what it was asked."""
        self._lost = True
        self._queue.put(None)

    def _serve(self, store: dist.Store) -> None:
        while (entry := self._queue.get()) is not None:
            question, answer, done = entry
            try:
                answer.append(question(store))
            except RuntimeError:
                self._lost = True
            finally:
                done.set()
                del entry, question, answer, done  # they may hold what closes files


class Board:
    """What all ranks of a pipeline can read: the first error, everybody's pulse, who came and who left."""

    def __init__(self, desk: Desk, rank: int, size: int) -> None:
        self._desk, self._rank, self._size = desk, rank, size

    def post(self, text: str) -> str:
        """Write the error unless another rank was first; return the one that stands."""
        try:
            return self._desk.ask(lambda store: store.compare_set("error", "", text)).decode()
        except StoreLost:
            return text

    def read(self) -> str | None:
        """The error on the board; StoreLost if nobody can know."""

        def look(store: dist.Store) -> str | None:
            return store.get("error").decode() if store.check(["error"]) else None

        return self._desk.ask(look)

    def beat(self, pulse: Pulse) -> str | None:
        """Say where this rank is; the error on the board."""
        key, text = f"pulse/{self._rank}", pulse.text()
        self._desk.ask(lambda store: store.set(key, text))
        return self.read()

    def pulse(self, rank: int) -> Pulse | None:
        """What a rank said last."""

        def look(store: dist.Store) -> Pulse | None:
            key = f"pulse/{rank}"
            return Pulse.read(store.get(key)) if store.check([key]) else None

        return self._desk.ask(look)

    def pulses(self) -> dict[int, Pulse | None]:
        """What every rank said last."""
        return {rank: self.pulse(rank) for rank in range(self._size)}

    def note(self, key: str, value: str | bytes = "") -> None:
        """Write something else."""
        self._desk.ask(lambda store: store.set(key, value))

    def noted(self, *keys: str) -> bool:
        """Whether all of these were written."""
        return self._desk.ask(lambda store: store.check(list(keys)))

    def get(self, key: str) -> bytes:
        """What was written."""
        return self._desk.ask(lambda store: store.get(key))

    def forget(self, key: str) -> None:
        """Take something away that was written: the store would keep it as long as the job runs."""
        self._desk.ask(lambda store: store.delete_key(key))

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
                text = _without_store(error)
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


class Meeting(dist.Store):
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
        pause = 0.0005
        while True:
            if self._board.read() is not None:
                raise PeerLost((), "another rank failed")
            if self._board.noted(*(f"{self._name}/{key}" for key in keys)):
                return
            time.sleep(pause)
            pause = min(2 * pause, 0.05)


def _without_store(error: PeerLost) -> str:
    """Nobody can say what came first, but the store is gone, so its host is."""
    if torch_private.store_is_on_rank_0():
        return "rank 0 was lost: the job's store, which it hosts, does not answer"
    names = " and ".join(f"rank {peer}" for peer in error.peers) or "a rank"
    return f"the job's store was lost, and {names} too: {error.reason}"


CLOSED = ("closed by peer", "reset by peer", "pair closure", "Broken pipe")  # what gloo says of a connection that broke


def is_closed(error: BaseException) -> bool:
    """Whether this is the error of a transport whose connection broke: in a collective of torch's own groups, say."""
    return isinstance(error, RuntimeError) and any(word in str(error) for word in (*CLOSED, "NCCL", "gloo/transport"))


def reason(error: BaseException) -> str:
    """The part of a transport error that a person can use."""
    return "its connection closed" if any(word in str(error) for word in CLOSED) else first_line(error)
