"""SIGTERM and Ctrl-C end a run after the step that runs: it is saved, and the process exits as if it were done."""

from __future__ import annotations

import signal
import threading
from types import TracebackType
from typing import Any

SIGNALS = (signal.SIGTERM, signal.SIGINT)


class Signals:
    """Catches the first signal while it is entered; a second one acts as it always does."""

    def __init__(self) -> None:
        self.caught = ""  # the signal's name
        self._before: dict[int, Any] = {}

    def __enter__(self) -> Signals:
        if threading.current_thread() is threading.main_thread():  # only there Python allows it
            self._before = {number: signal.signal(number, self._catch) for number in SIGNALS}
        return self

    def _catch(self, number: int, frame: object) -> None:
        self.caught = signal.Signals(number).name
        self._restore()

    def _restore(self) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)
        self._before = {}

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._restore()
