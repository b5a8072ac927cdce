"""The watchdog of a rank: two threads that stop this rank when another one has failed, is gone, stopped or stuck."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from contextlib import suppress
from typing import Protocol

from zeropipe.engine.comm.faults import Board, StoreLost, reason
from zeropipe.engine.comm.pulse import BETWEEN, Place, Pulse, Seen, lost_text, verdict
from zeropipe.engine.comm.threads import started
from zeropipe.engine.torch_private import compile as torch_compile

STALL = 2.0  # seconds that a tick may come late before this process counts as having been stopped itself
signs_of_life: list[Callable[[], None]] = []  # called while an engine of this process gets on with its work


class Watched(Protocol):
    """What a watchdog watches over."""

    rank: int
    size: int
    unsaid: tuple[int, ...]  # the ranks that its main thread may wait for in a step without saying so
    board: Board
    place: Place

    def listen(self, peer: int) -> None: ...

    def abort(self) -> None: ...


class Watchdog:
    """Says where this rank is, looks for errors on the board, and finds out who is to blame for a long wait.

    A second thread listens to the next rank, in a ring: the connection of a process that is gone closes at once,
    whatever the others are doing.
    """

    def __init__(self, timeout: float) -> None:
        self._timeout, self._every = timeout, min(1.0, timeout / 8)
        self._end = threading.Event()
        self.threads: list[threading.Thread] = []
        self._beat, self._since = 0, time.monotonic()
        self._sign: tuple[object, ...] = ()
        self._seen: dict[int, tuple[Pulse | None, float]] = {}  # the newest pulse of a rank and when it was new

    # the threads hold the fabric, which holds this object, while they run: nothing has to be collected when it closes

    def start(self, fabric: Watched) -> None:
        """Begin to watch."""
        self.say(fabric)
        self.threads.append(started("watchdog", self._watch, fabric))

    def listen(self, fabric: Watched) -> None:
        """Begin to listen to the next rank."""
        if fabric.size > 1:
            self.threads.append(started("listener", self._listen, fabric))

    def stop(self) -> None:
        """End the threads; the listener when the connections close."""
        self._end.set()

    def _watch(self, fabric: Watched) -> None:
        last = time.monotonic()
        while not self._end.wait(self._every):
            now = time.monotonic()
            if now - last > self._every + STALL:  # stopped, or starved: what it missed says nothing about others
                self._since += now - last
                self._seen.clear()
            last = now
            try:
                is_over = self._tick(fabric, now)
            except StoreLost:  # to find that out may take long, and is no stop of this process
                is_over, last = self._waits_in_vain(fabric, now), time.monotonic()
            if is_over and not self._end.is_set():
                fabric.abort()
                return

    def _tick(self, fabric: Watched, now: float) -> bool:
        """Whether there is a reason to stop: it is on the board then. StoreLost if nobody can read that."""
        sign, busy = fabric.place.sign, fabric.place.busy or torch_compile.compiling()
        if sign != self._sign:
            self._sign, self._since = sign, now
            self._seen.clear()
        if busy or self._since == now:
            for call in signs_of_life:
                call()
        waited, waits = now - self._since, self._waits(fabric)
        text = self.say(fabric, waited, waits, busy)
        if text is None and waits and not busy and waited > self._timeout / 2:
            text = self._look(fabric, now, waited)
        return text is not None

    def _waits(self, fabric: Watched) -> tuple[int, ...]:
        return fabric.place.waits or (() if fabric.place.where == BETWEEN else fabric.unsaid)

    def _waits_in_vain(self, fabric: Watched, now: float) -> bool:
        """Without the store nobody can know what the others do."""
        return bool(self._waits(fabric)) and now - self._since > self._timeout

    def say(self, fabric: Watched, waited: float = 0.0, waits: tuple[int, ...] = (), busy: bool = False) -> str | None:
        """Tell the others where this rank is; the error on the board."""
        self._beat += 1
        return fabric.board.beat(Pulse(self._beat, fabric.place.where, waited, waits, fabric.place.round, busy))

    def _look(self, fabric: Watched, now: float, waited: float) -> str | None:
        """What others say; the error on the board, if this rank waits in vain."""
        for rank, pulse in fabric.board.pulses().items():
            before = self._seen.get(rank)
            if before is None or before[0] != pulse:
                self._seen[rank] = (pulse, now)
        if waited < self._timeout:
            return None
        seen = {rank: Seen(pulse, now - new) for rank, (pulse, new) in self._seen.items()}
        text = verdict(fabric.rank, seen, self._timeout)
        return None if text is None else fabric.board.post(text)

    def _listen(self, fabric: Watched) -> None:
        peer = (fabric.rank + 1) % fabric.size
        try:
            fabric.listen(peer)
        except RuntimeError as error:
            with suppress(StoreLost):
                if self._end.is_set() or fabric.board.left(peer):
                    return
                if fabric.board.read() is None:
                    fabric.board.post(lost_text(peer, fabric.board.pulse(peer), reason(error)))
            fabric.abort()
