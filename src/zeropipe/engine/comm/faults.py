"""One rank fails, all ranks stop: with the first error, its rank and its action, in bounded time.

The rank that fails writes what happened on a board (the job's key-value store) and closes its connections. Whoever
waits for it then sees a closed connection, reads the board, closes its own, and raises the same line. A rank that was
killed writes nothing: the first rank that misses it does.
"""

from __future__ import annotations

import contextlib
import threading
import time
from typing import Protocol

import torch.distributed as dist

from zeropipe.errors import EngineError

PATIENCE = 3.0  # seconds a rank looks for the reason after it lost a peer


class PeerLost(Exception):
    """A connection to another rank (None: which one is not known) broke or timed out."""

    def __init__(self, peer: int | None, reason: str) -> None:
        super().__init__(reason)
        self.peer, self.reason = peer, reason


class Board:
    """The first error of a pipeline, readable by all its ranks."""

    def __init__(self, store: dist.Store, rank: int) -> None:
        self._store, self._rank = store, rank

    def post(self, text: str) -> str:
        """Write the error unless another rank was first; return the one that stands."""
        with contextlib.suppress(RuntimeError):  # the store's host may be the rank that died
            return self._store.compare_set("error", "", text).decode()
        return text

    def read(self, patience: float = PATIENCE) -> str | None:
        """The error on the board, waiting a little for its writer."""
        end = time.monotonic() + patience
        with contextlib.suppress(RuntimeError):
            while True:
                if self._store.check(["error"]):
                    return self._store.get("error").decode()
                if time.monotonic() > end:
                    return None
                time.sleep(0.02)
        return None

    def explain(self, error: BaseException, where: str) -> EngineError:
        """The error every rank raises for this one."""
        if isinstance(error, PeerLost):
            who = "a rank" if error.peer is None else f"rank {error.peer}"
            text = self.read() or self.post(
                f"{who} was lost while rank {self._rank} waited for it at {where}: {error.reason}"
            )
        else:
            text = self.post(f"rank {self._rank} failed at {where}: {type(error).__name__}: {error}")
        return EngineError(text)


def reason(error: Exception) -> str:
    """The part of a transport error that a person can use."""
    text = str(error)
    if "closed by peer" in text or "reset by peer" in text or "pair closure" in text or "Broken pipe" in text:
        return "its connection closed"
    if "imed out" in text:
        return "no message came in time"
    return text.splitlines()[0] if text else type(error).__name__


class Watched(Protocol):
    """What the watchdog listens to and stops."""

    rank: int
    size: int
    board: Board

    def listen(self, peer: int) -> None: ...

    def abort(self) -> None: ...


class Watchdog:
    """For NCCL, where a rank waits inside kernels and hears of nothing.

    One thread reads the board and stops this rank. Another listens to the next rank, in a ring: a process that is
    gone writes nothing on the board, so who listens to it does.
    """

    def __init__(self, fabric: Watched, every: float = 1.0) -> None:
        self._end = threading.Event()
        threading.Thread(target=self._read, args=(fabric, every), name="zeropipe-watchdog", daemon=True).start()
        if fabric.size > 1:
            threading.Thread(target=self._listen, args=(fabric,), name="zeropipe-listener", daemon=True).start()

    def _read(self, fabric: Watched, every: float) -> None:
        while not self._end.wait(every):
            if fabric.board.read(patience=0) is not None:
                fabric.abort()
                return

    def _listen(self, fabric: Watched) -> None:
        peer = (fabric.rank + 1) % fabric.size
        try:
            fabric.listen(peer)
        except RuntimeError as error:
            if not self._end.is_set() and fabric.board.read() is None:
                fabric.board.post(f"rank {peer} was lost: {reason(error)}")

    def stop(self) -> None:
        """End the threads; the listener when the connections close."""
        self._end.set()
