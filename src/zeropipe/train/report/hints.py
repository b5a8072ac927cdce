"""A hint for the newest recorded step: its largest loss of time, and the setting that is predicted to reduce it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from statistics import fmean
from typing import Any, NamedTuple

from zeropipe.core.schedule import Schedule
from zeropipe.core.timeline import Timeline
from zeropipe.core.units import percent, time_text
from zeropipe.errors import ZeropipeError
from zeropipe.schedules.registry import build, entries, find
from zeropipe.schedules.validate import validate_user_schedule
from zeropipe.sim.compare import compare
from zeropipe.sim.costs import SHARD_COLUMNS, Costs
from zeropipe.sim.fit import fit
from zeropipe.sim.simulate import simulate
from zeropipe.train.config.tables import RunConfig
from zeropipe.train.report.better_layers import find_better_layers
from zeropipe.train.report.drift import mean_lost
from zeropipe.train.report.recorded_steps import RecordedStep

NOTHING = "nothing"
NO_GAIN = "No setting is predicted to reduce it."
MIN_LOSS = 0.05  # fraction of the step that a loss must reach to get a hint
MIN_GAIN = 0.01  # fraction of the makespan that a proposal must save
MEMORY_TOLERANCE = 1.05  # factor of the activation memory that a proposed schedule may need


class Hint(NamedTuple):
    """The largest loss, its fraction of the step, and a proposal."""

    cause: str
    share: float
    text: str


def give_hint(config: RunConfig, recorded: RecordedStep, layers: Sequence[int] | None = None) -> Hint:
    """Propose what to change next. `layers` are those of each stage."""
    timeline = recorded.timeline
    outside = max(0.0, recorded.seconds - timeline.makespan)
    lost = {**mean_lost(recorded)._asdict(), "outside": outside}
    cause, share = max(((name, time / recorded.seconds) for name, time in lost.items()), key=lambda item: item[1])
    if share < MIN_LOSS:
        busy = fmean(timeline.busy) / recorded.seconds
        text = (
            f"Ranks are busy for {percent(busy)} of the step, and the largest loss is {percent(share)} of it: no "
            "setting is known to gain much."
        )
        return Hint(NOTHING, share, text)
    advisor = _Advisor(config, timeline, fit(timeline, use_phases=False), share, layers)
    return Hint(cause, share, getattr(advisor, cause)())


@dataclass(frozen=True)
class _Advisor:
    """One method for each cause of a loss, which returns the text of the hint."""

    config: RunConfig
    timeline: Timeline
    costs: Costs
    share: float  # of the step that is lost
    layers: Sequence[int] | None

    def schedule(self) -> str:
        loss = f"The schedule leaves ranks idle for {percent(self.share)} of the step. "
        return loss + (self._other_schedule() or self._more_microbatches() or NO_GAIN)

    def imbalance(self) -> str:
        busy = self.timeline.busy
        slowest = busy.index(max(busy))
        loss = (
            f"Ranks wait for rank {slowest}, which is busy {percent(busy[slowest] / (fmean(busy) or 1.0) - 1)} longer "
            f"than the mean: that costs {percent(self.share)} of the step. "
        )
        better = find_better_layers(self.timeline.schedule, self.costs, self.layers) if self.layers else None
        if better and 1 - better.makespan / better.current > MIN_GAIN:
            return loss + (
                f"Use fewer layers there: with `schedule.layers = {list(better.layers)}` instead of "
                f"{list(self.layers or ())} the pipeline is predicted to take "
                f"{self._format_change(better.makespan / better.current)}."
            )
        return loss + (
            "Layers cannot be balanced better over these stages. Try a schedule with more `schedule.stages_per_rank`, "
            "or profile that rank, whose device may be slower."
        )

    def communication(self) -> str:
        schedule, share = self.timeline.schedule, percent(self.share)
        if self.timeline.sharding is not None:
            loss = f"Messages, gathers of sharded weights and reductions of gradients cost {share} of the step. "
            return loss + (self._keep_weights() or self._other_schedule() or self._more_microbatches() or NO_GAIN)
        message = time_text(self.costs.p2p, self.timeline.unit)
        loss = f"Messages between stages (typically {message}) cost {share} of the step. "
        other = self._other_schedule()
        if other:
            return loss + other
        if schedule.num_stages > schedule.num_ranks:
            per_rank = schedule.num_stages // schedule.num_ranks
            return loss + (
                f"With {per_rank} stages on each rank there are {per_rank} times as many messages as with one: try "
                '`schedule.name = "zb-h1"`.'
            )
        return loss + self._larger_microbatches("fewer messages")

    def overhead(self) -> str:
        loss = f"Ranks spend {percent(self.share)} of the step between actions: launches, copies and Python. "
        compiled = "" if self.config.engine.compile is True else "`engine.compile = true` means fewer launches. "
        return f"{loss}{compiled}{self._larger_microbatches('fewer actions')}"

    def jitter(self) -> str:
        loss = f"Actions of the same kind take different times: that costs {percent(self.share)} of the step. "
        splits = _splits_backward(self.timeline.schedule)
        if splits and not self.config.engine.dynamic_weights:
            return loss + (
                "With `engine.dynamic_weights = true` a rank that waits for a message runs pending weight gradients."
            )
        zbv = "" if splits else " A schedule with W, like `zbv`, could fill such gaps."
        return loss + f"Look for other work on the same devices, throttled clocks, or a slow disk.{zbv}"

    def outside(self) -> str:
        mesh = self.config.mesh
        loss = f"For {percent(self.share)} of the step no action runs: data, clipping and the optimizer. "
        if mesh.dp_replicate > 1:
            return loss + (
                f"With `mesh.dp_shard = {mesh.num_pipelines}` and `mesh.dp_replicate = 1` the optimizer is sharded "
                "over all pipelines."
            )
        return loss + (
            "More `mesh.dp_shard` shards the optimizer. A larger batch makes it rarer, "
            f"`data.batch = {2 * self.config.data.batch}`, but changes the training."
        )

    def _keep_weights(self) -> str:
        """`shards = "keep"` instead of "regather"; empty if that is not predicted to be faster."""
        if self.costs.shards != "regather":
            return ""
        own = self.timeline.schedule
        current, other = (simulate(own, replace(self.costs, shards=shards)) for shards in ("regather", "keep"))
        if other.makespan > current.makespan * (1 - MIN_GAIN):
            return ""
        return (
            'With `engine.shards = "keep"` the pipeline is predicted to take '
            f"{self._format_change(other.makespan / current.makespan)}, for full weights in memory during the step."
        )

    def _more_microbatches(self) -> str:
        """Twice as many microbatches, of half the size or of twice the batch; empty if no gain is predicted."""
        schedule, data = self.timeline.schedule, self.config.data
        try:
            twice = build(
                find(schedule.name).name, ranks=schedule.num_ranks, microbatches=2 * schedule.num_microbatches,
                stages_per_rank=schedule.num_stages // schedule.num_ranks,
            )  # fmt: skip
        except ZeropipeError:  # a schedule of the user
            return ""
        costs = _mean_rank_costs(self.costs, schedule)
        halved = data.microbatch > 1 and data.microbatch % 2 == 0
        (current,) = compare([schedule], costs)
        if halved:  # gathers, reductions and messages are as many or more
            costs = replace(costs, **{name: getattr(costs, name) / 2 for name in ("f", "i", "w", "b")})
        (other,) = compare([twice], costs)
        factor = other.makespan / current.makespan / (1 if halved else 2)
        if factor > 1 - MIN_GAIN:
            return ""
        gain = f"a sequence is predicted to take {percent(1 - factor)} less time"
        if halved:
            return f"Twice as many microbatches of half the size, `data.microbatch = {data.microbatch // 2}`: {gain}."
        return f"With `data.batch = {2 * data.batch}` {gain}, but a larger batch changes the training."

    def _larger_microbatches(self, effect: str) -> str:
        """Microbatches of twice the size: half as many, or of twice the batch."""
        config, size = self.config, self.config.data.microbatch
        text = f"Larger microbatches mean {effect}: `data.microbatch = {2 * size}`"
        if config.num_microbatches % 2 == 0 and config.num_microbatches // 2 >= config.mesh.pp:
            return f"{text}."
        return (
            f"{text} with `data.batch = {2 * config.data.batch}`, so that their number stays, but that "
            "changes the training."
        )

    def _other_schedule(self) -> str:
        """The schedule that is predicted to be fastest with no more memory; empty if none is faster."""
        own = self.timeline.schedule
        max_stages = sum(self.layers) if self.layers else own.num_stages
        current, *others = compare([own, *_other_schedules(own, max_stages)], _mean_rank_costs(self.costs, own))
        limit = max(current.peak_memory) * MEMORY_TOLERANCE
        fitting = [other for other in others if max(other.peak_memory) <= limit]
        best = min(fitting, key=lambda other: other.makespan, default=current)
        if best.makespan > current.makespan * (1 - MIN_GAIN):
            return ""
        return (
            f'With `schedule.name = "{best.schedule.name}"` the pipeline is predicted to take '
            f"{self._format_change(best.makespan / current.makespan)}, with no more activations in memory."
        )

    def _format_change(self, factor: float) -> str:
        """`80 ms instead of 100 ms (-20%)`, from the measured makespan."""
        makespan, unit = self.timeline.makespan, self.timeline.unit
        before, after = time_text(makespan, unit), time_text(factor * makespan, unit)
        return f"{after} instead of {before} ({100 * (factor - 1):+.0f}%)"


def _other_schedules(own: Schedule, max_stages: int) -> Iterator[Schedule]:
    """Registered schedules of the same size, with one copy of each stage and at most `max_stages`."""
    for entry in entries():
        with suppress(ZeropipeError):
            schedule = build(entry.name, ranks=own.num_ranks, microbatches=own.num_microbatches)
            validate_user_schedule(schedule)
            is_other = entry.name != own.name and not entry.overlaps
            if is_other and len(schedule.placement.copies) == 1 and schedule.num_stages <= max_stages:
                yield schedule


def _mean_rank_costs(costs: Costs, schedule: Schedule) -> Costs:
    """The costs of the mean rank, however many stages it has: the argument of `compare`."""
    names = ("f", "i", "w", "b", "activation", "stash", *(SHARD_COLUMNS if costs.shards else ()))
    means: Any = {name: sum(costs.column(name, schedule.num_stages)) / schedule.num_ranks for name in names}
    return Costs(**means, p2p=costs.p2p, shards=costs.shards, units=costs.units)


def _splits_backward(schedule: Schedule) -> bool:
    with suppress(ZeropipeError):
        return find(schedule.name).splits_backward
    return False
