"""Threads that an engine starts, and waits for when it closes.

A thread that comes back from a call of torch while Python shuts down ends the process with SIGABRT, after everything
went well. So who closes an engine waits until its threads have ended. Not for ever: one may hang in a question to a
store whose host is stopped.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable
from typing import Any


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
