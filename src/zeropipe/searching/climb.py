"""Local search: many short walks from good starts, longer ones from those that did best."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass, field

import numpy as np

from zeropipe.core.jit import compiled
from zeropipe.searching import kernels, walks
from zeropipe.searching.judge import Judge, Start, best_of
from zeropipe.searching.model import Array, Task
from zeropipe.searching.starts.rules import anyhow, lengthened, most_alive, shortened

HEAT = 0.05  # of a mean F: what a walk may lose in a step at its begin
NEAR = 3.0  # mean F: ranks that end so near to the last one count a little
# (what, how many starts, times for each, steps of each): the last two lines are repeated
ROUNDS = (
    ("walk", 8, 1, 250), ("tune", 8, 1, 100), ("walk", 4, 1, 1000), ("tune", 4, 1, 250), ("walk", 2, 1, 4000),
    ("tune", 8, 1, 1000), ("walk", 2, 2, 16_000), ("tune", 6, 1, 3000), ("walk", 3, 1, 32_000),
)  # fmt: skip
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
    pool = _Pool(task, list(starts), bound, effort.stop, seed)
    with ThreadPoolExecutor(workers) as threads:
        for what, count, times, steps in _rounds():
            jobs = []
            for at in pool.choose(what, count):
                for _ in range(times):
                    length = int(min(steps, effort.steps))
                    if length >= 1 and pool.best.value > bound * ENOUGH:
                        effort.steps -= length
                        jobs.append(
                            (at, threads.submit(pool.walk if what == "walk" else pool.tune, at, length, pool.draw()))
                        )
            if not jobs:
                break
            _wait({job for _, job in jobs}, pool.best.value, effort)
            for at, job in jobs:
                pool.take(at, job.result())
            if effort.stop[0]:
                break
    return pool.best


def _wait(pending: set[Future[list[Start]]], value: float, effort: Effort) -> None:
    """Until all is done; Ctrl-C and `tick` stop all walks, which then hand over what they have."""
    while pending:
        try:
            done, pending = wait(pending, PAUSE)
            value = min([value, *(start.value for job in done for start in job.result())])
            if effort.tick(value):
                effort.stop[0] = 1
        except KeyboardInterrupt:
            effort.stop[0], effort.interrupted = 1, True


def _rounds() -> Iterator[tuple[str, int, int, int]]:
    yield from ROUNDS
    while True:
        yield from ROUNDS[-2:]


def walked(task: Task, start: Start, steps: int, number: int, bound: float, stop: Array) -> Start:
    """What a walk from a start leads to; another number walks elsewhere."""
    rows, share = start.rows.copy(), start.share.copy()
    best = rows.copy(), share.copy()
    settings = _settings(task, steps, number, bound, stop)
    spare = rows.copy(), share.copy()
    value = compiled(walks.walk)(task.model, task.work(), *settings, rows, share, spare, best)
    return Start(float(value), *best)


def _settings(
    task: Task, steps: int, number: int, bound: float, stop: Array
) -> tuple[bool, float, float, float, int, Array, Array]:
    f = float(task.model.lasts[: task.num_stages].mean())
    return task.span, NEAR * f, HEAT * f, bound * ENOUGH, steps, np.array([number], np.int64), stop


class _Pool:
    """Starts, and what each has led to so far."""

    def __init__(self, task: Task, starts: list[Start], bound: float, stop: Array, seed: int) -> None:
        self._task, self._short = task, shortened(task)
        self._starts, self._bound, self._stop = starts, bound, stop
        self._reached = [start.value for start in starts]
        self._seed, self._drawn = seed, 0
        self.best = starts[0]

    def draw(self) -> int:
        """A number for the next walk."""
        self._drawn += 1
        return (self._seed * 1_000_003 + self._drawn) * 2_654_435_761 % (1 << 62)

    def choose(self, what: str, count: int) -> list[int]:
        """The starts that have led to the best; half of those to be tuned are made up (-1)."""
        ranked = sorted(range(len(self._starts)), key=lambda at: (self._reached[at], at))
        if what == "walk":
            return ranked[:count]
        ruled = [at for at in ranked if self._starts[at].rule is not None][: count // 2]
        return ruled + [-1] * (count - len(ruled))

    def take(self, at: int, found: list[Start]) -> None:
        """Keep what was found: rows of a new rule are a start, changed rows say how good their start is."""
        for start in found:
            if start.value < self.best.value:
                self.best = start
            if start.rule is not None:
                self._starts.append(start)
                self._reached.append(start.value)
            else:
                self._reached[at] = min(self._reached[at], start.value)

    def walk(self, at: int, steps: int, number: int) -> list[Start]:
        """Change the rows of a start."""
        return [walked(self._task, self._starts[at], steps, number, self._bound, self._stop)]

    def tune(self, at: int, steps: int, number: int) -> list[Start]:
        """Change the rule of a start, or one that is made up."""
        task = self._short
        begin = self._starts[at].rule if at >= 0 else anyhow(task, np.random.default_rng(number))
        assert begin is not None
        rule, best = begin.copy(), begin.copy()
        most, rows = most_alive(task).astype(np.int64), np.zeros(int(task.model.begin[-1]), np.int64)
        value = compiled(walks.tune)(
            task.model,
            task.work(),
            *_settings(task, steps, number, self._bound if task is self._task else 0.0, self._stop),
            most,
            tuple(rule),
            tuple(rule.copy()),
            tuple(best),
            rows,
        )
        if value >= kernels.FAR:
            return []
        judge = Judge(task)
        start = judge.dispatch(best)
        return [] if start is None else best_of(lengthened(Judge(self._task), task, start), 2)
