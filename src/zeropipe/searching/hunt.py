"""The plan of a search: starts, local search, the solver, and smaller memory limits."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor, wait
from dataclasses import dataclass
from itertools import product
from time import monotonic
from typing import NamedTuple

import numpy as np

from zeropipe.core.timeline import Timeline
from zeropipe.searching import cpsat
from zeropipe.searching.bound.bound import THOROUGH, lower_bound
from zeropipe.searching.bound.few import ANY
from zeropipe.searching.climb import ENOUGH, Effort, climb
from zeropipe.searching.judge import Judge, Start, best_of
from zeropipe.searching.model import Array, Task, smaller_limits, starts_of
from zeropipe.searching.starts.beams import NARROW, beamed
from zeropipe.searching.starts.patterns import repeating
from zeropipe.searching.starts.rules import dispatched
from zeropipe.searching.starts.starts import named, one_by_one, passes_of
from zeropipe.searching.starts.wide import widened
from zeropipe.sim.fill import fill_gaps
from zeropipe.sim.simulate import simulate

POOL = 8  # starts that are kept for the local search
PATTERNS = 4  # of them may be patterns ...
CLOSE = 1.02  # ... that are at most so much worse than the best of the others
BEAMS = 4  # starts that beams may give ...
PROMISING = 1.03  # ... if the narrow ones come as near as this to the best of the others ...
BEAM, AHEAD = 0.25, 0.7  # ... in so much of the time, more where beams are ahead of all others ...
WIDE = 4  # ... or with one of their schedules for so many steps ...
WIDER = 1  # ... and for so many where no smaller limits take time as well
LARGE = 20_000  # passes; beams of more take too long
OPEN = 1.02  # times the bound: where a value is above that, there is more effort for a better bound ...
WORTH = 1.005  # ... and where it is above this, wide beams follow
FIRST = 0.6  # of the time that is left goes to the limit itself, the half of the rest to smaller ones, and so on
LAST = 0.15  # of all the time: so little that is left is not cut any more
PROOF = 0.6  # of the time that is left behind that goes to better bounds and wide beams
PROOFS = 50  # effort for each step elsewhere, some five times as long as the step takes: only where the gap is open
MORE, MOST = 10, 10_000_000  # so many times the effort, or this one, where the value is OPEN
SMALL = 150  # actions that the solver takes on
PAUSE = 0.1  # seconds between two calls of `progress`


class Progress(NamedTuple):
    """How far a search is."""

    seconds: float
    value: float
    bound: float

    @property
    def gap(self) -> float:
        """How far the value is above the bound."""
        return gap_of(self.value, self.bound)


def value_of(timeline: Timeline, span: bool) -> float:
    """The longest rank's own span, or the makespan."""
    return max(timeline.rank_span) if span else timeline.makespan


def gap_of(value: float, bound: float) -> float:
    """value / bound - 1, without the noise of rounding."""
    if value <= bound * ENOUGH:
        return 0.0
    return value / bound - 1 if bound > 0 else float("inf")


@dataclass(frozen=True, eq=False)
class _Leg:
    """One placement under one memory limit: the limit asked for, or a smaller one."""

    at: int  # of the placement
    task: Task
    bound: float


