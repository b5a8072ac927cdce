"""A run compared with its simulation: the error of each kind of action, and the causes of idle time.

The idle time of a rank is the makespan minus its busy time. Its causes are found by simulating the run with fewer and
fewer disturbances:

    jitter          the run, minus a simulation with the mean time of each kind and stage
    communication   that simulation, minus one in which messages, gathers and reductions take no time
    imbalance       that one, minus one in which all stages take the mean time
    schedule        the rest: the bubble of the schedule itself
    overhead        time between two actions although the next one could start: the executor's own

So the five add up to the idle time of every rank. The imbalance of a rank with more work than the others is negative:
the others wait for it. A run that is faster than its simulation with mean times, because its critical path has the
faster actions, has no jitter: what the simulations gained from each other is scaled to it.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import replace
from math import inf
from statistics import fmean, pstdev
from typing import NamedTuple

from zeropipe.core.timeline import Span, Timeline
from zeropipe.errors import ConfigError
from zeropipe.sim.costs import SAME_LINK, SHARD_FIELDS, TIME_FIELDS, Costs
from zeropipe.sim.fit import fit, overhead_per_action
from zeropipe.sim.simulate import simulate


class Residual(NamedTuple):
    """Measured and predicted times of one kind of action, of one stage or of all (an Overlap is in its F's stage)."""

    kind: str
    stage: int  # -1 for all
    number: int
    measured: float  # mean duration
    spread: float  # standard deviation
    predicted: float  # mean duration
    delay: float  # mean of measured start - predicted start

    @property
    def ratio(self) -> float | None:
        """Measured divided by predicted; None if the prediction is 0."""
        return self.measured / self.predicted if self.predicted else None


class LostTime(NamedTuple):
    """Idle time of one rank by cause."""

    schedule: float
    imbalance: float
    communication: float
    overhead: float
    jitter: float

    @property
    def total(self) -> float:
        return sum(self)


def residuals(measured: Timeline, predicted: Timeline, by_stage: bool = False) -> list[Residual]:
    """Compare the run with the prediction, for every kind of action (and stage)."""
    _require_same_schedule(measured, predicted)
    pairs: dict[tuple[str, int], list[tuple[Span, Span]]] = defaultdict(list)
    for rank in range(measured.num_ranks):
        for (real, *others), (guess, *_) in zip(measured.steps(rank), predicted.steps(rank), strict=True):
            kind = "+".join(span.action.kind.name for span in (real, *others))
            pairs[kind, real.action.stage if by_stage else -1].append((real, guess))
    first_start = measured.first_start - predicted.first_start
    return [
        Residual(
            kind, stage, len(both),
            measured=fmean(real.end - real.start for real, _ in both),
            spread=pstdev(real.end - real.start for real, _ in both),
            predicted=fmean(guess.end - guess.start for _, guess in both),
            delay=fmean(real.start - first_start - guess.start for real, guess in both),
        )
        for (kind, stage), both in sorted(
            pairs.items(), key=lambda item: (len(item[0][0]), "FBIW".find(item[0][0]), item[0])
        )
    ]  # fmt: skip


def _require_same_schedule(measured: Timeline, predicted: Timeline) -> None:
    """ConfigError for timelines of different schedules."""
    if measured.schedule.packed != predicted.schedule.packed:
        raise ConfigError("the run and the prediction have different schedules; simulate the run's own")


def attribute_idle_time(measured: Timeline) -> tuple[LostTime, ...]:
    """The idle time of each rank by cause. The sum is the makespan minus the rank's busy time.

    Actions of sharded stages may wait for weights and gradients while they run. Their waits are idle time, too.
    """
    schedule, costs = measured.schedule, fit(measured, use_phases=False)
    no_messages = replace(
        costs.without_sharding(), p2p=0.0, bandwidth=None, edges={}, inter_node=SAME_LINK, blocking=False,
        blocking_ends=False,
    )  # fmt: skip
    means = {name: fmean(no_messages.column(name, schedule.num_stages)) for name in TIME_FIELDS}
    no_jitter, no_communication, balanced = (
        simulate(schedule, one)
        for one in (costs, no_messages, replace(no_messages, **means))  # type: ignore[arg-type]
    )
    makespans = [one.makespan for one in (no_jitter, no_communication, balanced)]
    levels = _scale_to_run(measured.makespan, makespans, work=fmean(balanced.busy))
    lost = []
    for rank in range(schedule.num_ranks):
        computing = no_communication.busy[rank]
        overhead = computing - measured.busy[rank]
        if measured.sharding is not None:
            overhead = overhead_per_action(measured) * sum(1 for _ in measured.steps(rank))
        with_equal_stages = levels[2] - balanced.busy[rank]
        lost.append(
            LostTime(
                schedule=with_equal_stages,
                imbalance=levels[1] - computing - with_equal_stages,
                communication=levels[0] - levels[1],
                overhead=overhead,
                jitter=measured.makespan - levels[0],
            )
        )
    return tuple(lost)


def _scale_to_run(measured: float, makespans: Sequence[float], work: float) -> list[float]:
    """The makespans of the simulations, none above the measured one: their distances from the work are scaled."""
    idle = max(makespans) - work
    factor = min(1.0, max(0.0, measured - work) / idle) if idle > 0 else 1.0
    return [work + factor * (makespan - work) for makespan in makespans]


def require_same_unit(costs: Costs, measured: Timeline) -> None:
    """ConfigError for costs in another unit of time than the run."""
    if costs.unit != measured.unit:
        units = (f"in {unit!r}" if unit else "in no unit" for unit in (costs.unit, measured.unit))
        raise ConfigError("the costs are {}, the run is {}; use one unit, like unit = 's'".format(*units))


def add_sharding(costs: Costs, fitted: Costs) -> Costs:
    """`costs` of unsharded stages with the sharding of `fitted`, those of a run."""
    if costs.shards is not None:
        return costs
    return replace(costs, **{name: getattr(fitted, name) for name in ("shards", *SHARD_FIELDS)})


def correct_costs(costs: Costs, measured: Timeline) -> Costs:
    """`costs` with the measured times, messages and memory of the stages.

    What a run does not show (weights, links between machines, the memory limit) stays unchanged.
    """
    require_same_unit(costs, measured)
    fitted = fit(measured)
    transfer = fmean(costs.column("message", measured.schedule.num_stages)) / (costs.bandwidth or inf)
    memory = ("activation", "stash", "memory_unit") if measured.memory else ()
    return replace(replace_times(costs, fitted, memory), p2p=max(0.0, fitted.p2p - transfer), edges={})


def replace_times(costs: Costs, fitted: Costs, others: tuple[str, ...] = ()) -> Costs:
    """`costs` with the times of `fitted`, which include phases, and its fields `others`."""
    names = (*TIME_FIELDS, "phases", "exchange_bandwidth", "sm_tax", "unit", *others)
    return replace(costs, **{name: getattr(fitted, name) for name in names})
