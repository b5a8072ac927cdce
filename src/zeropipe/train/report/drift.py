"""How measured and predicted steps drift apart over a run."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from statistics import fmean

from zeropipe.core.schedule import Schedule
from zeropipe.core.timeline import Timeline
from zeropipe.sim.costs import Costs
from zeropipe.sim.fit import fit
from zeropipe.sim.reality import Lost, lost
from zeropipe.sim.simulate import simulate

MOST = 100  # recorded steps in the report; of more, evenly chosen ones


@dataclass(frozen=True, eq=False)
class Recorded:
    """A step whose timeline was measured. `seconds` is the whole step: also data, clipping and the optimizer.

    `setup` says in words how it ran: a run may be resumed on another layout.
    """

    step: int
    timeline: Timeline
    seconds: float
    setup: str = ""


@dataclass(frozen=True)
class Prediction:
    """What a recorded step should have looked like, and where that is from."""

    source: str  # in words, for people
    of: Callable[[Recorded], Timeline]


@dataclass(frozen=True)
class Drift:
    """One recorded step against its prediction."""

    step: int
    setup: str
    seconds: float
    measured: float
    predicted: float
    bubble: float
    lost: Lost  # the mean of all ranks

    @property
    def ratio(self) -> float:
        return self.measured / self.predicted if self.predicted else 1.0

    @property
    def outside(self) -> float:
        """Time of the step in which no action runs: data, clipping, the optimizer."""
        return max(0.0, self.seconds - self.measured)


def from_first(recorded: Sequence[Recorded]) -> Prediction:
    """Simulations under what actions took in the first step that was recorded with the same setup."""
    firsts: dict[str, Recorded] = {}
    for one in recorded:
        firsts.setdefault(one.setup, one)
    number = firsts[recorded[-1].setup].step
    return _simulated(
        f"simulated from what the actions of step {number} took", lambda one: fit(firsts[one.setup].timeline)
    )


def from_costs(costs: Costs, source: str, recorded: Sequence[Recorded]) -> Prediction:
    """Simulations under `costs`; of steps with another setup than the newest under what their first one took."""
    setup, earlier = recorded[-1].setup, from_first(recorded)
    given = _simulated(source, lambda _: costs)
    return Prediction(source, lambda one: (given if one.setup == setup else earlier).of(one))


def _simulated(source: str, costs_of: Callable[[Recorded], Costs]) -> Prediction:
    found: dict[tuple[str, Schedule], Timeline] = {}

    def of(one: Recorded) -> Timeline:
        key = one.setup, one.timeline.schedule
        if key not in found:
            found[key] = simulate(one.timeline.schedule, costs_of(one))
        return found[key]

    return Prediction(source, of)


def drifts(recorded: Sequence[Recorded], prediction: Prediction) -> list[Drift]:
    """Recorded steps against their predictions: all of them, or an even choice with the first and the last."""
    chosen = recorded
    if len(recorded) > MOST:
        chosen = [recorded[round(n * (len(recorded) - 1) / (MOST - 1))] for n in range(MOST)]
    return [
        Drift(
            one.step,
            one.setup,
            one.seconds,
            one.timeline.makespan,
            prediction.of(one).makespan,
            one.timeline.bubble,
            mean_lost(one),
        )
        for one in chosen
    ]


@lru_cache(maxsize=4 * MOST)  # a report is written again and again while the run goes on
def mean_lost(recorded: Recorded) -> Lost:
    """What the idle time was lost to, as the mean of all ranks."""
    by_rank = lost(recorded.timeline)
    return Lost(*(fmean(column) for column in zip(*by_rank, strict=True)))
