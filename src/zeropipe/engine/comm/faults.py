"""One rank fails, all ranks stop: with the first error, its rank and its action, in bounded time.

The rank that fails posts its error on a board (keys of the job's store) and closes its connections. A rank that waits
for it then gets a closed connection, reads the board, closes its own connections and raises the same line. No rank
closes a connection before there is an error on the board. So a rank whose connection closed without one is gone, and
the first rank that detects this posts it.
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

from zeropipe.engine.comm.heartbeat import Heartbeat, lost_text, ranks_text
from zeropipe.engine.comm.threads import start_thread
from zeropipe.engine.torch_private import comm as torch_comm
from zeropipe.errors import EngineError, first_line

Result = TypeVar("Result")
Key = Callable[[str], str]  # from a name on the board to its key in the store
NO_ANSWER = "the job's store does not answer"
MIN_POLL_S, MAX_POLL_S = 0.0005, 0.05  # seconds between two requests while waiting for a key


class PeerLost(Exception):
    """A connection to other ranks broke. `peers` is empty where it is not known which."""

    def __init__(self, peers: Iterable[int], reason: str) -> None:
        super().__init__(reason)
        self.peers, self.reason = tuple(peers), reason


class StoreLost(PeerLost):
    """The job's store does not answer."""

    def __init__(self, reason: str = NO_ANSWER) -> None:
        super().__init__((), reason)


class MismatchedCalls(PeerLost):
    """Ranks make different calls, which would wait for each other."""

    def __init__(self, calls: Sequence[str | None]) -> None:
        first_rank = {call: rank for rank, call in reversed(list(enumerate(calls))) if call is not None}
        (one, rank), (other, other_rank) = sorted(first_rank.items(), key=lambda item: item[1])[:2]
        mismatch = f"rank {rank} is at {one}, rank {other_rank} at {other}"
        super().__init__((), f"{mismatch}: every rank must make the same calls, in the same order")


class StoreThread:
    """Sends requests to the store from a thread of its own: a store whose host is stopped never answers.

    The thread also opens the store, in `open_timeout` seconds at most; every request is given up after `timeout`.
    """

    def __init__(self, open_store: Callable[[], dist.Store], open_timeout: float, timeout: float) -> None:
        self._open_timeout, self._timeout = open_timeout, timeout
        self._error: str | None = None
        self._is_open = False
        self._queue: SimpleQueue[tuple[Callable[[dist.Store], Any], list[Any], threading.Event] | None] = SimpleQueue()
        # only the thread holds the store: its connection closes when the thread ends
        self.thread = start_thread("store", self._serve, open_store)

    def request(self, function: Callable[[dist.Store], Result]) -> Result:
        """Return `function(store)`; StoreLost if the store does not answer."""
        if self._error is not None:
            raise StoreLost(self._error)
        answer: list[Any] = []
        done = threading.Event()
        self._queue.put((function, answer, done))
        if not done.wait(self._timeout if self._is_open else self._open_timeout) or not answer:
            self._error = self._error or NO_ANSWER
            raise StoreLost(self._error)
        found: Result = answer[0]
        return found

    def close(self) -> None:
        """End the thread after the requests that it has."""
        self._error = self._error or "the job's store is closed"
        self._queue.put(None)

    def _serve(self, open_store: Callable[[], dist.Store]) -> None:
        store: dist.Store | None = None
        while (entry := self._queue.get()) is not None:
            function, answer, done = entry
            try:
                if store is None and self._error is None:
                    store = open_store()
                    self._is_open = True
                if store is not None:
                    answer.append(function(store))
            except Exception as error:
                self._error = NO_ANSWER if self._is_open else first_line(error).rstrip(".")
            finally:
                done.set()
                del entry, function, answer, done  # they may refer to objects that close files


