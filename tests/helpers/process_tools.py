"""Processes as tests see them: wait for a condition, whether a process runs, its children."""

import time
from contextlib import suppress
from pathlib import Path

PATIENCE = 60  # seconds: on a busy machine all takes longer; what is waited for takes one at most


def until(condition, what):
    end = time.monotonic() + PATIENCE
    while not condition():
        assert time.monotonic() < end, what
        time.sleep(0.02)


def alive(pid):
    """Whether a process runs; a zombie does not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def children(pid):
    """Processes that the threads of a process have started."""
    found = set()
    for listed in Path(f"/proc/{pid}/task").glob("*/children"):
        with suppress(FileNotFoundError):  # of a thread that has ended meanwhile
            found |= set(map(int, listed.read_text().split()))
    return found
