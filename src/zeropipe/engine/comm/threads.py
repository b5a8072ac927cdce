"""Threads that an engine starts, and joins when it closes.

A thread that returns from a call of torch while Python shuts down ends the process with SIGABRT, after a successful
run. So closing an engine joins its threads, with a timeout: one may hang in a request to a store whose host is stopped.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable, Sequence
from queue import SimpleQueue
from typing import Any, Generic, TypeVar

from zeropipe.engine.torch_private import comm as torch_comm

Result = TypeVar("Result")


def start_thread(name: str, function: Callable[..., None], *args: Any) -> threading.Thread:
    """Start a daemon thread."""
    thread = threading.Thread(target=function, args=args, name=f"zeropipe-{name}", daemon=True)
    thread.start()
    return thread


def join_threads(threads: Iterable[threading.Thread], timeout: float) -> None:
    """Wait until all have ended, at most `timeout` seconds in total; one of them may call this."""
    end = time.monotonic() + timeout
    for thread in threads:
        if thread is not threading.current_thread():
            thread.join(max(0.0, end - time.monotonic()))


class BackgroundCall(Generic[Result]):
    """A function that runs in a thread of its own, so that the caller can stop waiting for it."""

    def __init__(self, name: str, function: Callable[[], Result]) -> None:
        self._done = threading.Event()
        self._results: list[Result] = []
        self._error: BaseException | None = None
        self.thread = start_thread(name, self._run, function)

    def _run(self, function: Callable[[], Result]) -> None:
        try:
            self._results.append(function())
        except BaseException as error:
            self._error = error
        finally:
            del function  # it may refer to objects that close files
            self._done.set()

    def wait(self, seconds: float) -> bool:
        """Whether it has ended, after `seconds` at the latest."""
        return self._done.wait(seconds)

    def result(self) -> Result:
        """Return or raise what the function did; only after it has ended."""
        if self._error is not None:
            raise self._error
        return self._results[0]


class HelperThread:
    """Runs calls one after the other beside the main thread; it starts with the first one."""

    def __init__(self) -> None:
        self._queue: SimpleQueue[Callable[[], None] | None] = SimpleQueue()
        self.threads: list[threading.Thread] = []

    def start(self, call: Callable[[], None]) -> None:
        """Run a call, which raises nothing."""
        if not self.threads:  # the thread refers to the queue only
            self.threads.append(start_thread("helper", _run_in_order, self._queue))
        self._queue.put(call)

    def close(self) -> None:
        """End the thread after the calls that it has."""
        if self.threads:
            self._queue.put(None)


def _run_in_order(queue: SimpleQueue[Callable[[], None] | None]) -> None:
    while (call := queue.get()) is not None:
        call()
        del call


class PendingReceive:
    """The receives of one message: complete, or failed, once `done` is set."""

    def __init__(self, works: Sequence[Any]) -> None:
        self.works, self.done = works, threading.Event()
        self.error: RuntimeError | None = None

    def wait(self) -> None:
        """Wait until the message has arrived; RuntimeError if the connection breaks."""
        self.done.wait()
        if self.error is not None:
            raise self.error


class ReceiveThread:
    """Waits for the receives of one channel, in their order: gloo can wait for a receive, but not poll it."""

    def __init__(self, peer: int) -> None:
        self._queue: SimpleQueue[PendingReceive | None] = SimpleQueue()
        # the thread refers to the queue only, so that it does not keep this object from being deleted
        self.thread = start_thread(f"from-{peer}", _wait_in_order, self._queue)

    def add(self, works: Sequence[Any]) -> PendingReceive:
        """Wait for receives that were posted."""
        pending = PendingReceive(works)
        self._queue.put(pending)
        return pending

    def close(self) -> None:
        """End the thread after the receives that it has."""
        self._queue.put(None)


def _wait_in_order(queue: SimpleQueue[PendingReceive | None]) -> None:
    while (pending := queue.get()) is not None:
        try:
            for work in pending.works:
                torch_comm.wait(work)
        except RuntimeError as error:
            pending.error = error
        pending.works = ()  # a work holds its tensor
        pending.done.set()
        del pending
