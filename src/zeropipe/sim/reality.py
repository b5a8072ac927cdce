"""A run held against its simulation: how far each kind of action is off, and where the time of the ranks went.

A rank is idle for the makespan less its busy time. What it is lost to is found by simulating the run with less and less
of what disturbs it:

    jitter          the run, less a simulation with the mean time of each kind and stage
    communication   that one, less the same with messages, gathers and reduces that take no time
    imbalance       that one, less the same with stages that all take the mean
    schedule        what is left: the bubble of the schedule itself
    overhead        time between two actions though the next one could begin: the executor's own

So the five add up to the idle time of every rank. A rank with more work than the others has a negative imbalance: it
is the one that they wait for.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import replace
from math import inf
from statistics import fmean, pstdev
from typing import NamedTuple

from zeropipe.core.timeline import Span, Timeline
from zeropipe.errors import ConfigError
from zeropipe.sim.costs import OF_SHARDS, Costs, Link
from zeropipe.sim.fit import fit, steps_of
from zeropipe.sim.simulate import simulate

TIMES = ("f", "i", "w", "b", "overlap")


class StageResidual(NamedTuple):
    """One kind of action of one stage (of an Overlap: its forward's): measured beside predicted."""

    kind: str
    stage: int
    number: int
    measured: float  # mean duration
    spread: float  # standard deviation
    predicted: float

    @property
    def ratio(self) -> float | None:
        """Measured over predicted; None where nothing was predicted."""
        return self.measured / self.predicted if self.predicted else None


class Lost(NamedTuple):
    """Idle time of one rank by what it was lost to."""

    schedule: float
    imbalance: float
    communication: float
    overhead: float
    jitter: float

    @property
    def total(self) -> float:
        return sum(self)


def stage_residuals(measured: Timeline, predicted: Timeline) -> list[StageResidual]:
    """The prediction held against the run, for every kind and stage."""
    require_same(measured, predicted)
    pairs: dict[tuple[str, int], list[tuple[Span, Span]]] = defaultdict(list)
    for rank in range(measured.num_ranks):
        for real, guess in zip(steps_of(measured, rank), steps_of(predicted, rank), strict=True):
            name = "+".join(span.action.kind.name for span in real)
            pairs[name, real[0].action.stage].append((real[0], guess[0]))
    found = []
    for (kind, stage), both in sorted(
        pairs.items(), key=lambda item: (len(item[0][0]), "FBIW".find(item[0][0]), item[0])
    ):
        times = [real.end - real.start for real, _ in both]
        guesses = [guess.end - guess.start for _, guess in both]
        found.append(StageResidual(kind, stage, len(both), fmean(times), pstdev(times), fmean(guesses)))
    return found


def require_same(measured: Timeline, predicted: Timeline) -> None:
    """ConfigError for timelines of two schedules."""
    if measured.schedule.packed != predicted.schedule.packed:
        raise ConfigError("the run and the prediction have different schedules: simulate the run's own")


def lost(measured: Timeline) -> tuple[Lost, ...]:
    """What the idle time of each rank was lost to. The sum is the makespan less the rank's busy time."""
    schedule, costs = measured.schedule, fit(measured)
    mean_times = simulate(schedule, costs)
    silent = replace(
        costs.unsharded(), p2p=0.0, bandwidth=None, edges={}, inter_node=Link(), blocking=False, blocking_ends=False
    )
    no_messages = simulate(schedule, silent)
    balanced = simulate(schedule, _balanced(silent, schedule.num_stages))
    jitter = measured.makespan - mean_times.makespan
    found = []
    for rank in range(schedule.num_ranks):
        own = [t.makespan - t.busy[rank] for t in (mean_times, no_messages, balanced)]
        overhead = mean_times.busy[rank] - measured.busy[rank]
        found.append(Lost(own[2], own[1] - own[2], own[0] - own[1], overhead, jitter))
    return tuple(found)


def _balanced(costs: Costs, num_stages: int) -> Costs:
    """Every stage with the mean time of all."""
    f, i, w, b, overlap = (fmean(costs.column(name, num_stages)) for name in TIMES)
    return replace(costs, f=f, i=i, w=w, b=b, overlap=overlap)


def require_units(costs: Costs, measured: Timeline) -> None:
    """ConfigError for costs that are not in the run's unit of time."""
    if costs.unit != measured.unit:
        units = (f"in {unit!r}" if unit else "in no unit" for unit in (costs.unit, measured.unit))
        raise ConfigError("the costs are {}, the run is {}: give both in one unit, like unit = 's'".format(*units))


def with_shards(costs: Costs, found: Costs) -> Costs:
    """`costs` that say nothing about sharded stages with what `found`, those of a run, say about them."""
    if costs.shards is not None:
        return costs
    return replace(costs, **{name: getattr(found, name) for name in ("shards", *OF_SHARDS)})


def corrected(costs: Costs, measured: Timeline) -> Costs:
    """`costs` with what the run says better: times, messages and memory of its stages as measured.

    What a run cannot tell (weights, links between machines, the limit of memory) stays as it was.
    """
    require_units(costs, measured)
    found = fit(measured)
    transfer = fmean(costs.column("message", measured.schedule.num_stages)) / (costs.bandwidth or inf)
    memory = ("activation", "stash", "memory_unit") if measured.memory else ()
    return replace(retimed(costs, found, memory), p2p=max(0.0, found.p2p - transfer), edges={})


def retimed(costs: Costs, found: Costs, more: tuple[str, ...] = ()) -> Costs:
    """`costs` with the times of `found`, and `more` fields of it."""
    return replace(costs, **{name: getattr(found, name) for name in (*TIMES, "unit", *more)})
