"""Run functions in a worker process: with a memory limit, cancellation, and no process that outlives its parent.

A worker is a plain command that exchanges pickles over its stdin and stdout (`worker_main` is its side). The standard
library does not suffice here: `multiprocessing` imports the user's `__main__` again in the child, and
`concurrent.futures` cannot cancel a call that is running.
"""

from __future__ import annotations

import os
import pickle
import subprocess
import sys
from collections.abc import Callable, Mapping
from contextlib import suppress
from enum import Enum
from functools import partial
from tempfile import TemporaryDirectory
from threading import Event, Lock, Thread
from typing import Any, NamedTuple

CANCEL_GRACE_S = 0.4  # a cancelled call may end by itself, which keeps its process with the code it has loaded
_COMMAND = "from zeropipe.core.worker_main import main; main()"


class WorkerError(Exception):
    """A call failed for a reason that its caller cannot mend; the worker starts a new process."""


class WorkerMemoryError(WorkerError):
    """A call needed more memory than its worker may use."""


class CallCancelled(BaseException):
    """The call was cancelled. Not an Exception: a user's schedule that catches those must not continue."""


class Status(Enum):
    """How a call ended, as the worker process reports it."""

    DONE = "done"
    RAISED = "raised"
    CANCELLED = "cancelled"
    CANCELLED_IN_TORCH = "cancelled in torch"  # global switches of torch may be left set: the process is not reused


class Limits(NamedTuple):
    """Resources of a worker process."""

    memory: int | None = None  # bytes
    niceness: int = 0  # as of `os.nice`


NO_LIMITS = Limits()


def count_cores() -> int:
    """The number of CPU cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


class Worker:
    """Runs one call at a time in a process, which starts with the first call and is replaced after a failure.

    Functions, arguments and results are pickled, so a function must be importable by its name. `initializer(*initargs)`
    runs once in every process, before its first call.
    """

    def __init__(
        self, initializer: Callable[..., object], initargs: tuple[Any, ...] = (), *,
        limits: Limits = NO_LIMITS, environ: Mapping[str, str] | None = None,
    ) -> None:  # fmt: skip
        self._start_process = partial(_Process, initializer, initargs, limits, environ or {})
        self._process: _Process | None = None
        self._call_id = 0
        self._ended = Event()  # set when the current call has ended
        self._cancelling = self._closed = False
        self._lock = Lock()

    def start(self) -> None:
        """Start the process, so that the first call does not wait for it."""
        with self._lock:
            if self._process is None and not self._closed:
                self._process = self._start_process()

    def call(self, function: Callable[..., Any], *args: Any) -> Any:
        """Return `function(*args)`, or raise its ZeropipeError; WorkerError for other failures."""
        self.start()
        with self._lock:
            process = self._process
            if process is None:
                raise CallCancelled
            self._call_id += 1
            self._ended, self._cancelling = Event(), False
        try:
            process.send((self._call_id, function, args))
            status, value = process.receive()
        except (OSError, EOFError, pickle.UnpicklingError):
            return self._report_lost(process)
        finally:
            self._ended.set()
        if status is Status.DONE:
            return value
        if isinstance(value, WorkerError) or status is Status.CANCELLED_IN_TORCH:
            self._replace(process)
        raise value if status is Status.RAISED else CallCancelled

    def cancel(self) -> None:
        """Cancel the running call, if there is one. Returns at once; `call` raises CallCancelled soon."""
        with self._lock:
            process, call_id, ended = self._process, self._call_id, self._ended
            if process is None or not call_id or ended.is_set():
                return
            self._cancelling = True
        Thread(target=_cancel, args=(process, call_id, ended), name="zeropipe cancel", daemon=True).start()

    def close(self) -> None:
        """Kill the process, and with it the running call."""
        with self._lock:
            self._closed = True
            process, self._process = self._process, None
        if process is not None:
            process.end()

    def _replace(self, process: _Process) -> int:
        """End a process and start the next one; returns the exit status."""
        with self._lock:
            if self._process is process:
                self._process = None
        status = process.end()
        self.start()
        return status

    def _report_lost(self, process: _Process) -> Any:
        """Raise for a process that has ended: because it was killed here, or by itself."""
        status = self._replace(process)
        if self._cancelling or self._closed:
            raise CallCancelled
        reason = f"signal {-status}" if status < 0 else f"status {status}"
        raise WorkerError(f"the worker process ended with {reason}; the machine may be out of memory")


class _Process:
    """A worker process with its pipes and its folder of temporary files.

    It ends when its stdin ends, so also after this process was killed.
    """

    def __init__(
        self, initializer: Callable[..., object], initargs: tuple[Any, ...], limits: Limits, environ: Mapping[str, str]
    ) -> None:
        self._scratch = TemporaryDirectory(prefix="zeropipe-", ignore_cleanup_errors=True)
        path = os.pathsep.join(os.path.abspath(folder) for folder in sys.path)  # the worker imports what we import
        arguments = [self._scratch.name, str(limits.memory or ""), str(limits.niceness)]
        self._popen = subprocess.Popen(
            [sys.executable, "-P", "-c", _COMMAND, *arguments], stdin=subprocess.PIPE, stdout=subprocess.PIPE,
            env={**os.environ, "PYTHONPATH": path, **environ}, start_new_session=True,  # Ctrl-C is for the parent
            creationflags=getattr(subprocess, "BELOW_NORMAL_PRIORITY_CLASS", 0) if limits.niceness else 0,
        )  # fmt: skip
        self._writing, self._reading = Lock(), Lock()  # a pipe is not closed in the middle of a message
        with suppress(OSError):  # a process that ended already: its first call reports it
            self.send((initializer, initargs))

    def send(self, message: Any, timeout: float = -1) -> None:
        """Write a message, unless another one is still being written after `timeout` seconds."""
        data = pickle.dumps(message, pickle.HIGHEST_PROTOCOL)
        pipe = self._popen.stdin
        assert pipe is not None
        if not self._writing.acquire(timeout=timeout):
            return
        try:
            if pipe.closed:
                raise BrokenPipeError
            pipe.write(data)
            pipe.flush()
        finally:
            self._writing.release()

    def receive(self) -> Any:
        """Read a message; EOFError after the last one."""
        pipe = self._popen.stdout
        assert pipe is not None
        with self._reading:
            if pipe.closed:
                raise EOFError
            return pickle.load(pipe)

    def kill(self) -> None:
        self._popen.kill()

    def end(self) -> int:
        """Kill the process if it still runs, remove its files, and return its exit status."""
        self._popen.kill()
        status = self._popen.wait()
        for pipe, lock in ((self._popen.stdin, self._writing), (self._popen.stdout, self._reading)):
            with lock, suppress(OSError):  # of data that was not flushed
                pipe.close()  # type: ignore[union-attr]
        self._scratch.cleanup()
        return status


def _cancel(process: _Process, call_id: int, ended: Event) -> None:
    """Ask the process to cancel a call; kill it if the call goes on."""
    with suppress(OSError):  # it has ended
        process.send((call_id, None, ()), timeout=CANCEL_GRACE_S)
    if not ended.wait(CANCEL_GRACE_S):
        process.kill()
