"""The worker process: reads jobs from its input, writes what comes of them, and ends when the input does.

The main thread computes; another one reads, so that the word to stop is heard while a job runs. It interrupts the main
thread as Ctrl-C would, between two instructions of Python, also on Windows.
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
from contextlib import suppress
from queue import SimpleQueue
from threading import Thread
from typing import IO, Any

from zeropipe.app.errors import Refusal
from zeropipe.app.hands import DONE, RAISED, STOPPED, UNSURE, Failed, Outgrown
from zeropipe.app.lanes import Job, Stopped
from zeropipe.core.jit import live_on
from zeropipe.errors import ZeropipeError
from zeropipe.schedules.user import entry_of

NICE = 10  # the page answers small requests before this goes on
MEMORY = 4 * 2**30  # bytes, ten times of what counting a large model takes


class Worker:
    """Jobs one after the other, each with a number by which it can be stopped."""

    def __init__(self, source: IO[bytes], sink: IO[bytes], scratch: str) -> None:
        self._source, self._sink, self._scratch = source, sink, scratch
        self._jobs: SimpleQueue[tuple[int, Job]] = SimpleQueue()
        self._current = self._unwanted = 0  # numbers of jobs

    def listen(self) -> None:
        signal.signal(signal.SIGINT, self._interrupted)  # Ctrl-C in the terminal is for the server
        Thread(target=self._read, daemon=True).start()

    def serve(self) -> None:
        while True:
            number, job = self._jobs.get()
            pickle.dump(self._outcome(number, job), self._sink, pickle.HIGHEST_PROTOCOL)
            self._sink.flush()

    def _outcome(self, number: int, job: Job) -> tuple[str, Any]:
        try:
            self._current = number
            if self._unwanted == number:
                return STOPPED, None
            return DONE, job.function(*job.args)
        except Stopped:  # torch has switches that a piece of code sets for a while, and that may be left as they are
            return STOPPED, UNSURE if "torch" in sys.modules else None
        except MemoryError:
            size = f"more than {MEMORY / 2**30:.0f} GiB of memory"
            return RAISED, Outgrown(
                f"this takes {size}, which is all the page gives: ask for less, or use the command line"
            )
        except Refusal as refusal:
            return RAISED, refusal
        except Exception as error:
            traceback.print_exc()  # for whoever started the server; the client gets one line
            return RAISED, Failed(f"{type(error).__name__}: {error}")
        finally:
            self._current = 0

    def _interrupted(self, signum: int, frame: Any) -> None:
        if self._current and self._current == self._unwanted:
            self._current = 0
            raise Stopped

    def _read(self) -> None:
        try:
            while True:
                number, job = pickle.load(self._source)
                if job is not None:
                    self._jobs.put((number, job))
                    continue
                self._unwanted = number
                if number == self._current:
                    _thread.interrupt_main()
        except EOFError:  # the server is gone
            self._leave(0)
        except BaseException:
            traceback.print_exc()
            self._leave(1)

    def _leave(self, status: int) -> None:
        """At once, whatever the main thread does. Nobody else takes the temporary files away."""
        shutil.rmtree(self._scratch, ignore_errors=True)
        os._exit(status)


def _private(descriptor: int, mode: str, instead: int) -> IO[bytes]:
    """The stream under a new descriptor: what a schedule of the user's prints or reads must not go there."""
    stream = os.fdopen(os.dup(descriptor), mode)
    os.dup2(instead, descriptor)
    return stream


def main() -> None:
    """Run by `zeropipe.app.hands`, which tells first where temporary files go and which files hold schedules."""
    with suppress(AttributeError, OSError):  # Windows has none
        os.nice(NICE)
    with suppress(ImportError, OSError, ValueError):  # nor this
        import resource

        resource.setrlimit(resource.RLIMIT_DATA, (MEMORY, resource.getrlimit(resource.RLIMIT_DATA)[1]))
    source = _private(0, "rb", os.open(os.devnull, os.O_RDONLY))
    sink = _private(1, "wb", 2)
    try:
        tempfile.tempdir, schedules = pickle.load(source)
    except EOFError:
        return
    for spec in schedules:
        try:
            entry_of(spec)
        except ZeropipeError as error:
            print(f"zeropipe: {error}", file=sys.stderr)
    worker = Worker(source, sink, tempfile.gettempdir())
    worker.listen()
    _warm_up()
    worker.serve()


def _warm_up() -> None:
    """Load what large jobs need before the first one comes. The first time ever, this compiles it, for some seconds."""
    from zeropipe.app.calls import simulate_call
    from zeropipe.app.models import Ask

    live_on()
    simulate_call(Ask.model_validate({"ranks": 8, "microbatches": 64, "schedules": [{"name": "zbv"}]}), {})
