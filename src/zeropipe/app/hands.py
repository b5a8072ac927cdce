"""A worker process for large jobs: started with the first one, kept for the next, and killed if it does not stop."""

from __future__ import annotations

import os
import pickle
import subprocess
import sys
from collections.abc import Sequence
from contextlib import suppress
from tempfile import TemporaryDirectory
from threading import Event, Lock, Thread
from typing import Any

from zeropipe.app.lanes import Job, Stopped

GRACE = 0.4  # seconds a job gets to stop by itself, which keeps its process and what that has compiled
DONE, RAISED, STOPPED = "done", "raised", "stopped"  # how a job ends
UNSURE = "unsure"  # what is said of a stopped job: it may have left something behind that others would meet
_START = "from zeropipe.app.worker import main; main()"


class Failed(Exception):
    """A job ended in a way that is not its caller's mistake."""


class Outgrown(Failed):
    """A job wanted more memory than a worker has."""


class Process:
    """One run of `zeropipe.app.worker`, with pipes to it and a folder for its temporary files.

    It ends by itself when its input ends, also where this process was killed.
    """

    def __init__(self, schedules: Sequence[str]) -> None:
        self._scratch = TemporaryDirectory(prefix="zeropipe-", ignore_cleanup_errors=True)
        found_in = os.pathsep.join(os.path.abspath(path) for path in sys.path)  # what is imported here is found there
        self._popen = subprocess.Popen(
            [sys.executable, "-P", "-c", _START], stdin=subprocess.PIPE, stdout=subprocess.PIPE,
            env={**os.environ, "PYTHONPATH": found_in, "HF_HUB_OFFLINE": "1"},  # nothing is fetched from elsewhere
            creationflags=getattr(subprocess, "BELOW_NORMAL_PRIORITY_CLASS", 0),
        )  # fmt: skip
        self._writing, self._reading = Lock(), Lock()  # a pipe is not closed in the middle of a message
        self.send((self._scratch.name, tuple(schedules)))

    def send(self, message: Any, patience: float = -1) -> None:
        """Write a message, unless another one is still being written when `patience` is at its end."""
        pipe = self._popen.stdin
        assert pipe is not None
        if not self._writing.acquire(timeout=patience):
            return
        try:
            if pipe.closed:
                raise BrokenPipeError
            pickle.dump(message, pipe, pickle.HIGHEST_PROTOCOL)
            pipe.flush()
        finally:
            self._writing.release()

    def receive(self) -> Any:
        """Read a message; EOFError where there is none any more."""
        pipe = self._popen.stdout
        assert pipe is not None
        with self._reading:
            if pipe.closed:
                raise EOFError
            return pickle.load(pipe)

    def kill(self) -> None:
        self._popen.kill()

    def end(self) -> int:
        """Kill it if need be, take away what it leaves, and its exit status."""
        self._popen.kill()
        status = self._popen.wait()
        for pipe, lock in ((self._popen.stdin, self._writing), (self._popen.stdout, self._reading)):
            with lock, suppress(OSError):  # what was still to be written
                pipe.close()  # type: ignore[union-attr]
        self._scratch.cleanup()
        return status


class WorkerHand:
    """Does jobs in a worker process."""

    def __init__(self, schedules: Sequence[str] = ()) -> None:
        self._schedules = schedules  # path/to/mine.py:name, for the worker to load
        self._process: Process | None = None
        self._number = 0
        self._ended = Event()  # the present job has
        self._stopping = self._closed = False
        self._state = Lock()

    def warm(self) -> None:
        """Start the process, so that the first job does not wait for it."""
        with self._state:
            if self._process is None and not self._closed:
                self._process = Process(self._schedules)

    def do(self, job: Job) -> Any:
        self.warm()
        with self._state:
            process = self._process
            if process is None:
                raise Stopped
            self._number += 1
            self._ended, self._stopping = Event(), False
        try:
            process.send((self._number, job))
            how, what = process.receive()
        except (OSError, EOFError, pickle.UnpicklingError):
            how, what = self._lost(process)
        finally:
            self._ended.set()
        if how == DONE:
            return what
        if isinstance(what, Failed) or what == UNSURE:
            self._forget(process)  # whatever went wrong in it does not go on
        raise what if how == RAISED else Stopped

    def _forget(self, process: Process) -> int:
        """End the process, and begin with a new one if it was the present one; its exit status."""
        with self._state:
            if self._process is process:
                self._process = None
        status = process.end()
        self.warm()
        return status

    def _lost(self, process: Process) -> tuple[str, Any]:
        """The process is gone: because it was told to, or by itself."""
        status = self._forget(process)
        if self._stopping or self._closed:
            return STOPPED, None
        reason = f"signal {-status}" if status < 0 else f"status {status}"
        hint = "; the machine may have too little memory for it: ask for less, or use the command line"
        return RAISED, Failed(f"the process that computed this ended with {reason}{hint}")

    def stop(self) -> None:
        with self._state:
            process, number, ended = self._process, self._number, self._ended
            if process is None or ended.is_set():
                return
            self._stopping = True
        Thread(target=_stop, args=(process, number, ended), name="zeropipe stop", daemon=True).start()

    def close(self) -> None:
        with self._state:
            self._closed = True
            process, self._process = self._process, None
        if process is not None:
            process.end()


def _stop(process: Process, number: int, ended: Event) -> None:
    """Ask, wait, kill."""
    with suppress(OSError):  # it is gone
        process.send((number, None), patience=GRACE)
    if not ended.wait(GRACE):
        process.kill()
