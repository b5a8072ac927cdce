"""`SearchDriver`: candidates, local search, bounds, the solver and smaller memory limits, within a time or by steps."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor, wait
from dataclasses import dataclass
from itertools import product
from time import monotonic
from typing import NamedTuple

import numpy as np

from zeropipe.core.timeline import Timeline
from zeropipe.searching import solver
from zeropipe.searching.bounds.lower_bound import THOROUGH_EFFORT, lower_bound
from zeropipe.searching.bounds.subset_bound import UNLIMITED_EFFORT
from zeropipe.searching.candidates.beams import FIRST_WIDTH, narrow_beams, wide_beams
from zeropipe.searching.candidates.registered import registered_schedules, sequential_rows
from zeropipe.searching.candidates.rules import dispatched_candidates
from zeropipe.searching.evaluator import Candidate, Evaluator, best_of
from zeropipe.searching.local_search import AT_BOUND, Effort, local_search
from zeropipe.searching.overlap_search import OverlapSearch
from zeropipe.searching.tables import Array
from zeropipe.searching.task import SearchTask, pass_starts, schedule_passes, timeline_value
from zeropipe.sim.fill import fill_gaps
from zeropipe.sim.simulate import simulate

MAX_CANDIDATES = 8  # for the local search ...
MAX_BEAM_CANDIDATES = 4  # ... of which narrow beams may give so many ...
BEAM_CANDIDATE_RATIO = 1.02  # ... that are at most so much worse than the best

# narrow beams
BEAM_TRY_RATIO = 1.03  # to the best other candidate: wider beams follow if the first ones come so near
BEAM_TIME, LEADING_BEAM_TIME = 0.25, 0.7  # parts of the time, the second one where beams lead
STEPS_PER_BEAM, STEPS_PER_BEAM_ALONE = 4, 1  # steps per width; the second one where there are no smaller limits
MAX_BEAM_PASSES = 20_000  # of a task, for all beams

# parts of the time that is left
MAIN_TIME, MAIN_TIME_LEFT = 0.6, 0.15  # for the limit itself; all of it where less than the second number is left
GAP_TIME = 0.6  # for better bounds and wide beams
SMALLER_TIME = 0.5  # for smaller limits
SOLVER_TIME = 0.8  # of a subproblem that the solver takes on
MAX_JOINED = 2  # candidates of a subproblem whose orders are taken for Overlaps
OVERLAP_TIME = 0.5  # of a subproblem whose Overlaps save time

# gaps: value over bound
OPEN_GAP = 1.02  # above it the bound gets more effort
WIDE_BEAM_GAP = 1.005  # above it wide beams follow
BOUND_EFFORT_PER_STEP = 50  # by steps
OPEN_EFFORT_GROWTH, MAX_OPEN_EFFORT = 10, 10_000_000
MAX_SOLVER_ACTIONS = 150
TICK_SECONDS = 0.1  # between two calls of `progress`


class Progress(NamedTuple):
    """The state of a search."""

    seconds: float
    value: float
    bound: float

    @property
    def gap(self) -> float:
        """How far the value is above the bound."""
        return relative_gap(self.value, self.bound)


def relative_gap(value: float, bound: float) -> float:
    """Return value / bound - 1, and 0 where they differ by rounding."""
    if value <= bound * AT_BOUND:
        return 0.0
    return value / bound - 1 if bound > 0 else float("inf")


@dataclass(eq=False)
class Subproblem:
    """One placement under one memory limit: the limit of the search, or a smaller one."""

    placement: int  # index of the task with the limit of the search
    task: SearchTask
    bound: float
    candidates: list[Candidate] | None = None  # the best first; None until they are searched
    beams: Iterator[tuple[int, Candidate | None]] | None = None
    beam_seconds: float = 0.0  # that the next beams may take
    overlaps: OverlapSearch | None = None


class SearchDriver:
    """One search over tasks of the same sizes and costs with different placements."""

    def __init__(
        self,
        tasks: list[SearchTask],
        *,
        steps: int | None,
        seconds: float,
        seed: int,
        workers: int,
        progress: Callable[[Progress], object] | None,
    ) -> None:
        self._tasks, self._steps, self._seconds = tasks, steps, seconds
        self._seed, self._workers, self._progress = seed, workers, progress
        self._start, self._last_tick, self._is_stopped = monotonic(), 0.0, False
        self._mains = [Subproblem(index, task, lower_bound(task)) for index, task in enumerate(tasks)]
        self._smaller: list[Subproblem] | None = None
        self._known_rows: list[list[Array]] = [[] for _ in tasks]
        self._best: Timeline | None = None
        self._value = float("inf")
        self._round = 0  # walks of each round have other seeds
        self.registered: Timeline | None = None  # the best registered schedule that fits

    @property
    def bound(self) -> float:
        """A bound for all placements."""
        return min(main.bound for main in self._mains)

    @property
    def elapsed(self) -> float:
        """Seconds since the start."""
        return monotonic() - self._start

    @property
    def _left(self) -> float:
        return self._seconds - self.elapsed

    def run(self) -> tuple[Timeline, bool]:
        """Return the best timeline, and whether the search was interrupted."""
        try:
            self._add_registered()
            mains = sorted(self._mains, key=lambda main: main.bound)
            while not self._is_over:
                is_last = self._left <= MAIN_TIME_LEFT * self._seconds
                self._search_all(mains, self._left if is_last else MAIN_TIME * self._left)
                if self._round == 0:
                    self._close_gaps(mains, self.elapsed + GAP_TIME * self._left)
                self._search_all(self._smaller_subproblems(), SMALLER_TIME * self._left)
                self._round += 1
                if self._steps is not None:  # more memory is never worse: smaller limits get the same effort
                    self._close_gaps(self._smaller_subproblems(), float("inf"))
                    break
        except KeyboardInterrupt:
            if self._best is None:
                raise
            self._is_stopped = True
        assert self._best is not None
        return self._best, self._is_stopped

    @property
    def _is_over(self) -> bool:
        is_late = self._steps is None and self.elapsed >= self._seconds
        return self._is_stopped or is_late or self._value <= self.bound * AT_BOUND

    def _tick(self, value: float, until: float = float("inf")) -> bool:
        """Report progress; return True when it is time to stop."""
        now = self.elapsed
        if self._progress is not None and (value < self._value or now > self._last_tick + TICK_SECONDS):
            self._last_tick = now
            if self._progress(Progress(now, min(value, self._value), self.bound)) is True:
                self._is_stopped = True
        return self._is_stopped or (self._steps is None and now >= until)

    def _offer(self, timeline: Timeline) -> None:
        """Keep a timeline if it fits and is better."""
        value = timeline_value(timeline, self._tasks[0].minimizes_span)
        if value < self._value and self._tasks[0].fits(timeline):
            self._best, self._value = timeline, value
            self._tick(value)

    def _offer_candidate(self, task: SearchTask, candidate: Candidate) -> None:
        """Keep a candidate if it is better, also with its W moved into gaps once more."""
        if candidate.value >= self._value:
            return
        schedule = task.to_schedule(candidate.rows, candidate.min_fit)
        self._offer(simulate(schedule, task.costs))
        if task.problem.num_weight_parts == 1 and not task.minimizes_span:
            self._offer(simulate(fill_gaps(schedule, task.costs, weight_parts=1), task.costs))

    def _add_registered(self) -> None:
        """Offer the registered schedules as they are, and the rows that always fit."""
        for task, rows in zip(self._tasks, self._known_rows):
            rows.append(sequential_rows(task))
            if candidate := Evaluator(task).best_fit(rows[0]):
                self._offer_candidate(task, candidate)
            for schedule in registered_schedules(task):
                timeline = simulate(schedule, task.costs)
                rows.append(schedule_passes(schedule))
                self._offer(timeline)
                value = timeline_value(timeline, task.minimizes_span)
                if task.fits(timeline) and (
                    self.registered is None or value < timeline_value(self.registered, task.minimizes_span)
                ):
                    self.registered = timeline

    def _search_all(self, subproblems: list[Subproblem], seconds: float) -> None:
        """Search each subproblem that may lead to something better, all within a time."""
        until = self.elapsed + seconds
        for number, sub in enumerate(subproblems):
            now = self.elapsed
            end = now + max(0.0, until - now) / (len(subproblems) - number)
            is_small = sub.task.num_actions <= MAX_SOLVER_ACTIONS and sub.task.is_split_best and solver.is_available()
            has_overlaps = sub.task.has_overlap_savings
            if not self._is_over and sub.bound * AT_BOUND < self._value:
                rest = SOLVER_TIME if is_small else OVERLAP_TIME if has_overlaps else 0.0
                self._search(sub, end - rest * (end - now))
            if has_overlaps and not self._is_over and sub.bound * AT_BOUND < self._value:
                self._search_overlaps(sub, end)
            if is_small and not self._is_over and self._round == 0:
                self._solve(sub, end)

    def _search(self, sub: Subproblem, until: float) -> None:
        """Find candidates, once, and search from them."""
        if sub.candidates is None:
            rows = map(Evaluator(sub.task).best_fit, self._known_rows[sub.placement])
            ruled = dispatched_candidates(
                sub.task, MAX_CANDIDATES, sub.bound * AT_BOUND, lambda: self._tick(self._value, until)
            )
            sub.candidates = best_of([*ruled, *rows], MAX_CANDIDATES)
        if not sub.candidates:
            return
        sub.candidates = self._add_beams(sub, sub.candidates, until)
        task = self._tasks[sub.placement]
        self._offer_candidate(task, sub.candidates[0])
        effort = Effort(float("inf") if self._steps is None else self._steps, lambda value: self._tick(value, until))
        seed = self._seed + 7919 * self._round
        found = local_search(sub.task, sub.candidates, sub.bound, effort, seed, self._workers)
        self._offer_candidate(task, found)
        sub.candidates = best_of([found, *sub.candidates], MAX_CANDIDATES)
        self._is_stopped = self._is_stopped or effort.interrupted

    def _add_beams(self, sub: Subproblem, candidates: list[Candidate], until: float) -> list[Candidate]:
        """Return the candidates with those of narrow beams among them, of wider ones with every call."""
        best_other, start, done = candidates[0].value, self.elapsed, 0
        per_beam = STEPS_PER_BEAM if sub.task.smaller_limits() else STEPS_PER_BEAM_ALONE
        budget = float("inf") if self._steps is None else self._steps // per_beam
        is_large = int(sub.task.tables.row_start[-1]) > MAX_BEAM_PASSES
        if budget < FIRST_WIDTH or best_other <= sub.bound * AT_BOUND or is_large:
            return candidates
        if sub.beams is None:
            sub.beams = narrow_beams(sub.task, best_other, self._seed, self._workers)
        if self._tick(self._value, start + BEAM_TIME * (until - start) - sub.beam_seconds):
            return candidates
        found, widest = list[Candidate](), 0
        for width, candidate in sub.beams:
            if candidate is not None:
                found = best_of([candidate, *found], MAX_BEAM_CANDIDATES)
                self._offer_candidate(self._tasks[sub.placement], candidate)
            budget, done, widest = budget - width, done + width, max(width, widest)
            value = found[0].value if found else best_other
            is_hopeless = width > FIRST_WIDTH and (not found or value > BEAM_TRY_RATIO * best_other)
            if is_hopeless:
                sub.beams = iter(())
            if done:  # the next ones, one for each worker, may take twice as long
                sub.beam_seconds = 2 * self._workers * widest * (self.elapsed - start) / done
            part = LEADING_BEAM_TIME if value < best_other else BEAM_TIME
            is_late = self._tick(self._value, start + part * (until - start) - sub.beam_seconds)
            if is_hopeless or budget <= 0 or value <= sub.bound * AT_BOUND or is_late:
                break
        near = BEAM_CANDIDATE_RATIO * min([best_other, *(candidate.value for candidate in found)])
        found = [candidate for candidate in found if candidate.value <= near]
        return best_of([*candidates[: MAX_CANDIDATES - len(found)], *found], MAX_CANDIDATES)

    def _search_overlaps(self, sub: Subproblem, until: float) -> None:
        """Search for Overlaps, from the registered schedules and the best candidates."""

        def is_late() -> bool:
            return self._tick(self._value, until)

        if sub.overlaps is None:
            sub.overlaps = OverlapSearch(sub.task, self._seed, self._offer)
            sub.overlaps.add_schedules(registered_schedules(sub.task), is_late)
        best = (sub.task.to_schedule(one.rows, one.min_fit) for one in (sub.candidates or ())[:MAX_JOINED])
        sub.overlaps.add_schedules(best, is_late)
        sub.overlaps.improve(float("inf") if self._steps is None else self._steps, is_late)

    def _solve(self, sub: Subproblem, until: float) -> None:
        """Let the solver improve the value, and the bound."""
        if sub.bound * AT_BOUND >= self._value:
            return
        assert self._best is not None
        has_placement = self._best.schedule.placement == sub.task.placement
        solution = solver.solve(
            sub.task,
            pass_starts(self._best) if has_placement else None,
            self._value,
            sub.bound,
            seconds=max(0.0, until - self.elapsed),
            steps=self._steps,
            seed=self._seed,
            workers=self._workers,
            stopped=lambda: self._tick(self._value, until),
        )
        if sub in self._mains:
            sub.bound = max(sub.bound, solution.bound)
        if solution.rows is not None and (candidate := Evaluator(sub.task).best_fit(solution.rows)):
            self._offer_candidate(self._tasks[sub.placement], candidate)

    def _close_gaps(self, subproblems: list[Subproblem], until: float) -> None:
        """Find better bounds, and wide beams where the gap is open: side by side, or by steps one after the other."""
        if self._is_over:
            return
        stop = np.zeros(1, np.int64)
        with ThreadPoolExecutor(2 if self._steps is None else 1) as threads:
            bounds = threads.submit(self._raise_bounds, subproblems, stop)
            beams = threads.submit(self._run_wide_beams, subproblems, stop)
            try:
                while not (wait([bounds], TICK_SECONDS).done and wait([beams], TICK_SECONDS).done):
                    stop[0] = self._tick(self._value, until)
            except KeyboardInterrupt:
                stop[0] = 1
                raise
        bounds.result()
        for sub, candidate in beams.result():
            sub.candidates = best_of([candidate, *(sub.candidates or ())], MAX_CANDIDATES)
            self._offer_candidate(self._tasks[sub.placement], candidate)

    def _raise_bounds(self, subproblems: list[Subproblem], stop: Array) -> None:
        """Raise the bounds at the limit of the search, now that a value is known."""
        rounds = [(AT_BOUND, UNLIMITED_EFFORT)]
        if self._steps is not None:
            effort = BOUND_EFFORT_PER_STEP * self._steps
            rounds = [
                (AT_BOUND, max(THOROUGH_EFFORT, effort)),
                (OPEN_GAP, min(MAX_OPEN_EFFORT, OPEN_EFFORT_GROWTH * effort)),
            ]
        for sub, (gap, effort) in product([sub for sub in subproblems if sub in self._mains], rounds):
            if not stop[0] and sub.bound * gap < self._value:
                sub.bound = max(sub.bound, lower_bound(sub.task, effort, self._value, stop))

    def _run_wide_beams(self, subproblems: list[Subproblem], stop: Array) -> list[tuple[Subproblem, Candidate]]:
        """Return the candidates of wide beams where the gap is open."""
        found = list[tuple[Subproblem, Candidate]]()
        for sub in subproblems:
            if sub.candidates:
                target = WIDE_BEAM_GAP * sub.bound
                beams = wide_beams(sub.task, sub.candidates[0].value, target, self._steps, self._seed, stop)
                found.extend((sub, candidate) for candidate in beams)
        return found

    def _smaller_subproblems(self) -> list[Subproblem]:
        """Return the placements with smaller limits, the largest first: what fits there fits here."""
        if self._smaller is None:
            self._smaller = []
            for index, task in enumerate(self._tasks):
                for limit in task.smaller_limits():
                    smaller = task.with_limit(limit)
                    bound = lower_bound(smaller, cap=self._value)
                    if bound * AT_BOUND >= self._value:
                        break
                    self._smaller.append(Subproblem(index, smaller, bound))
            self._smaller.sort(key=lambda sub: -max(sub.task.memory_limits))
        return [sub for sub in self._smaller if sub.bound * AT_BOUND < self._value]
