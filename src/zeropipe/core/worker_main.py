"""The worker's side of `workers`: read calls from stdin, write their results, and exit when stdin ends.

The main thread runs the calls. A second thread reads, so that a cancellation arrives while a call runs: it interrupts
the main thread as Ctrl-C would, between two instructions of Python, also on Windows.
"""

from __future__ import annotations

import _thread
import os
import pickle
import shutil
import signal
import sys
import tempfile
import traceback
from collections.abc import Callable
from contextlib import suppress
from queue import SimpleQueue
from threading import Thread
from typing import IO, Any

from zeropipe.core.workers import NO_LIMITS, CallCancelled, Limits, Status, WorkerError, WorkerMemoryError
from zeropipe.errors import ZeropipeError


class CallLoop:
    """Runs calls one after the other; each has an id by which it can be cancelled."""

    def __init__(self, source: IO[bytes], sink: IO[bytes], scratch: str = "", limits: Limits = NO_LIMITS) -> None:
        self._source, self._sink, self._scratch, self._limits = source, sink, scratch, limits
        self._calls: SimpleQueue[tuple[int, Callable[..., Any], tuple[Any, ...]]] = SimpleQueue()
        self._current = self._cancelled = 0  # ids of calls

    def read_in_background(self) -> None:
        """Start to read calls and cancellations."""
        signal.signal(signal.SIGINT, self._handle_interrupt)
        Thread(target=self._read, daemon=True).start()

    def run(self) -> None:
        """Run calls until the process exits."""
        while True:
            call_id, function, args = self._calls.get()
            self._sink.write(self._outcome(call_id, function, args))
            self._sink.flush()

    def _outcome(self, call_id: int, function: Callable[..., Any], args: tuple[Any, ...]) -> bytes:
        """Run a call; how it ended and its result or error, pickled."""
        try:
            self._current = call_id
            if self._cancelled == call_id:
                return pickle.dumps((Status.CANCELLED, None))
            return pickle.dumps((Status.DONE, function(*args)), pickle.HIGHEST_PROTOCOL)
        except CallCancelled:
            status = Status.CANCELLED_IN_TORCH if "torch" in sys.modules else Status.CANCELLED
            return pickle.dumps((status, None))
        except MemoryError:
            limit = self._limits.memory
            size = f"more than {limit / 2**30:.0f} GiB of memory" if limit else "more memory than there is"
            return pickle.dumps((Status.RAISED, WorkerMemoryError(f"this takes {size}")))
        except Exception as error:
            return pickle.dumps((Status.RAISED, error if _is_for_caller(error) else _report_failure(error)))
        finally:
            self._current = 0

    def _handle_interrupt(self, signum: int, frame: Any) -> None:
        if self._current and self._current == self._cancelled:
            self._current = 0
            raise CallCancelled

    def _read(self) -> None:
        try:
            while True:
                call_id, function, args = pickle.load(self._source)
                if function is not None:
                    self._calls.put((call_id, function, args))
                    continue
                self._cancelled = call_id
                if call_id == self._current:
                    _thread.interrupt_main()
        except EOFError:  # the parent has ended
            self._exit(0)
        except BaseException:
            traceback.print_exc()
            self._exit(1)

    def _exit(self, status: int) -> None:
        """Exit at once, whatever the main thread does. The parent may be gone, so temporary files are removed here."""
        shutil.rmtree(self._scratch, ignore_errors=True)
        os._exit(status)


def _is_for_caller(error: Exception) -> bool:
    """Whether the error is one of ours that the parent can unpickle."""
    try:
        return isinstance(error, ZeropipeError) and bool(pickle.loads(pickle.dumps(error)))
    except Exception:
        return False


def _report_failure(error: Exception) -> WorkerError:
    """Print the traceback, for whoever started the parent; the caller gets one line."""
    traceback.print_exception(error)
    return WorkerError(f"{type(error).__name__}: {error}")


def main() -> None:
    """Run by `workers.Worker`, with the folder of temporary files and the limits as arguments."""
    tempfile.tempdir, memory, niceness = sys.argv[1:]
    limits = Limits(int(memory) if memory else None, int(niceness))
    _apply(limits)
    source = _take_stream(0, "rb", os.open(os.devnull, os.O_RDONLY))
    sink = _take_stream(1, "wb", 2)
    try:
        initializer, initargs = pickle.load(source)
    except EOFError:
        return
    loop = CallLoop(source, sink, tempfile.tempdir, limits)
    loop.read_in_background()
    initializer(*initargs)
    loop.run()


def _apply(limits: Limits) -> None:
    """Lower the priority and the memory limit, where the system can do so."""
    with suppress(AttributeError, OSError):
        os.nice(limits.niceness)
    with suppress(ImportError, OSError, ValueError):
        import resource

        if limits.memory is not None:
            hard = resource.getrlimit(resource.RLIMIT_DATA)[1]
            resource.setrlimit(resource.RLIMIT_DATA, (limits.memory, hard))


def _take_stream(descriptor: int, mode: str, replacement: int) -> IO[bytes]:
    """Move a standard stream to another descriptor: a user's code that prints or reads must not use ours."""
    stream = os.fdopen(os.dup(descriptor), mode)
    os.dup2(replacement, descriptor)
    return stream
