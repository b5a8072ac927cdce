"""Other processes that score groups of candidates: `python -m zeropipe.planning.pool` is one of them.

They are started as plain commands that speak pickles over their pipes, so that a user's script is never run again, and
no state of this process is copied.
"""

from __future__ import annotations

import os
import pickle
import subprocess
import sys
from collections.abc import Callable, Sequence
from contextlib import suppress
from queue import Empty, SimpleQueue
from threading import Thread
from typing import IO, Any

from zeropipe.errors import ConfigError, ZeropipeError
from zeropipe.planning.rows import Candidate, Row
from zeropipe.planning.score import Scene, score_group

ALONE = 30  # groups that are done sooner than others have started
WAIT = 0.1  # seconds


def scored(
    scene: Scene, groups: Sequence[Sequence[Candidate]], workers: int, tell: Callable[[int], object]
) -> list[list[Row]]:
    """The rows of every group, in the order of the groups; `tell` is called with how many are done."""
    results: list[list[Row]] = [[] for _ in groups]
    if workers == 1 or len(groups) < ALONE:
        for at, group in enumerate(groups):
            results[at] = score_group(scene, group)
            tell(at + 1)
        return results
    todo: SimpleQueue[int] = SimpleQueue()
    for at in range(len(groups)):
        todo.put(at)
    ready: SimpleQueue[tuple[int, Any]] = SimpleQueue()
    helpers = [_Helper(scene) for _ in range(min(workers, len(groups)))]
    try:
        for helper in helpers:
            Thread(target=helper.work, args=(groups, todo, ready), daemon=True).start()
        for done in range(1, len(groups) + 1):
            at, result = _next(ready)
            if isinstance(result, BaseException):
                raise result
            results[at] = result
            tell(done)
    finally:
        for helper in helpers:
            helper.close()
    return results


def _next(ready: SimpleQueue[tuple[int, Any]]) -> tuple[int, Any]:
    """What is ready, in short waits: a thread that is told to stop hears it between two of them."""
    while True:
        with suppress(Empty):
            return ready.get(timeout=WAIT)


class _Helper:
    """One process."""

    def __init__(self, scene: Scene) -> None:
        path = os.pathsep.join(filter(None, sys.path))
        self._process = subprocess.Popen(
            [sys.executable, "-m", "zeropipe.planning.pool"], stdin=subprocess.PIPE, stdout=subprocess.PIPE,
            env={**os.environ, "PYTHONPATH": path}, start_new_session=True,  # Ctrl-C is for the parent
        )  # fmt: skip
        self._scene = scene

    def work(
        self, groups: Sequence[Sequence[Candidate]], todo: SimpleQueue[int], ready: SimpleQueue[tuple[int, Any]]
    ) -> None:
        """Take groups until none is left."""
        at = -1
        try:
            self._send(self._scene)
            while True:
                at = todo.get_nowait()
                self._send(groups[at])
                ready.put((at, pickle.load(self._process.stdout)))  # type: ignore[arg-type]
        except Empty:
            return
        except (OSError, EOFError, pickle.PickleError) as error:
            ready.put((at, ConfigError(f"a process of the planner ended early ({error!r}): try workers=1")))

    def _send(self, what: object) -> None:
        pipe: IO[bytes] | None = self._process.stdin
        assert pipe is not None
        pickle.dump(what, pipe)
        pipe.flush()

    def close(self) -> None:
        self._process.kill()
        self._process.wait()
        for pipe in (self._process.stdin, self._process.stdout):
            with suppress(OSError):
                pipe.close()  # type: ignore[union-attr]


def _serve(requests: IO[bytes], answers: IO[bytes]) -> None:
    """What the other process does: rows for groups, until its parent closes the pipe, or is gone: then at once."""
    from zeropipe.core.jit import live_on

    live_on()
    scene = pickle.load(requests)
    groups: SimpleQueue[Sequence[Candidate]] = SimpleQueue()
    Thread(target=_read, args=(requests, groups), daemon=True).start()
    with suppress(BrokenPipeError):
        while True:
            group = groups.get()
            try:
                answer: object = score_group(scene, group)
            except ZeropipeError as error:
                answer = error
            except MemoryError:
                layers = scene.costs.num_layers
                answer = ConfigError(f"too little memory to try {layers} layers on these GPUs: give fewer GPUs or --pp")
            pickle.dump(answer, answers)
            answers.flush()


def _read(requests: IO[bytes], groups: SimpleQueue[Sequence[Candidate]]) -> None:
    try:
        while True:
            groups.put(pickle.load(requests))
    except BaseException:  # nobody waits for what is being computed
        os._exit(0)


if __name__ == "__main__":
    with suppress(EOFError):
        _serve(sys.stdin.buffer, sys.stdout.buffer)
    os._exit(0)  # a parent that was killed reads nothing more
