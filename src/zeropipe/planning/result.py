"""What a plan comes to: rows in their order, the front, what does not fit, and why one is slower than another."""

from __future__ import annotations

from dataclasses import dataclass

from zeropipe.core.schedule import Schedule
from zeropipe.core.timeline import Timeline
from zeropipe.core.units import gigabytes
from zeropipe.errors import ConfigError
from zeropipe.planning.rows import Row
from zeropipe.planning.score import Scene, costs_of, mfu_of, schedule_of
from zeropipe.planning.tries import Misfit
from zeropipe.sim.simulate import simulate


@dataclass(frozen=True)
class Plan:
    """What was tried, best first."""

    rows: tuple[Row, ...]  # what fits, the fastest first
    misfits: tuple[Row, ...]  # simulated, and over the limit: the closest first
    too_large: tuple[Misfit, ...]  # too large before any schedule is chosen
    scene: Scene
    gpus: int
    batch: int
    num_tried: int
    num_left_out: int  # candidates that were not simulated: those with most work
    seconds: float

    @property
    def best(self) -> Row:
        """The fastest that fits; ConfigError if nothing does."""
        self.require_a_fit()
        return self.rows[0]

    def require_a_fit(self) -> None:
        if not self.rows:
            raise ConfigError(f"nothing fits into {gigabytes(self.scene.limit)}: {self.closest()}")

    def closest(self) -> str:
        """What comes closest to fitting, and by how much it does not."""
        if self.misfits:
            row = self.misfits[0]
            return f"{row.candidate} is {gigabytes(row.over)} over it"
        if self.too_large:
            misfit = self.too_large[0]
            run = misfit.run
            return f"{run.layout} with ac {run.ac} needs {gigabytes(misfit.needs)} for weights and one microbatch"
        return "no cut of its layers does: give fewer pipeline ranks or other schedules"

    @property
    def front(self) -> tuple[Row, ...]:
        """Rows than which no other is both faster and smaller."""
        found: list[Row] = []
        for row in self.rows:
            if not found or row.memory.peak < found[-1].memory.peak * (1 - 1e-9):
                found.append(row)
        return tuple(found)

    @property
    def tokens(self) -> int:
        """Of a step."""
        return self.batch * self.scene.costs.sequence

    def speed(self, row: Row) -> float:
        """Tokens per second and GPU."""
        return self.tokens / row.step / self.gpus

    def mfu(self, row: Row) -> float | None:
        """Model FLOPs of F, I and W over what the GPUs could do in a step; None where their peak is not known."""
        return mfu_of(self.scene, row)

    def schedule(self, row: Row) -> Schedule:
        """The schedule of a row."""
        return row.found or schedule_of(row.candidate)

    def timeline(self, row: Row) -> Timeline:
        """The simulation of a row's pipeline."""
        schedule = self.schedule(row)
        return simulate(schedule, costs_of(self.scene, row.candidate, row.counts, schedule.placement))

    def why(self, row: Row, best: Row | None = None) -> str:
        """Why a row is slower than the best one: the parts of its step that are longer."""
        top = best or self.best
        more = row.step - top.step
        if more <= 0:
            return "it is as fast"
        names = {
            "work": "more work per GPU", "recompute": "computing again", "imbalance": "unequal ranks",
            "bubble": "bubble", "data": "gathers, reduces and sums", "optimizer": "the optimizer",
        }  # fmt: skip
        changes = {name: getattr(row.parts, name) - getattr(top.parts, name) for name in names}
        ups = sorted((change, name) for name, change in changes.items() if change > 0.02 * more)[::-1][:3]
        downs = sorted((change, name) for name, change in changes.items() if change < -0.1 * more)[:2]
        text = ", ".join(f"{names[name]} +{change / top.step:.1%}" for change, name in ups)
        less = ", ".join(f"{names[name]} {change / top.step:.1%}" for change, name in downs)
        return f"{more / top.step:.1%} slower: {text}" + (f" (but {less})" if less else "")
