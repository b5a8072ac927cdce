"""What to change: the largest loss of the newest recorded step, and the setting that the simulator says is better."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import suppress
from statistics import fmean
from typing import NamedTuple

from zeropipe.core.schedule import Schedule
from zeropipe.core.timeline import Timeline
from zeropipe.core.units import percent, time_text
from zeropipe.errors import ZeropipeError
from zeropipe.schedules.registry import build, entries, find
from zeropipe.searching.right import require_right
from zeropipe.sim.compare import compare
from zeropipe.sim.costs import Costs
from zeropipe.sim.fit import fit
from zeropipe.train.config.tables import RunConfig
from zeropipe.train.report.drift import Recorded, mean_lost
from zeropipe.train.report.layers import better_cut

NOTHING = "nothing"
SMALL = 0.05  # of the step: a loss below this is not worth a change
GAIN = 0.01  # a change that is predicted to save less is not proposed
ROOM = 1.05  # other schedules may keep this much of the activations that the run keeps


class Hint(NamedTuple):
    """The largest loss and its share of the step, and what to do about it."""

    cause: str
    share: float
    text: str


def hint(config: RunConfig, recorded: Recorded, layers: Sequence[int] | None = None) -> Hint:
    """What to change next. `layers` are those of each stage."""
    lost, timeline = mean_lost(recorded), recorded.timeline
    outside = max(0.0, recorded.seconds - timeline.makespan)
    shares = {name: value / recorded.seconds for name, value in {**lost._asdict(), "outside": outside}.items()}
    cause, share = max(shares.items(), key=lambda item: item[1])
    if share < SMALL:
        return Hint(NOTHING, share, _nothing(recorded, share))
    costs = fit(timeline)
    if cause == "schedule":
        text = _schedule(config, timeline, costs, share, layers)
    elif cause == "imbalance":
        text = _imbalance(timeline, costs, share, layers)
    elif cause == "communication":
        text = _communication(config, timeline, costs, share, layers)
    elif cause == "overhead":
        text = _overhead(config, share)
    elif cause == "jitter":
        text = _jitter(config, timeline, share)
    else:
        text = _outside(config, share)
    return Hint(cause, share, text)


def _nothing(recorded: Recorded, share: float) -> str:
    busy = fmean(recorded.timeline.busy) / recorded.seconds
    return (
        f"Ranks work {percent(busy)} of the step, and the largest single loss is {percent(share)} of it: no setting is "
        "known to gain much here."
    )


def _schedule(config: RunConfig, timeline: Timeline, costs: Costs, share: float, layers: Sequence[int] | None) -> str:
    begin = f"The schedule itself leaves ranks idle for {percent(share)} of the step. "
    return begin + (_other_schedule(timeline, costs, layers) or _more_microbatches(config, timeline, costs))


def _more_microbatches(config: RunConfig, timeline: Timeline, costs: Costs) -> str:
    """Twice the microbatches: of smaller ones, or of a larger batch."""
    schedule, data = timeline.schedule, config.data
    with suppress(ZeropipeError):
        twice = _like(schedule, 2 * schedule.num_microbatches)
        now, then = compare([schedule, twice], _of_a_rank(costs, schedule))
        told = f"the bubble is predicted to fall from {percent(now.bubble)} to {percent(then.bubble)}"
        if data.microbatch > 1 and data.microbatch % 2 == 0:
            return f"Twice as many microbatches of half the size, `data.microbatch = {data.microbatch // 2}`: {told}."
        return f"More microbatches hide it: with `data.batch = {2 * data.batch}` {told}, for twice the batch."
    return f"More microbatches hide it: try `data.batch = {2 * data.batch}`."


def _imbalance(timeline: Timeline, costs: Costs, share: float, layers: Sequence[int] | None) -> str:
    busy = timeline.busy
    slowest = busy.index(max(busy))
    begin = (
        f"Ranks wait for rank {slowest}, which works {percent(busy[slowest] / (fmean(busy) or 1.0) - 1)} longer than "
        f"the mean: that costs {percent(share)} of the step. "
    )
    cut = better_cut(timeline.schedule, costs, layers) if layers else None
    if cut and 1 - cut.makespan / cut.before > GAIN:
        return begin + (
            f"Give it fewer layers: with `schedule.layers = {list(cut.layers)}` instead of {list(layers or ())} the "
            f"pipeline is predicted to take {_times(timeline, cut.makespan / cut.before)}."
        )
    return begin + (
        "Layers cannot be spread better over these stages. More stages are finer: try a schedule with "
        "`schedule.stages_per_rank` above the present one, or profile it: its device may be slower."
    )


def _communication(
    config: RunConfig, timeline: Timeline, costs: Costs, share: float, layers: Sequence[int] | None
) -> str:
    schedule = timeline.schedule
    if timeline.sharding is not None:
        begin = f"Messages, gathers of sharded weights and reduces of gradients cost {percent(share)} of the step. "
        return begin + (_other_schedule(timeline, costs, layers) or _more_microbatches(config, timeline, costs))
    begin = (
        f"Messages between stages (typically {time_text(costs.p2p, timeline.unit)}) cost {percent(share)} of the step. "
    )
    other = _other_schedule(timeline, costs, layers)
    if other:
        return begin + other
    if schedule.num_stages > schedule.num_ranks:
        per_rank = schedule.num_stages // schedule.num_ranks
        return begin + (
            f"With {per_rank} stages on each rank there are {per_rank} times as many messages as with one: try "
            '`schedule.name = "zb-h1"`.'
        )
    return begin + _larger(config, "fewer messages")


def _overhead(config: RunConfig, share: float) -> str:
    compiled = "" if config.engine.compile else " `engine.compile = true` helps, too."
    return (
        f"Ranks spend {percent(share)} of the step between actions: launches, copies and Python. "
        f"{_larger(config, 'fewer actions')}{compiled}"
    )


def _jitter(config: RunConfig, timeline: Timeline, share: float) -> str:
    begin = f"The same action takes now longer, now shorter: that costs {percent(share)} of the step. "
    if config.engine.dynamic_weights or not _splits(timeline.schedule):
        what = "" if _splits(timeline.schedule) else " A schedule with W, like `zbv`, could fill such gaps."
        return begin + f"Look for other work on the same devices, clocks that throttle, or a slow disk.{what}"
    return begin + "With `engine.dynamic_weights = true` a rank that would wait runs weight gradients that it owes."


def _outside(config: RunConfig, share: float) -> str:
    return (
        f"For {percent(share)} of the step no action runs: this is data, clipping and the optimizer. A larger batch "
        f"makes it rarer: `data.batch = {2 * config.data.batch}`; more `mesh.dp_shard` shares the optimizer's work."
    )


def _larger(config: RunConfig, why: str) -> str:
    """Microbatches of twice the size, if the batch has enough of them."""
    size = config.data.microbatch
    if config.num_microbatches % 2 == 0 and config.num_microbatches // 2 >= config.mesh.pp:
        return f"Larger microbatches make {why}: `data.microbatch = {2 * size}`."
    return (
        f"Larger microbatches make {why}: `data.microbatch = {2 * size}` with `data.batch = {2 * config.data.batch}`, "
        "so that there are as many."
    )


def _other_schedule(timeline: Timeline, costs: Costs, layers: Sequence[int] | None) -> str:
    """The schedule that is predicted to be fastest with the memory of this one; empty if none is faster."""
    own = timeline.schedule
    per_rank = _of_a_rank(costs, own)
    listed = [own, *_others(own, sum(layers) if layers else own.num_stages)]
    now, *others = compare(listed, per_rank)
    room = max(now.peak_memory) * ROOM
    fits = [other for other in others if max(other.peak_memory) <= room]
    best = min(fits, key=lambda other: other.makespan, default=now)
    if best.makespan > now.makespan * (1 - GAIN):
        return ""
    return (
        f'With `schedule.name = "{best.schedule.name}"` the pipeline is predicted to take '
        f"{_times(timeline, best.makespan / now.makespan)}, with no more activations in memory."
    )


def _others(own: Schedule, most_stages: int) -> Iterator[Schedule]:
    """Schedules of the same size with one copy of each stage, and no more stages than layers."""
    for entry in entries():
        with suppress(ZeropipeError):
            schedule = build(entry.name, ranks=own.num_ranks, microbatches=own.num_microbatches)
            require_right(schedule)
            known = entry.name != own.name and not entry.overlaps
            if known and len(schedule.placement.copies) == 1 and schedule.num_stages <= most_stages:
                yield schedule


def _of_a_rank(costs: Costs, schedule: Schedule) -> Costs:
    """The mean rank's part of the model, however it is cut: what `compare` takes."""
    f, i, w, b, activation, stash = (
        sum(costs.column(name, schedule.num_stages)) / schedule.num_ranks
        for name in ("f", "i", "w", "b", "activation", "stash")
    )
    return Costs(f=f, i=i, w=w, b=b, activation=activation, stash=stash, p2p=costs.p2p)


def _like(schedule: Schedule, microbatches: int) -> Schedule:
    """The same schedule with another number of microbatches."""
    per_rank = schedule.num_stages // schedule.num_ranks
    return build(
        find(schedule.name).name, ranks=schedule.num_ranks, microbatches=microbatches, stages_per_rank=per_rank
    )


def _splits(schedule: Schedule) -> bool:
    with suppress(ZeropipeError):
        return find(schedule.name).splits_backward
    return False


def _times(timeline: Timeline, factor: float) -> str:
    """A predicted makespan beside the measured one."""
    now, then = (time_text(time, timeline.unit) for time in (timeline.makespan, factor * timeline.makespan))
    return f"{then} instead of {now} ({100 * (factor - 1):+.0f}%)"
