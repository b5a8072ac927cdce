"""An exact solver for small schedules with slices, with or without copies to the host: CP-SAT on a model of its own."""

from __future__ import annotations

from itertools import product
from typing import Any

from zeropipe.core.schedule import Schedule
from zeropipe.sim.costs import Costs
from zeropipe.sim.slice_costs import SliceCosts


class ExactModel:
    """F, I and W of every slice, in whole units of time and memory; each activation may be copied to the host."""

    def __init__(self, schedule: Schedule, costs: Costs, horizon: int, limit: int | None, offload: int | None) -> None:
        from ortools.sat.python import cp_model

        self.model, self.horizon = cp_model.CpModel(), horizon
        self._problem, self._placement = schedule.problem, schedule.placement
        sliced = SliceCosts.of(schedule, costs)
        self._f, _, self._i, self._w, _ = ([round(time) for time in column] for column in sliced.times())
        self._activation = [round(size) for size in sliced.rows("activation")]
        p = self._problem
        self._keys = list(product(range(p.num_stages), range(p.num_microbatches), range(p.num_slices)))
        self._start = {(kind, *key): self._time() for kind in "FIW" for key in self._keys}
        self._order()
        self._run_one_at_a_time()
        if limit is not None:
            self._keep(limit, offload)
        self.end = self._time()
        for key in self._keys:
            self.model.add(self.end >= self._ends("W", *key))
        self.model.minimize(self.end)

    def solve(self) -> int:
        """The least makespan."""
        from ortools.sat.python import cp_model

        solver = cp_model.CpSolver()
        solver.parameters.num_workers = 1
        assert solver.solve(self.model) == cp_model.OPTIMAL
        return round(solver.objective_value)

    def _time(self) -> Any:
        return self.model.new_int_var(0, self.horizon, "")

    def _last(self, kind: str, stage: int, slice_: int) -> int:
        column = {"F": self._f, "I": self._i, "W": self._w}[kind]
        return column[slice_ * self._problem.num_stages + stage]

    def _ends(self, kind: str, stage: int, microbatch: int, slice_: int) -> Any:
        return self._start[kind, stage, microbatch, slice_] + self._last(kind, stage, slice_)

    def _order(self) -> None:
        p, add, start, ends = self._problem, self.model.add, self._start, self._ends
        for s, m, x in self._keys:
            if s:
                add(start["F", s, m, x] >= ends("F", s - 1, m, x))
                add(start["I", s - 1, m, x] >= ends("I", s, m, x))
            if x:
                add(start["F", s, m, x] >= ends("F", s, m, x - 1))
                add(start["I", s, m, x - 1] >= ends("I", s, m, x))
            add(start["I", s, m, x] >= ends("F", s, m, p.num_slices - 1))
            add(start["W", s, m, x] >= ends("I", s, m, x))

    def _run_one_at_a_time(self) -> None:
        intervals: dict[int, list[Any]] = {}
        for (kind, s, _, x), start in self._start.items():
            interval = self.model.new_fixed_size_interval_var(start, self._last(kind, s, x), "")
            intervals.setdefault(self._placement.rank_of(s), []).append(interval)
        for listed in intervals.values():
            self.model.add_no_overlap(listed)

    def _keep(self, limit: int, offload: int | None) -> None:
        """An activation is there from the start of F to the end of I, but for the time between two copies."""
        model = self.model
        for rank in range(self._problem.num_ranks):
            times, changes, active, lanes = [], [], [], ([], [])
            for s, m, x in self._keys:
                if self._placement.rank_of(s) != rank:
                    continue
                size = self._activation[x * self._problem.num_stages + s]
                times += [self._start["F", s, m, x], self._ends("I", s, m, x)]
                changes, active = [*changes, size, -size], [*active, 1, 1]
                if offload is None:
                    continue
                copied, out, back = model.new_bool_var(""), self._time(), self._time()
                for lane, at in zip(lanes, (out, back), strict=True):
                    lane.append(model.new_optional_fixed_size_interval_var(at, offload, copied, ""))
                model.add(out >= self._ends("F", s, m, x)).only_enforce_if(copied)
                model.add(back >= out + offload).only_enforce_if(copied)
                model.add(self._start["I", s, m, x] >= back + offload).only_enforce_if(copied)
                times += [out + offload, back]
                changes, active = [*changes, -size, size], [*active, copied, copied]
            model.add_reservoir_constraint_with_active(times, changes, active, 0, limit)
            for lane in lanes:
                model.add_no_overlap(lane)
