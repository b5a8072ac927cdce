"""Measured and predicted times of recorded steps, and how they drift apart over a run."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from statistics import fmean

from zeropipe.core.schedule import Schedule
from zeropipe.core.timeline import Timeline
from zeropipe.sim.attribution import LostTime, attribute_idle_time
from zeropipe.sim.costs import Costs
from zeropipe.sim.fit import fit
from zeropipe.sim.simulate import simulate
from zeropipe.train.report.recorded_steps import RecordedStep

MAX_ROWS = 100  # of the report


@dataclass(frozen=True)
class Prediction:
    """The predicted timelines of recorded steps, and a description of their source."""

    source: str
    timeline_of: Callable[[RecordedStep], Timeline]


@dataclass(frozen=True)
class Drift:
    """A recorded step compared with its prediction."""

    step: int
    setup: str
    seconds: float
    measured: float
    predicted: float
    idle_fraction: float
    bubble: float
    lost: LostTime  # mean over ranks

    @property
    def ratio(self) -> float:
        return self.measured / self.predicted if self.predicted else 1.0

    @property
    def outside(self) -> float:
        """Seconds of the step in which no action runs: data, clipping, the optimizer."""
        return max(0.0, self.seconds - self.measured)


def predict_from_first(steps: Sequence[RecordedStep]) -> Prediction:
    """Simulate each step with the durations of actions in the first recorded step of the same setup."""
    firsts: dict[str, RecordedStep] = {}
    for one in steps:
        firsts.setdefault(one.setup, one)
    number = firsts[steps[-1].setup].step
    return _simulate_steps(
        f"simulated with the durations of actions in step {number}", lambda one: fit(firsts[one.setup].timeline)
    )


def predict_from_costs(costs: Costs, source: str, steps: Sequence[RecordedStep]) -> Prediction:
    """Simulate the steps of the newest setup with `costs`, and those of earlier setups as `predict_from_first`."""
    setup, earlier = steps[-1].setup, predict_from_first(steps)
    newest = _simulate_steps(source, lambda _: costs)
    return Prediction(source, lambda one: (newest if one.setup == setup else earlier).timeline_of(one))


def _simulate_steps(source: str, costs_of: Callable[[RecordedStep], Costs]) -> Prediction:
    cache: dict[tuple[str, Schedule], Timeline] = {}

    def timeline_of(recorded: RecordedStep) -> Timeline:
        key = recorded.setup, recorded.timeline.schedule
        if key not in cache:
            cache[key] = simulate(recorded.timeline.schedule, costs_of(recorded))
        return cache[key]

    return Prediction(source, timeline_of)


def compare_steps(steps: Sequence[RecordedStep], prediction: Prediction) -> list[Drift]:
    """Compare recorded steps with their predictions: all, or MAX_ROWS at even distances."""
    chosen = steps
    if len(steps) > MAX_ROWS:
        chosen = [steps[round(n * (len(steps) - 1) / (MAX_ROWS - 1))] for n in range(MAX_ROWS)]
    return [
        Drift(
            one.step, one.setup, one.seconds, one.timeline.makespan, prediction.timeline_of(one).makespan,
            one.timeline.idle_fraction, one.timeline.bubble, mean_lost(one),
        )
        for one in chosen
    ]  # fmt: skip


@lru_cache(maxsize=4 * MAX_ROWS)  # the report is written many times in a run
def mean_lost(recorded: RecordedStep) -> LostTime:
    """The idle time by cause, as the mean over ranks."""
    by_rank = attribute_idle_time(recorded.timeline)
    return LostTime(*(fmean(column) for column in zip(*by_rank, strict=True)))
