"""Threads that an engine starts, and waits for when it closes.

A thread that comes back from a call of torch while Python shuts down ends the process with SIGABRT, after everything
went well. So who closes an engine waits until its threads have ended. Not for ever: one may hang in a question to a
store whose host is stopped.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable
from typing import Any, Generic, TypeVar

Result = TypeVar("Result")


def started(name: str, function: Callable[..., None], *args: Any) -> threading.Thread:
    """A thread that does not keep the process from ending."""
    thread = threading.Thread(target=function, args=args, name=f"zeropipe-{name}", daemon=True)
    thread.start()
    return thread


def wait_for(threads: Iterable[threading.Thread], patience: float) -> None:
    """Wait until they have ended, at most `patience` seconds for all; one of them may call this."""
    end = time.monotonic() + patience
    for thread in threads:
        if thread is not threading.current_thread():
            thread.join(max(0.0, end - time.monotonic()))


class Call(Generic[Result]):
    """A function that runs in a thread of its own: whoever waits for its result can stop waiting."""

    def __init__(self, name: str, function: Callable[[], Result]) -> None:
        self._done = threading.Event()
        self._results: list[Result] = []
        self._error: BaseException | None = None
        self.thread = started(name, self._run, function)

    def _run(self, function: Callable[[], Result]) -> None:
        try:
            self._results.append(function())
        except BaseException as error:
            self._error = error
        finally:
            del function  # it may hold what closes files
            self._done.set()

    def wait(self, seconds: float) -> bool:
        """Whether it has ended, after `seconds` at the latest."""
        return self._done.wait(seconds)

    def result(self) -> Result:
        """What it returned, or what it raised; it has ended."""
        if self._error is not None:
            raise self._error
        return self._results[0]
