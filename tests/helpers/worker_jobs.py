"""Functions for worker processes, which import them by name."""

import os
import tempfile
import time
from contextlib import suppress

from zeropipe.app.errors import Refusal
from zeropipe.core.workers import Worker
from zeropipe.errors import MissingExtra

prepared = []


def prepare(*args):
    prepared.extend(args)


def initargs():
    return tuple(prepared)


def add(a, b):
    return a + b


def process():
    return os.getpid()


def niceness():
    return os.nice(0)


def refuse():
    raise Refusal(("ranks", "ranks=0: no"))


def miss():
    raise MissingExtra("numba", "search")


def fail():
    raise ValueError("two\nlines")


def return_unpicklable():
    return lambda: None


def use_stdin_and_stdout():
    print("not an answer")
    return os.read(0, 1)


def allocate(size):
    return len(bytearray(size))  # never written to


def die():
    os._exit(3)


def spin(path):
    """Never end, but check for interrupts; catch what a user's schedule might catch."""
    open(path, "w").close()
    while True:
        with suppress(Exception):
            sum(range(100))


def sleep(path):
    """Sleep without checking for interrupts; leave a temporary file."""
    with open(tempfile.mkstemp()[1]) as file, open(path, "w") as out:
        out.write(file.name)
    time.sleep(600)


def sleep_with_worker(path):
    """Wait for a worker process of its own, as the planner does; write its pid."""
    inner = Worker(prepare)
    with open(path + ".tmp", "w") as out:
        out.write(str(inner.call(process)))
    os.rename(path + ".tmp", path)
    inner.call(sleep, path + ".inner")