class Hunt:
    """One search over some tasks: the same sizes and costs, different placements."""

    def __init__(
        self,
        tasks: list[Task],
        *,
        steps: int | None,
        seconds: float,
        seed: int,
        workers: int,
        progress: Callable[[Progress], object] | None,
    ) -> None:
        self._tasks, self._steps, self._seconds = tasks, steps, seconds
        self._seed, self._workers, self._progress = seed, workers, progress
        self._begun = monotonic()
        self._told = 0.0
        self._bounds = [lower_bound(task) for task in tasks]
        self._rows: list[list[Array]] = [[] for _ in tasks]  # of the schedules with a name
        self._best: Timeline | None = None
        self.named: Timeline | None = None  # the best schedule with a name that fits
        self._value = float("inf")
        self._starts: dict[_Leg, list[Start]] = {}
        self._beams: dict[_Leg, Iterator[tuple[int, Start | None]]] = {}
        self._ahead: dict[_Leg, float] = {}  # seconds that the next ones may take
        self._less: list[_Leg] | None = None
        self._turn = 0  # walks of another turn go elsewhere
        self._stopped = False

    @property
    def bound(self) -> float:
        """No schedule of any of the placements beats this."""
        return min(self._bounds)

    @property
    def elapsed(self) -> float:
        """Seconds since the begin."""
        return monotonic() - self._begun

    def run(self) -> tuple[Timeline, bool]:
        """The best timeline, and whether the search was interrupted."""
        try:
            self._names()
            mains = [_Leg(at, task, bound) for at, (task, bound) in enumerate(zip(self._tasks, self._bounds))]
            mains.sort(key=lambda leg: leg.bound)
            while not self._over:
                left = self._seconds - self.elapsed
                self._go(mains, FIRST * left if left > LAST * self._seconds else left)
                if self._turn == 0:
                    self._close_gaps(mains, self.elapsed + PROOF * (self._seconds - self.elapsed))
                self._go(self._smaller(), 0.5 * (self._seconds - self.elapsed))
                self._turn += 1
                if self._steps is not None:  # then more memory is never worse: these limits get all that others get
                    self._close_gaps(self._smaller(), float("inf"))
                    break
        except KeyboardInterrupt:
            if self._best is None:
                raise
            self._stopped = True
        assert self._best is not None
        return self._best, self._stopped

    @property
    def _over(self) -> bool:
        """Nothing is left to be done."""
        late = self._steps is None and self.elapsed >= self._seconds
        return self._stopped or late or self._value <= self.bound * ENOUGH

    def _tick(self, value: float, until: float) -> bool:
        """Tell how far we are; True where it is time to stop."""
        now = self.elapsed
        if self._progress is not None and (value < self._value or now > self._told + PAUSE):
            self._told = now
            if self._progress(Progress(now, min(value, self._value), self.bound)) is True:
                self._stopped = True
        return self._stopped or (self._steps is None and now >= until)

    def _offer(self, timeline: Timeline) -> None:
        """Keep a timeline if it is better."""
        value = value_of(timeline, self._tasks[0].span)
        if value < self._value and self._tasks[0].fits(timeline):
            self._best, self._value = timeline, value
            self._tick(value, float("inf"))

    def _names(self) -> None:
        """The schedules with a name, as they are, and the one that always fits."""
        for task, rows in zip(self._tasks, self._rows):
            judge = Judge(task)
            rows.append(one_by_one(task))
            if start := judge.plays(rows[0]):
                self._take(task, start)
            for schedule in named(task):
                timeline = simulate(schedule, task.costs)
                rows.append(passes_of(schedule))
                self._offer(timeline)
                value = value_of(timeline, task.span)
                if task.fits(timeline) and (self.named is None or value < value_of(self.named, task.span)):
                    self.named = timeline

    def _take(self, task: Task, start: Start) -> None:
        """Keep what rows lead to, W moved into gaps once more, if it is better."""
        if start.value >= self._value:
            return
        schedule = task.schedule(start.rows, start.share)
        self._offer(simulate(schedule, task.costs))
        if task.problem.num_weight_parts == 1 and not task.span:
            self._offer(simulate(fill_gaps(schedule, task.costs, weight_parts=1), task.costs))

    def _go(self, legs: list[_Leg], seconds: float) -> None:
        """Search each leg that may lead to something better, all within some seconds."""
        until = self.elapsed + seconds
        for number, leg in enumerate(legs):
            now = self.elapsed
            end = now + max(0.0, until - now) / (len(legs) - number)
            small = leg.task.num_actions <= SMALL and leg.task.plain and cpsat.available()
            if not self._over and leg.bound * ENOUGH < self._value:
                self._search(leg, now + (0.2 if small else 1.0) * (end - now))
            if small and not self._over and self._turn == 0:
                self._prove(leg, end)

    def _search(self, leg: _Leg, until: float) -> None:
        """Starts, once, and walks from them."""
        if leg not in self._starts:
            self._starts[leg] = self._begin(leg, lambda: self._tick(self._value, until))
        if not self._starts[leg]:
            return
        starts = self._starts[leg] = self._beam(leg, self._starts[leg], until)
        task = self._tasks[leg.at]
        self._take(task, starts[0])
        effort = Effort(float("inf") if self._steps is None else self._steps, lambda value: self._tick(value, until))
        found = climb(leg.task, starts, leg.bound, effort, self._seed + 7919 * self._turn, self._workers)
        self._take(task, found)
        self._starts[leg] = best_of([found, *starts], POOL)
        self._stopped = self._stopped or effort.interrupted

    def _begin(self, leg: _Leg, stopped: Callable[[], bool]) -> list[Start]:
        """The best starts, the best first. Patterns have places of their own: their ends are easily made better."""
        judge = Judge(leg.task)
        ruled = dispatched(leg.task, POOL, leg.bound * ENOUGH, stopped)
        starts = best_of([*ruled, *(judge.plays(rows) for rows in self._rows[leg.at])], POOL)
        if not starts or starts[0].value <= leg.bound * ENOUGH:
            return starts
        near = CLOSE * starts[0].value
        patterns = best_of(
            (start for start in repeating(leg.task, starts[0].value, stopped) if start.value <= near), PATTERNS
        )
        return best_of([*starts[: POOL - len(patterns)], *patterns], POOL)

    def _beam(self, leg: _Leg, starts: list[Start], until: float) -> list[Start]:
        """The starts with those of beams among them, each time of wider ones."""
        wide = WIDE if smaller_limits(leg.task) else WIDER
        left, beams = float("inf") if self._steps is None else self._steps // wide, list[Start]()
        if left < NARROW or starts[0].value <= leg.bound * ENOUGH or int(leg.task.model.begin[-1]) > LARGE:
            return starts
        if leg not in self._beams:
            self._beams[leg], self._ahead[leg] = beamed(leg.task, starts[0].value, self._seed, self._workers), 0.0
        begun, done, widest = self.elapsed, 0, 0
        if self._tick(self._value, begun + BEAM * (until - begun) - self._ahead[leg]):
            return starts
        for width, start in self._beams[leg]:
            if start is not None:
                beams = best_of([start, *beams], BEAMS)
                self._take(self._tasks[leg.at], start)
            left, done, widest = left - width, done + width, max(width, widest)
            found = beams[0].value if beams else starts[0].value
            hopeless = width > NARROW and (not beams or found > PROMISING * starts[0].value)
            if hopeless:
                self._beams[leg] = iter(())
            if done:  # the next ones, one for each worker, may take twice as long
                self._ahead[leg] = 2 * self._workers * widest * (self.elapsed - begun) / done
            part = AHEAD if found < starts[0].value else BEAM
            late = self._tick(self._value, begun + part * (until - begun) - self._ahead[leg])
            if hopeless or left <= 0 or found <= leg.bound * ENOUGH or late:
                break
        near = CLOSE * min(start.value for start in (starts[0], *beams))
        beams = [start for start in beams if start.value <= near]
        return best_of([*starts[: POOL - len(beams)], *beams], POOL)

    def _prove(self, leg: _Leg, until: float) -> None:
        """Let the solver improve the value, and the bound of a placement at the limit itself."""
        if leg.bound * ENOUGH >= self._value:
            return
        assert self._best is not None
        same = self._best.schedule.placement == leg.task.placement
        found = cpsat.prove(
            leg.task,
            starts_of(self._best) if same else None,
            self._value,
            leg.bound,
            seconds=max(0.0, until - self.elapsed),
            steps=self._steps,
            seed=self._seed,
            workers=self._workers,
            stopped=lambda: self._tick(self._value, until),
        )
        if self._asked(leg):
            self._bounds[leg.at] = max(leg.bound, found.bound)
        if found.rows is not None and (start := Judge(leg.task).plays(found.rows)):
            self._take(self._tasks[leg.at], start)

    def _close_gaps(self, legs: list[_Leg], until: float) -> None:
        """Better bounds, and wide beams where the gap is open: side by side, or by steps one after the other."""
        if self._over:
            return
        stop = np.zeros(1, np.int64)
        with ThreadPoolExecutor(2 if self._steps is None else 1) as threads:
            bounds, beams = threads.submit(self._raise_bounds, legs, stop), threads.submit(self._widen, legs, stop)
            try:
                while not (wait([bounds], PAUSE).done and wait([beams], PAUSE).done):
                    stop[0] = self._tick(self._value, until)
            except KeyboardInterrupt:
                stop[0] = 1
                raise
        bounds.result()
        for leg, start in beams.result():
            self._starts[leg] = best_of([start, *self._starts[leg]], POOL)
            self._take(self._tasks[leg.at], start)

    def _raise_bounds(self, legs: list[_Leg], stop: Array) -> None:
        """At the limit itself, now that a value is known: what is above it is of no interest."""
        rounds = [(ENOUGH, ANY)]
        if self._steps is not None:
            rounds = [(ENOUGH, max(THOROUGH, PROOFS * self._steps)), (OPEN, min(MOST, MORE * PROOFS * self._steps))]
        mains = [leg for leg in legs if self._asked(leg)]
        for leg, (near, effort) in product(mains, rounds):
            if not stop[0] and self._bounds[leg.at] * near < self._value:
                self._bounds[leg.at] = max(self._bounds[leg.at], lower_bound(leg.task, effort, self._value, stop))

    def _widen(self, legs: list[_Leg], stop: Array) -> list[tuple[_Leg, Start]]:
        """What wide beams lead to where the gap is open."""
        found = list[tuple[_Leg, Start]]()
        for leg in legs:
            if self._starts.get(leg):
                enough = WORTH * (self._bounds[leg.at] if self._asked(leg) else leg.bound)
                starts = widened(leg.task, self._starts[leg][0].value, enough, self._steps, self._seed, stop)
                found.extend((leg, start) for start in starts)
        return found

    def _asked(self, leg: _Leg) -> bool:
        """Whether it is at the limit that was asked for."""
        return leg.task is self._tasks[leg.at]

    def _smaller(self) -> list[_Leg]:
        """The same placements with less memory, the most first: what fits there fits here."""
        if self._less is None:
            self._less = []
            for at, task in enumerate(self._tasks):
                for limit in smaller_limits(task):
                    less = task.with_limit(limit)
                    bound = lower_bound(less, cap=self._value)
                    if bound * ENOUGH >= self._value:
                        break
                    self._less.append(_Leg(at, less, bound))
            self._less.sort(key=lambda leg: -max(leg.task.totals))
        return [leg for leg in self._less if leg.bound * ENOUGH < self._value]
