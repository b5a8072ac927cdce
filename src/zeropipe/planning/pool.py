"""Score groups of candidates, in worker processes where there are many groups."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress
from queue import Empty, SimpleQueue
from threading import Thread
from typing import Any

from zeropipe.core.jit import use_compiled
from zeropipe.core.workers import Worker, WorkerError, WorkerMemoryError
from zeropipe.errors import ConfigError
from zeropipe.planning.rows import Candidate, Row
from zeropipe.planning.score import Scene, score_group

MIN_GROUPS = 30  # fewer are scored before worker processes have started
POLL_S = 0.1

Group = Sequence[Candidate]


def score_groups(
    scene: Scene, groups: Sequence[Group], workers: int, progress: Callable[[int], object]
) -> list[list[Row]]:
    """Return the rows of every group, in order; `progress` is called with the number of groups done."""
    results: list[list[Row]] = [[] for _ in groups]
    if workers == 1 or len(groups) < MIN_GROUPS:
        for index, group in enumerate(groups):
            results[index] = score_group(scene, group)
            progress(index + 1)
        return results
    pending: SimpleQueue[tuple[int, Group]] = SimpleQueue()
    for item in enumerate(groups):
        pending.put(item)
    done: SimpleQueue[tuple[int, Any]] = SimpleQueue()
    pool = [Worker(_set_scene, (scene,)) for _ in range(min(workers, len(groups)))]
    try:
        for worker in pool:
            Thread(target=_score_pending, args=(worker, pending, done), daemon=True).start()
        for count in range(1, len(groups) + 1):
            index, result = _get(done)
            if isinstance(result, BaseException):
                raise _explain(result, scene)
            results[index] = result
            progress(count)
    finally:
        for worker in pool:
            worker.close()
    return results


def _score_pending(worker: Worker, pending: SimpleQueue[tuple[int, Group]], done: SimpleQueue[tuple[int, Any]]) -> None:
    """Score groups until none is left or one fails."""
    with suppress(Empty):
        while True:
            index, group = pending.get_nowait()
            try:
                done.put((index, worker.call(_score, group)))
            except BaseException as error:
                done.put((index, error))
                return


def _get(done: SimpleQueue[tuple[int, Any]]) -> tuple[int, Any]:
    """Return the next result. Polls, because a thread is interrupted (as by Ctrl-C) only between two waits."""
    while True:
        with suppress(Empty):
            return done.get(timeout=POLL_S)


def _explain(error: BaseException, scene: Scene) -> BaseException:
    if isinstance(error, WorkerMemoryError):
        layers = scene.costs.num_layers
        return ConfigError(f"not enough memory to try {layers} layers on these GPUs: use fewer GPUs or pass --pp")
    return ConfigError(f"{error}; use workers=1") if isinstance(error, WorkerError) else error


_scene: Scene | None = None  # of this worker process


def _set_scene(scene: Scene) -> None:
    global _scene
    use_compiled()
    _scene = scene


def _score(group: Group) -> list[Row]:
    assert _scene is not None
    return score_group(_scene, group)
