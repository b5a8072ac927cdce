"""SIGTERM and Ctrl-C end a run after the current step: it is saved, and the exit status is 0."""

from __future__ import annotations

import signal
import threading
from typing import Any

SIGNALS = (signal.SIGTERM, signal.SIGINT)


class StopSignals:
    """A context that receives the first signal. A second one has its usual effect."""

    def __init__(self) -> None:
        self.received = ""  # name of the signal
        self._handlers: dict[int, Any] = {}  # from before

    def __enter__(self) -> StopSignals:
        if threading.current_thread() is threading.main_thread():  # Python sets handlers only there
            self._handlers = {number: signal.signal(number, self._receive) for number in SIGNALS}
        return self

    def __exit__(self, *error: object) -> None:
        self._restore()

    def _receive(self, number: int, frame: object) -> None:
        self.received = signal.Signals(number).name
        self._restore()

    def _restore(self) -> None:
        for number, handler in self._handlers.items():
            signal.signal(number, handler)
        self._handlers = {}
