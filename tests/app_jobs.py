"""Jobs for the page's worker processes, in a module of their own, as they are sent by name."""

import os
import tempfile
import time
from contextlib import suppress

from zeropipe.app.errors import Refusal


def add(a, b):
    return a + b


def process():
    return os.getpid()


def refuse():
    raise Refusal(("ranks", "ranks=0: no"))


def fail():
    raise ValueError("two\nlines")


def chatter():
    print("not an answer")
    return os.read(0, 1)


def grow():
    return len(bytearray(64 * 2**30))  # nothing is written there


def die():
    os._exit(3)


def spin(path):
    """Never ends by itself, but listens; catches what a schedule of a user might catch."""
    open(path, "w").close()
    while True:
        with suppress(Exception):
            sum(range(100))


def sleep_deaf(path):
    """Does not listen while it sleeps; leaves a temporary file."""
    with open(tempfile.mkstemp()[1]) as file, open(path, "w") as out:
        out.write(file.name)
    time.sleep(600)
