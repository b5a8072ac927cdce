"""The watchdog of a rank: two threads that stop this rank when another one has failed, is gone, stopped or stuck."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from contextlib import suppress
from typing import Protocol

from zeropipe.engine.comm.faults import ErrorBoard, StoreLost, transport_reason
from zeropipe.engine.comm.heartbeat import BETWEEN_STEPS, Heartbeat, Observation, RankStatus, diagnose, lost_text
from zeropipe.engine.comm.threads import start_thread
from zeropipe.engine.torch_private import compile as torch_compile

MAX_TICK_DELAY_S = 2.0  # a tick later than this means that this process itself was stopped
progress_callbacks: list[Callable[[], None]] = []  # called while an engine of this process makes progress


class Monitored(Protocol):
    """What a watchdog monitors: Ranks."""

    rank: int
    size: int
    implicit_peers: tuple[int, ...]  # ranks that its main thread may wait for in a step without setting `waits_for`
    board: ErrorBoard
    status: RankStatus

    def wait_for_disconnect(self, peer: int) -> None: ...

    def abort(self) -> None: ...


class Watchdog:
    """Publishes this rank's status, reads errors on the board, and diagnoses a long wait.

    A second thread monitors the connection to the next rank, in a ring: that of a process that is gone closes at once,
    whatever the other ranks are doing.
    """

    def __init__(self, timeout: float) -> None:
        self._timeout, self._interval = timeout, min(1.0, timeout / 8)
        self._stopping = threading.Event()
        self.threads: list[threading.Thread] = []
        self._num_beats, self._since = 0, time.monotonic()
        self._progress: tuple[object, ...] = ()
        self._newest: dict[int, tuple[Heartbeat | None, float]] = {}  # of each rank, and when it was new

    # The threads hold the Ranks, which hold this object, while they run: closing leaves no cycle to be collected.

    def start(self, ranks: Monitored) -> None:
        """Start the thread that publishes and diagnoses."""
        self.publish(ranks)
        self.threads.append(start_thread("watchdog", self._run, ranks))

    def monitor_next_rank(self, ranks: Monitored) -> None:
        """Start the thread that monitors the connection to the next rank."""
        if ranks.size > 1:
            self.threads.append(start_thread("connection", self._monitor, ranks))

    def stop(self) -> None:
        """End the threads; that of the connection ends when the connection closes."""
        self._stopping.set()

    def _run(self, ranks: Monitored) -> None:
        last = time.monotonic()
        while not self._stopping.wait(self._interval):
            now = time.monotonic()
            if now - last > self._interval + MAX_TICK_DELAY_S:  # what was missed meanwhile is no fault of other ranks
                self._since += now - last
                self._newest.clear()
            last = now
            try:
                has_failed = self._tick(ranks, now)
            except StoreLost:  # this may take long to detect, and is no stop of this process
                # without the store the other ranks' status is unknown
                has_failed = bool(_waits_for(ranks)) and now - self._since > self._timeout
                last = time.monotonic()
            if has_failed and not self._stopping.is_set():
                ranks.abort()
                return

    def _tick(self, ranks: Monitored, now: float) -> bool:
        """Whether there is an error, which is on the board then. StoreLost if the board cannot be read."""
        status = ranks.status
        progress, is_busy = status.progress, status.is_busy or torch_compile.is_compiling()
        if progress != self._progress:
            self._progress, self._since = progress, now
            self._newest.clear()
        if is_busy or self._since == now:
            for callback in progress_callbacks:
                callback()
        stalled_for, waits_for = now - self._since, _waits_for(ranks)
        error = self.publish(ranks, stalled_for, waits_for, is_busy)
        if error is None and waits_for and not is_busy and stalled_for > self._timeout / 2:
            error = self._diagnose(ranks, now, stalled_for)
        return error is not None

    def publish(
        self, ranks: Monitored, stalled_for: float = 0.0, waits_for: tuple[int, ...] = (), is_busy: bool = False
    ) -> str | None:
        """Publish this rank's heartbeat; returns the error on the board."""
        self._num_beats += 1
        status = ranks.status
        return ranks.board.publish(
            Heartbeat(self._num_beats, status.where, stalled_for, waits_for, status.num_exchanges, is_busy)
        )

    def _diagnose(self, ranks: Monitored, now: float, stalled_for: float) -> str | None:
        """Observe the other ranks; the error on the board, if this rank's wait cannot end."""
        for rank, heartbeat in ranks.board.heartbeats().items():
            before = self._newest.get(rank)
            if before is None or before[0] != heartbeat:
                self._newest[rank] = (heartbeat, now)
        if stalled_for < self._timeout:
            return None
        observed = {rank: Observation(heartbeat, now - new) for rank, (heartbeat, new) in self._newest.items()}
        text = diagnose(ranks.rank, observed, self._timeout)
        return None if text is None else ranks.board.post_error(text)

    def _monitor(self, ranks: Monitored) -> None:
        peer = (ranks.rank + 1) % ranks.size
        try:
            ranks.wait_for_disconnect(peer)
        except RuntimeError as error:
            with suppress(StoreLost):
                if self._stopping.is_set() or ranks.board.has_closed(peer):
                    return
                if ranks.board.read_error() is None:
                    ranks.board.post_error(lost_text(peer, ranks.board.heartbeat(peer), transport_reason(error)))
            ranks.abort()


def _waits_for(ranks: Monitored) -> tuple[int, ...]:
    return ranks.status.waits_for or (() if ranks.status.where == BETWEEN_STEPS else ranks.implicit_peers)
