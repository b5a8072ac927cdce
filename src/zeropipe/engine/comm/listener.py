"""Knows whether a message is here: gloo itself can only wait for one."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from queue import SimpleQueue
from typing import Any

from zeropipe.engine.comm.threads import started
from zeropipe.engine.torch_private import comm as torch_comm


class Arrival:
    """Some receives of one message: here, or failed, once `done` is set."""

    def __init__(self, works: Sequence[Any]) -> None:
        self.works, self.done = works, threading.Event()
        self.error: RuntimeError | None = None

    def wait(self) -> None:
        """Wait until the message is here; RuntimeError if the connection breaks."""
        self.done.wait()
        if self.error is not None:
            raise self.error


class Listener:
    """Waits for the receives of one edge, in their order, in a thread of its own."""

    def __init__(self, peer: int) -> None:
        self._queue: SimpleQueue[Arrival | None] = SimpleQueue()
        # the thread holds the queue alone: it ends when the queue says so, whoever else is gone
        self.thread = started(f"from-{peer}", _listen, self._queue)

    def expect(self, works: Sequence[Any]) -> Arrival:
        """Receives that were posted."""
        arrival = Arrival(works)
        self._queue.put(arrival)
        return arrival

    def close(self) -> None:
        """End the thread, once it is through with what it expects."""
        self._queue.put(None)


def _listen(queue: SimpleQueue[Arrival | None]) -> None:
    while (arrival := queue.get()) is not None:
        try:
            for work in arrival.works:
                torch_comm.wait(work)
        except RuntimeError as error:
            arrival.error = error
        arrival.works = ()  # a work holds its tensor
        arrival.done.set()
        del arrival
