"""How short the period of an order can be that repeats with every microbatch, on a V with little memory.

    python bench/periods.py                           # half of 1F1B's memory, 8 ranks
    python bench/periods.py --limit 10 --seconds 300  # of the solver, for each period

Where memory is short, a search ends some percent above its bound. This asks on which side they are missing. The bound
counts a rank's own work for each microbatch. The solver (CP-SAT, which shares no code with the search) places F, I and
W of all stages on a ring for each rank, one period round, within the memory limit, and finds periods that are too short
and one that is not. Beside it: what one more microbatch takes in the schedules that the search finds, and in their
bounds.
"""

from __future__ import annotations

import argparse
import time

from ortools.sat.python import cp_model

import zeropipe as zp
from zeropipe.core.placement import Problem

LAPS = 60  # periods that a microbatch is under way, at most


class Rings:
    """The ring of each rank, `period` ticks round. `lasts`: ticks of F, I and W; `lag`: of a message between ranks."""

    def __init__(self, ranks: int, lasts: dict[str, int], lag: int, limit: int, period: int) -> None:
        self.model, self.lasts, self.period = cp_model.CpModel(), lasts, period
        placement = zp.vee(Problem(ranks, 2 * ranks, 1))
        self.actions = [(kind, stage) for stage in range(2 * ranks) for kind in lasts]
        self.lap = {one: self.model.new_int_var(0, LAPS, f"lap {one}") for one in self.actions}
        self.place = {one: self.model.new_int_var(0, period - 1, f"place {one}") for one in self.actions}
        self.begin = {one: self.model.new_int_var(0, LAPS * period, f"begin {one}") for one in self.actions}
        for one in self.actions:
            self.model.add(self.begin[one] == self.lap[one] * period + self.place[one])
        home = [placement.rank_of(stage) for stage in range(2 * ranks)]
        self._follow(home, lag)
        for rank in range(ranks):
            self._share(rank, [stage for stage in range(2 * ranks) if home[stage] == rank], limit)

    def _after(self, kind: str, stage: int, before: str, other: int, lag: int) -> None:
        self.model.add(self.begin[kind, stage] >= self.begin[before, other] + self.lasts[before] + lag)

    def _follow(self, home: list[int], lag: int) -> None:
        """One microbatch's way: F down the stages, I up, each W behind its I."""
        last = len(home) - 1
        self.model.add(self.begin["F", 0] == 0)
        for stage in range(last):
            way = lag if home[stage] != home[stage + 1] else 0
            self._after("F", stage + 1, "F", stage, way)
            self._after("I", stage, "I", stage + 1, way)
        self._after("I", last, "F", last, 0)
        for stage in range(last + 1):
            self._after("W", stage, "I", stage, 0)

    def _share(self, rank: int, stages: list[int], limit: int) -> None:
        """One action at a time, and as many activations as fit, whenever an F begins."""
        mine = [one for one in self.actions if one[1] in stages]
        first = {}
        for at, one in enumerate(mine):
            for other in mine[at + 1 :]:
                is_first = self.model.new_bool_var(f"{one} before {other}")
                first[one, other], first[other, one] = is_first, is_first.negated()
                for a, b, holds in ((one, other, is_first), (other, one, is_first.negated())):
                    apart = self.place[b] - self.place[a]
                    self.model.add(apart >= self.lasts[a[0]]).only_enforce_if(holds)
                    self.model.add(apart <= self.period - self.lasts[b[0]]).only_enforce_if(holds)
        for new in stages:
            alive = []
            for stage in stages:
                has_begun = 1 if stage == new else first[("F", stage), ("F", new)]
                laps = self.lap["W", stage] - self.lap["F", stage]
                alive.append(laps + has_begun - first[("W", stage), ("F", new)])
            self.model.add(sum(alive) <= limit)

    def fits(self, seconds: float) -> bool | None:
        """Whether there is such an order; None if the solver cannot tell in time."""
        solver = cp_model.CpSolver()
        solver.parameters.max_time_in_seconds = seconds
        solver.parameters.num_workers = 2
        status = solver.solve(self.model)
        known = {cp_model.OPTIMAL: True, cp_model.FEASIBLE: True, cp_model.INFEASIBLE: False}
        return known.get(status)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=8)
    parser.add_argument("--limit", type=int, help="activations of half a stage; as many as ranks by default")
    parser.add_argument("--times", default="1,1.2,0.7,0.05", help="F, I, W, latency; default %(default)s")
    parser.add_argument("--tick", type=float, default=0.05, help="all times are multiples of it; default %(default)s")
    parser.add_argument("--seconds", type=float, default=150.0, help="for each period, and for each search")
    parser.add_argument("--microbatches", type=int, default=32, help="of the schedules, and twice as many")
    given = parser.parse_args()
    times = [float(text) for text in given.times.split(",")]
    f, i, w, lag = (round(one / given.tick) for one in times)
    limit = given.limit or given.ranks
    work = 2 * (f + i + w)
    low, high = work - 1, None  # the longest that is proven too short; the shortest that is not
    step = max(1, work // 20)
    period = work
    while high is None or high - low > 1:
        begin = time.perf_counter()
        fits = Rings(given.ranks, {"F": f, "I": i, "W": w}, lag, limit, period).fits(given.seconds)
        word = {True: "there is an order", False: "too short", None: "not decided"}[fits]
        print(f"period {period * given.tick:.2f}: {word} ({time.perf_counter() - begin:.0f} s)", flush=True)
        if fits is None:
            break
        low, high = (low, period) if fits else (period, high)
        period = period + step if high is None else (low + high) // 2
    print(f"work of a rank {work * given.tick:.2f}; periods up to {low * given.tick:.2f} are too short")
    costs = zp.Costs(f=times[0], i=times[1], w=times[2], p2p=times[3], memory_limit=limit)
    found = [
        zp.search(
            ranks=given.ranks, microbatches=m, stages_per_rank=2, placement=zp.vee, costs=costs, seconds=given.seconds
        )
        for m in (given.microbatches, 2 * given.microbatches)
    ]
    for name in ("value", "bound"):
        less, more = (getattr(one, name) for one in found)
        print(f"{name}: {less:.2f} and {more:.2f}, {(more - less) / given.microbatches:.3f} for one more microbatch")


if __name__ == "__main__":
    main()
