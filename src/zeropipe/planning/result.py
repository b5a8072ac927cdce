"""The result of `zp.plan`: rows, the front, what does not fit, and why a row is slower than another."""

from __future__ import annotations

from dataclasses import dataclass

from zeropipe.core.schedule import Schedule
from zeropipe.core.timeline import Timeline
from zeropipe.core.units import gigabytes
from zeropipe.errors import ConfigError
from zeropipe.planning.candidates import OversizedRun
from zeropipe.planning.closest import Closest
from zeropipe.planning.context import PlanContext
from zeropipe.planning.levers import Lever, list_levers
from zeropipe.planning.rows import PlanRow
from zeropipe.planning.score import compute_mfu
from zeropipe.planning.untried import Untried
from zeropipe.sim.simulate import simulate

_PURPOSES = {
    "work": "more work per GPU", "recompute": "recomputation", "imbalance": "imbalance of ranks",
    "schedule": "idle time of the schedule",
    "data": "gathers, reductions and sums", "optimizer": "optimizer", "exchange": "exposed exchanges of experts",
    "parts": "exchanges of attention",
}  # fmt: skip


@dataclass(frozen=True)
class Plan:
    """Candidates, ranked."""

    rows: tuple[PlanRow, ...]  # those that fit, the fastest first
    misfits: tuple[PlanRow, ...]  # simulated, and over the limit: the closest first
    too_large: tuple[OversizedRun, ...]  # over the limit with any schedule, so not simulated
    context: PlanContext
    gpus: int
    batch: int
    num_tried: int
    num_left_out: int  # candidates that were not simulated: those with most work
    seconds: float
    reserve: float = 0.0  # bytes of a GPU that are not used
    untried: tuple[Untried, ...] = ()
    closest: Closest | None = None  # if nothing fits

    @property
    def best(self) -> PlanRow:
        """The fastest that fits; ConfigError if nothing does."""
        self.require_fit()
        return self.rows[0]

    def require_fit(self) -> None:
        """ConfigError if nothing fits."""
        if not self.rows:
            raise ConfigError(f"nothing fits into {gigabytes(self.context.memory_limit)}: {self.describe_closest()}")

    def describe_closest(self) -> str:
        """Describe what comes closest to fitting."""
        if self.closest is not None:
            row = self.closest.row
            return f"{row.candidate} needs {gigabytes(row.memory.peak)}, {gigabytes(row.excess)} over it"
        return "no cut of its layers does; use fewer pipeline ranks or other schedules"

    @property
    def levers(self) -> tuple[Lever, ...]:
        """What each lever of the best row bought."""
        return list_levers(self.rows, self.misfits, self.too_large) if self.rows else ()

    @property
    def front(self) -> tuple[PlanRow, ...]:
        """The rows than which no other is both faster and smaller."""
        found: list[PlanRow] = []
        for row in self.rows:
            if not found or row.memory.peak < found[-1].memory.peak * (1 - 1e-9):
                found.append(row)
        return tuple(found)

    def speed(self, row: PlanRow) -> float:
        """Tokens per second and GPU."""
        return self.batch * self.context.costs.sequence / row.step / self.gpus

    def mfu(self, row: PlanRow) -> float | None:
        """Model FLOPs of F, I and W over the peak FLOPs of the GPUs in a step; None if the peak is not known."""
        return compute_mfu(self.context, row)

    def schedule(self, row: PlanRow) -> Schedule:
        """The schedule of a row."""
        return row.schedule

    def timeline(self, row: PlanRow) -> Timeline:
        """The simulation of a row's pipeline."""
        schedule = row.schedule
        context = self.context.for_schedule(schedule)
        return simulate(schedule, context.stage_costs(row.candidate, row.counts, schedule.placement))

    def why(self, row: PlanRow, best: PlanRow | None = None) -> str:
        """Why a row is slower than the best one: the purposes that take longer."""
        best = best or self.best
        slower = row.step - best.step
        if slower <= 0:
            return "it is as fast"
        changes = {name: getattr(row.seconds, name) - getattr(best.seconds, name) for name in _PURPOSES}
        longer = sorted((change, name) for name, change in changes.items() if change > 0.02 * slower)[::-1][:3]
        shorter = sorted((change, name) for name, change in changes.items() if change < -0.1 * slower)[:2]
        text = ", ".join(f"{_PURPOSES[name]} +{change / best.step:.1%}" for change, name in longer)
        but = ", ".join(f"{_PURPOSES[name]} {change / best.step:.1%}" for change, name in shorter)
        return f"{slower / best.step:.1%} slower: {text}" + (f" (but {but})" if but else "")
