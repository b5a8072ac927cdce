"""Local search: many short walks from good candidates, longer ones from those that led to the best."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass, field
from itertools import chain, cycle
from typing import NamedTuple

import numpy as np

from zeropipe.core.jit import compiled
from zeropipe.searching.candidates.rules import extend_candidate, fitting_activations, random_rule, shorten_task
from zeropipe.searching.evaluator import Candidate, Evaluator, best_of
from zeropipe.searching.local_search_kernel import Annealing, tune_rule, walk_rows
from zeropipe.searching.row_kernels import NEVER
from zeropipe.searching.tables import Array, row_buffers
from zeropipe.searching.task import SearchTask

TEMPERATURE = 0.05  # of a mean F: what a walk may lose in a step at its start
NEAR_END = 3.0  # mean F: ranks that end so near to the last one count a little
AT_BOUND = 1 + 1e-9  # times the bound: a value up to this is at the bound
TICK_SECONDS = 0.05  # between two calls of `Effort.tick`


class Round(NamedTuple):
    """Walks over rows, or over dispatch rules, side by side."""

    tunes_rules: bool
    num_candidates: int
    walks_each: int
    steps: int  # of each walk


FIRST_ROUNDS = (
    Round(False, 8, 1, 250), Round(True, 8, 1, 100), Round(False, 4, 1, 1000), Round(True, 4, 1, 250),
    Round(False, 2, 1, 4000), Round(True, 8, 1, 1000), Round(False, 2, 2, 16_000),
)  # fmt: skip
REPEATED_ROUNDS = (Round(True, 6, 1, 3000), Round(False, 3, 1, 32_000))


@dataclass
class Effort:
    """How much a local search may still do: a number of steps, and until `tick` returns True."""

    steps: float
    tick: Callable[[float], bool] = lambda value: False  # called with the best value so far
    stop: Array = field(default_factory=lambda: np.zeros(1, np.int64))  # 1 ends all walks
    interrupted: bool = False


def local_search(
    task: SearchTask, candidates: list[Candidate], bound: float, effort: Effort, seed: int, workers: int
) -> Candidate:
    """Return the best that walks from `candidates` (the best first) find. The number of workers changes nothing."""
    pool = _Pool(task, list(candidates), bound, effort.stop, seed)
    with ThreadPoolExecutor(workers) as threads:
        for one in chain(FIRST_ROUNDS, cycle(REPEATED_ROUNDS)):
            jobs = []
            for index in pool.choose(one):
                for _ in range(one.walks_each):
                    steps = int(min(one.steps, effort.steps))
                    if steps >= 1 and pool.best.value > bound * AT_BOUND:
                        effort.steps -= steps
                        walk = pool.tune if one.tunes_rules else pool.walk
                        jobs.append((index, threads.submit(walk, index, steps, pool.next_seed())))
            if not jobs:
                break
            _wait({job for _, job in jobs}, pool.best.value, effort)
            for index, job in jobs:
                pool.add(index, job.result())
            if effort.stop[0]:
                break
    return pool.best


def _wait(pending: set[Future[list[Candidate]]], value: float, effort: Effort) -> None:
    """Wait for all walks; Ctrl-C and `tick` stop them, and they return what they have."""
    while pending:
        try:
            done, pending = wait(pending, TICK_SECONDS)
            value = min([value, *(candidate.value for job in done for candidate in job.result())])
            if effort.tick(value):
                effort.stop[0] = 1
        except KeyboardInterrupt:
            effort.stop[0], effort.interrupted = 1, True


def walk_from(task: SearchTask, candidate: Candidate, steps: int, seed: int, bound: float, stop: Array) -> Candidate:
    """Return the best candidate that a walk finds."""
    rows, min_fit = candidate.rows.copy(), candidate.min_fit.copy()
    best_rows, best_fit = rows.copy(), min_fit.copy()
    value = compiled(walk_rows)(
        tables=task.tables, buffers=row_buffers(task.tables), annealing=_annealing(task, steps, bound),
        random=np.array([seed], np.int64), stop=stop, rows=rows, min_fit=min_fit, old_rows=rows.copy(),
        old_fit=min_fit.copy(), best_rows=best_rows, best_fit=best_fit,
    )  # fmt: skip
    return Candidate(float(value), best_rows, best_fit)


def _annealing(task: SearchTask, steps: int, bound: float) -> Annealing:
    mean_f = float(task.tables.duration[: task.num_stages].mean())
    return Annealing(
        minimizes_span=task.minimizes_span, near_end=NEAR_END * mean_f, temperature=TEMPERATURE * mean_f,
        target=bound * AT_BOUND, steps=steps,
    )  # fmt: skip


class _Pool:
    """Candidates, and the best value that walks from each have reached."""

    def __init__(self, task: SearchTask, candidates: list[Candidate], bound: float, stop: Array, seed: int) -> None:
        self._task, self._short, self._candidates = task, shorten_task(task), candidates
        self._bound, self._stop, self._seed, self._num_seeds = bound, stop, seed, 0
        self._reached = [candidate.value for candidate in candidates]
        self.best = candidates[0]

    def next_seed(self) -> int:
        """Return the seed of the next walk."""
        self._num_seeds += 1
        return (self._seed * 1_000_003 + self._num_seeds) * 2_654_435_761 % (1 << 62)

    def choose(self, one: Round) -> list[int]:
        """Return indices of the candidates that have led to the best; half of the rules to tune are random (-1)."""
        ranked = sorted(range(len(self._candidates)), key=lambda index: (self._reached[index], index))
        if not one.tunes_rules:
            return ranked[: one.num_candidates]
        ruled = [index for index in ranked if self._candidates[index].rule is not None][: one.num_candidates // 2]
        return ruled + [-1] * (one.num_candidates - len(ruled))

    def add(self, index: int, found: list[Candidate]) -> None:
        """Record results: rows of a new rule are a candidate, walks over rows tell how good their start is."""
        for candidate in found:
            if candidate.value < self.best.value:
                self.best = candidate
            if candidate.rule is not None:
                self._candidates.append(candidate)
                self._reached.append(candidate.value)
            else:
                self._reached[index] = min(self._reached[index], candidate.value)

    def walk(self, index: int, steps: int, seed: int) -> list[Candidate]:
        """Change the rows of a candidate."""
        return [walk_from(self._task, self._candidates[index], steps, seed, self._bound, self._stop)]

    def tune(self, index: int, steps: int, seed: int) -> list[Candidate]:
        """Change the rule of a candidate, or a random one."""
        task = self._short
        start = self._candidates[index].rule if index >= 0 else random_rule(task, np.random.default_rng(seed))
        assert start is not None
        best = start.copy()
        value = compiled(tune_rule)(
            tables=task.tables, buffers=row_buffers(task.tables),
            annealing=_annealing(task, steps, self._bound if task is self._task else 0.0),
            random=np.array([seed], np.int64), stop=self._stop, max_live=fitting_activations(task), rule=start.copy(),
            old=start.copy(), best=best, rows=np.zeros(int(task.tables.row_start[-1]), np.int64),
        )  # fmt: skip
        candidate = None if value >= NEVER else Evaluator(task).dispatch(best)
        return [] if candidate is None else best_of(extend_candidate(Evaluator(self._task), task, candidate), 2)
