"""The watchdog of a rank: two threads that stop this rank when another one has failed, is gone, stopped or stuck."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Protocol

from zeropipe.engine import torch_private
from zeropipe.engine.comm.faults import Board, StoreLost, reason
from zeropipe.engine.comm.pulse import BETWEEN, Place, Pulse, Seen, lost_text, verdict

STALL = 2.0  # seconds that a tick may come late before this process counts as having been stopped itself
signs_of_life: list[Callable[[], None]] = []  # called while an engine of this process gets on with its work


class Watched(Protocol):
    """What a watchdog watches over."""

    rank: int
    size: int
    nccl: bool
    board: Board
    place: Place

    def listen(self, peer: int) -> None: ...

    def abort(self) -> None: ...


class Watchdog:
    """Says where this rank is, looks for errors on the board, and finds out who is to blame for a long wait.

    A second thread listens to the next rank, in a ring: the connection of a process that is gone closes at once,
    whatever the others are doing.
    """

    def __init__(self, fabric: Watched, timeout: float) -> None:
        self._fabric, self._timeout = fabric, timeout
        self._every = min(1.0, timeout / 8)
        self._end = threading.Event()
        self._beat, self._since, self._sign = 0, time.monotonic(), fabric.place.sign
        self._seen: dict[int, tuple[Pulse | None, float]] = {}  # the newest pulse and when it was new

    def start(self) -> None:
        """Begin to watch."""
        self._say(0.0)
        threading.Thread(target=self._watch, name="zeropipe-watchdog", daemon=True).start()

    def listen(self) -> None:
        """Begin to listen to the next rank."""
        if self._fabric.size > 1:
            threading.Thread(target=self._listen, name="zeropipe-listener", daemon=True).start()

    def stop(self) -> None:
        """End the threads; the listener when the connections close."""
        self._end.set()

    def _watch(self) -> None:
        last = time.monotonic()
        while not self._end.wait(self._every):
            now = time.monotonic()
            if now - last > self._every + STALL:  # stopped, or starved: what it missed says nothing about others
                self._since += now - last
                self._seen.clear()
            last = now
            if self._tick(now) is not None and not self._end.is_set():
                self._fabric.abort()
                return

    def _tick(self, now: float) -> str | None:
        """The reason to stop, if there is one."""
        fabric, sign = self._fabric, self._fabric.place.sign
        compiling = torch_private.compiling()
        if sign != self._sign:
            self._sign, self._since = sign, now
            self._seen.clear()
        if compiling or self._since == now:
            for call in signs_of_life:
                call()
        waited = now - self._since
        waits = fabric.place.waits
        if not waits and fabric.nccl and fabric.place.where != BETWEEN:  # it may wait inside a kernel, for anybody
            waits = tuple(rank for rank in range(fabric.size) if rank != fabric.rank)
        try:
            text = self._say(waited, waits, compiling)
            if text is None and waits and not compiling and waited > self._timeout / 2:
                text = self._look(now, waited)
        except StoreLost:
            if waits and waited > self._timeout:
                return "the store is lost"  # the main thread finds the words
            return None
        return text

    def _say(self, waited: float, waits: tuple[int, ...] = (), compiling: bool = False) -> str | None:
        place = self._fabric.place
        self._beat += 1
        return self._fabric.board.beat(Pulse(self._beat, place.where, waited, waits, place.round, compiling))

    def _look(self, now: float, waited: float) -> str | None:
        fabric = self._fabric
        for rank, pulse in fabric.board.pulses().items():
            before = self._seen.get(rank)
            if before is None or before[0] != pulse:
                self._seen[rank] = (pulse, now)
        if waited < self._timeout:
            return None
        seen = {rank: Seen(pulse, now - new) for rank, (pulse, new) in self._seen.items()}
        text = verdict(fabric.rank, seen, self._timeout)
        return None if text is None else fabric.board.post(text)

    def _listen(self) -> None:
        fabric = self._fabric
        peer = (fabric.rank + 1) % fabric.size
        try:
            fabric.listen(peer)
        except RuntimeError as error:
            try:
                if self._end.is_set() or fabric.board.left(peer):
                    return
                if fabric.board.read() is None:
                    fabric.board.post(lost_text(peer, fabric.board.pulse(peer), reason(error)))
            except StoreLost:
                pass
            fabric.abort()
