"""Local search: many short walks from good starts, longer ones from those that did best."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor, wait
from dataclasses import dataclass, field

import numpy as np

from zeropipe.core.jit import compiled
from zeropipe.search import kernels
from zeropipe.search.judge import Start
from zeropipe.search.model import Array, Task

HEAT = 0.05  # of a mean F: what a walk may lose in a step at its begin
NEAR = 3.0  # mean F: ranks that end so near to the last one count a little
# (starts, walks of each, steps of a walk): the last line is repeated
ROUNDS = ((8, 1, 1000), (4, 1, 4000), (2, 2, 16_000), (3, 1, 32_000))
ENOUGH = 1 + 1e-9  # so near to the bound is at the bound
PAUSE = 0.05  # seconds between two looks at the clock


@dataclass
class Effort:
    """How much may still be done: a number of steps, and until someone says stop."""

    steps: float
    tick: Callable[[float], bool] = lambda value: False  # told the best value so far; True: stop
    stop: Array = field(default_factory=lambda: np.zeros(1, np.int64))
    interrupted: bool = False


def climb(task: Task, starts: list[Start], bound: float, effort: Effort, seed: int, workers: int) -> Start:
    """The best that walks from `starts` (the best first) find. Their number alone decides, not that of the workers."""
    best = starts[0]
    reached = {at: start.value for at, start in enumerate(starts)}
    number = 0
    with ThreadPoolExecutor(workers) as threads:
        for count, times, steps in _rounds():
            walks = []
            for at in sorted(reached, key=lambda at: (reached[at], at))[:count]:
                for _ in range(times):
                    length = int(min(steps, effort.steps))
                    if length < 1 or best.value <= bound * ENOUGH:
                        break
                    effort.steps -= length
                    number += 1
                    walks.append(
                        (at, threads.submit(_walk, task, starts[at], bound, effort.stop, length, seed, number))
                    )
            if not walks:
                break
            pending = {future for _, future in walks}
            value = best.value
            while pending:
                try:
                    done, pending = wait(pending, PAUSE)
                    value = min([value, *(future.result().value for future in done)])
                    if effort.tick(value):
                        effort.stop[0] = 1
                except KeyboardInterrupt:  # a walk that is told to stop hands over what it has
                    effort.stop[0], effort.interrupted = 1, True
            for at, future in walks:
                found = future.result()
                reached[at] = min(reached[at], found.value)
                if found.value < best.value:
                    best = found
            if effort.stop[0]:
                break
    return best


def _rounds() -> Iterator[tuple[int, int, int]]:
    yield from ROUNDS
    while True:
        yield ROUNDS[-1]


def _walk(task: Task, start: Start, bound: float, stop: Array, steps: int, seed: int, number: int) -> Start:
    f = float(task.model.lasts[: task.num_stages].mean())
    state = np.array([(seed * 1_000_003 + number) * 2_654_435_761 % (1 << 62)], np.int64)
    rows, share = start.rows.copy(), start.share.copy()
    best = rows.copy(), share.copy()
    value = compiled(kernels.walk)(
        task.model, task.work(), task.span, NEAR * f, HEAT * f, bound * ENOUGH, steps, state, stop,
        rows, share, (rows.copy(), share.copy()), best,
    )  # fmt: skip
    return Start(float(value), *best)