class ErrorBoard:
    """Keys of the store that all ranks of a group read: the first error, heartbeats, values, who has closed.

    `name`: that of the group's rendezvous. `hosts`: the ranks on the machine of the store.
    """

    def __init__(self, store: StoreThread, name: str, rank: int, size: int, hosts: Sequence[int] = ()) -> None:
        self._store, self._name, self._rank, self._size, self._hosts = store, name, rank, size, hosts

    def post_error(self, text: str) -> str:
        """Write an error unless there is one; returns the error on the board."""
        try:
            return self._request(lambda store, key: store.compare_set(key("error"), "", text)).decode()
        except StoreLost:
            return text

    def read_error(self) -> str | None:
        return self._request(_read_error)

    def publish(self, heartbeat: Heartbeat) -> str | None:
        """Write this rank's heartbeat; returns the error on the board."""

        def write(store: dist.Store, key: Key) -> str | None:
            store.set(key(f"heartbeat/{self._rank}"), heartbeat.to_json())
            return _read_error(store, key)

        return self._request(write)

    def heartbeat(self, rank: int) -> Heartbeat | None:
        """The newest heartbeat of a rank."""

        def read(store: dist.Store, key: Key) -> Heartbeat | None:
            own = key(f"heartbeat/{rank}")
            return Heartbeat.from_json(store.get(own)) if store.check([own]) else None

        return self._request(read)

    def heartbeats(self) -> dict[int, Heartbeat | None]:
        """The newest heartbeat of every rank."""
        return {rank: self.heartbeat(rank) for rank in range(self._size)}

    def set(self, name: str, value: str | bytes = "") -> None:
        self._request(lambda store, key: store.set(key(name), value))

    def get(self, name: str) -> bytes:
        return self._request(lambda store, key: store.get(key(name)))

    def has(self, *names: str) -> bool:
        """Whether all of these were set."""
        return self._request(lambda store, key: store.check([key(name) for name in names]))

    def delete(self, name: str) -> None:
        """Delete a value: the store would keep it as long as the job runs."""
        self._request(lambda store, key: store.delete_key(key(name)))

    def wait(self, *names: str) -> None:
        """Wait until all of these were set, without a timeout; PeerLost if there is an error instead."""

        def check(store: dist.Store, key: Key) -> tuple[bool, str | None]:
            keys = [key(name) for name in names]
            if store.check(keys):
                return True, None
            error = _read_error(store, key)
            return error is not None and store.check(keys), error  # they may be set since, before the error

        pause = MIN_POLL_S
        while True:
            is_set, error = self._request(check)
            if is_set:
                return
            if error is not None:
                raise PeerLost((), "another rank failed")
            time.sleep(pause)
            pause = min(2 * pause, MAX_POLL_S)

    def mark_closed(self) -> None:
        """Announce that this rank closes its connections after a successful run."""
        with suppress(StoreLost):
            self.set(f"closed/{self._rank}")

    def has_closed(self, rank: int) -> bool:
        """Whether a rank has called `mark_closed`."""
        return self.has(f"closed/{rank}")

    def _request(self, function: Callable[[dist.Store, Key], Result]) -> Result:
        return self._store.request(lambda store: function(store, lambda name: f"{self._name}/{name}"))

    def explain(self, error: BaseException, where: str) -> EngineError:
        """The error that every rank raises for an error of this one."""
        if isinstance(error, MismatchedCalls):
            text = self.post_error(error.reason)
        elif isinstance(error, PeerLost):
            try:
                text = self.read_error() or self.post_error(self._describe_lost(error, where))
            except StoreLost:
                text = describe_lost_store(error, self._rank, where, self._hosts)
        else:
            what = f"{type(error).__name__}: {error}".removesuffix(": ")
            text = self.post_error(f"rank {self._rank} failed at {where}: {what}")
        return EngineError(text)

    def _describe_lost(self, error: PeerLost, where: str) -> str:
        gone = [peer for peer in error.peers if not self.has_closed(peer)]
        if gone:
            return "; ".join(lost_text(peer, self.heartbeat(peer), error.reason) for peer in gone)
        if not error.peers:
            return f"a rank was lost while rank {self._rank} waited for it at {where}: {error.reason}"
        return (
            f"rank {error.peers[0]} has closed its Engine while rank {self._rank} waits for it at {where}: "
            "every rank must make the same calls"
        )


def describe_lost_store(error: PeerLost, rank: int, where: str, hosts: Sequence[int] = ()) -> str:
    """The error of a rank whose store is gone, and the store's machine with it. `hosts`: the ranks on it, if known."""
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
    """The store that a new process group connects through: its waits end when there is an error on the board."""

    def __init__(self, board: ErrorBoard, name: str) -> None:
        super().__init__()
        self._board, self._name = board, name

    def set(self, key: str, value: bytes) -> None:  # type: ignore[override]
        self._board.set(f"{self._name}/{key}", value)

    def get(self, key: str) -> bytes:
        """Read a key, once it is set."""
        self.wait([key])
        return self._board.get(f"{self._name}/{key}")

    def wait(self, keys: list[str], timeout: object = None) -> None:  # type: ignore[override]
        """Wait for all keys without a timeout: the watchdog ends the wait."""
        self._board.wait(*(f"{self._name}/{key}" for key in keys))


def _read_error(store: dist.Store, key: Key) -> str | None:
    own = key("error")
    return store.get(own).decode() if store.check([own]) else None


CLOSED = ("closed by peer", "reset by peer", "pair closure", "Broken pipe")  # texts of gloo


def is_transport_error(error: BaseException) -> bool:
    """Whether a connection broke: that of a collective in torch's own groups, for example."""
    return isinstance(error, RuntimeError) and any(text in str(error) for text in (*CLOSED, "NCCL", "gloo/transport"))


def transport_reason(error: BaseException) -> str:
    """A transport error in one line."""
    return "its connection closed" if any(text in str(error) for text in CLOSED) else first_line(error)
