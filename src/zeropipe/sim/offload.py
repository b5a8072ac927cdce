"""Place OFFLOAD and RELOAD in a schedule by rule.

Activations are chosen by the lifetime of their stage, the mean time from the end of F to the start of the backward: the
longest first, as in PipeOffload (arXiv 2503.01328). They are in memory for the longest time, and leave the most time
for the copies. Of a part of a stage's microbatches, those in memory at any time are about the same part. An OFFLOAD is
directly after its F; a RELOAD is as late as the lane allows, so that it ends in time.
"""

from __future__ import annotations

from bisect import bisect_right, insort
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import NamedTuple

from zeropipe.core.action import BACKWARD, Action, Kind, Step, actions_of
from zeropipe.core.schedule import Schedule, require_schedule
from zeropipe.core.timeline import ROUNDING, Timeline
from zeropipe.core.units import size_text
from zeropipe.errors import ConfigError, short
from zeropipe.sim.costs import OFFLOAD_COLUMNS, Costs, require_stage_costs
from zeropipe.sim.simulate import simulate

NUM_PARTS = 8  # of the copies that hide: if the step is longer with them, so many parts are tried


class Lifetime(NamedTuple):
    """The activations of a microbatch in a stage, from F to the backward."""

    stage: int
    microbatch: int
    forward: int  # the step of its F in the row of its rank
    backward: int  # the step of its B or I
    ready: float  # the end of its F
    due: float  # the start of its backward


class Copied(NamedTuple):
    """A lifetime whose activations go to the host. The RELOAD is before step `reload`."""

    lifetime: Lifetime
    reload: int
    start: float  # of the RELOAD


def with_offload(
    schedule: Schedule,
    costs: Costs | None = None,
    offload: str | float = "auto",
) -> Schedule:
    """The schedule with OFFLOAD and RELOAD of some activations, those of stages with long lifetimes first.

    "auto" offloads all whose copies both hide behind computations under these costs, on ranks whose peak that lowers.
    "fit" offloads as few as keep each rank within `costs.memory_limit`. A share from 0 to 1 offloads that part of each
    rank's activations, hidden or not.
    """
    require_schedule(schedule)
    costs = require_stage_costs(costs)
    offload = parse_offload(offload)
    if schedule.num_slices > 1:
        raise ConfigError(
            f"offload={offload}: activations are copied of whole microbatches, and the schedule has "
            f"{schedule.num_slices} slices; use one slice, or leave out offload"
        )
    plain = replace(schedule, offloading=None)
    timeline = simulate(plain, costs)
    ranks = [_Rank(timeline, costs, rank) for rank in range(schedule.num_ranks)]
    if offload == "fit":
        counts = _fit_counts(plain, costs, ranks)
    elif offload == "auto":
        counts = _count_useful(plain, timeline, costs, ranks)
    else:
        counts = [rank.count_of_share(float(offload)) for rank in ranks]
    placed = _place(plain, ranks, counts)
    if schedule.rebuild is None:
        return placed
    return replace(placed, rebuild=partial(_rebuild, schedule.rebuild, costs, offload))


def _count_useful(plain: Schedule, timeline: Timeline, costs: Costs, ranks: Sequence[_Rank]) -> list[int]:
    """The number of copies of each rank that hide, or 0 where its peak is no lower with them.

    Fewer, if the step is longer with them: sends that block take time beside actions.
    """
    for part in range(NUM_PARTS, 0, -1):
        counts = [rank.num_hidden * part // NUM_PARTS for rank in ranks]
        copied = simulate(_place(plain, ranks, counts), costs)
        pairs = zip(counts, copied.peak_memory, timeline.peak_memory, strict=True)
        useful = [count if peak * ROUNDING < before else 0 for count, peak, before in pairs]
        if useful != counts:
            copied = simulate(_place(plain, ranks, useful), costs)
        if copied.makespan <= timeline.makespan * ROUNDING:
            return useful
    return [0] * len(ranks)


def _rebuild(again: Callable[[int], Schedule], costs: Costs, offload: str | float, num_microbatches: int) -> Schedule:
    """The same for another number of microbatches."""
    return with_offload(again(num_microbatches), costs, offload)


def parse_offload(value: object) -> str | float:
    """The value of an option `offload`; ConfigError if it is none."""
    if value in ("auto", "fit"):
        return str(value)
    try:
        share = float(value) if isinstance(value, (int, float, str)) and not isinstance(value, bool) else -1.0
    except ValueError:
        share = -1.0
    if not 0 <= share <= 1:
        raise ConfigError(f"offload={short(value)}: must be auto, fit, or a share from 0 to 1 like 0.5")
    return share


class _Lane:
    """The copies of a lane in the order in which they become ready: each starts when the one before has ended."""

    def __init__(self) -> None:
        self._order: list[tuple[float, int]] = []  # (ready, key)
        self._durations: dict[int, float] = {}
        self.ends: dict[int, float] = {}

    def add(self, key: int, ready: float, duration: float) -> dict[int, float | None]:
        """Insert a copy; returns the former ends of those that end at another time now."""
        self._durations[key] = duration
        insort(self._order, (ready, key))
        at = bisect_right(self._order, (ready, key)) - 1
        end = self.ends[self._order[at - 1][1]] if at else float("-inf")
        changed: dict[int, float | None] = {}
        for other_ready, other in self._order[at:]:
            end = max(other_ready, end) + self._durations[other]
            if self.ends.get(other) == end:
                break
            changed[other] = self.ends.get(other)
            self.ends[other] = end
        return changed

    def undo(self, key: int, ready: float, changed: dict[int, float | None]) -> None:
        """Remove the copy that was inserted last."""
        self._order.remove((ready, key))
        for other, end in changed.items():
            if end is None:
                del self.ends[other]
            else:
                self.ends[other] = end


class _Rank:
    """The lifetimes of one rank in the order in which they are chosen: those whose copies hide, then the others."""

    def __init__(self, timeline: Timeline, costs: Costs, rank: int) -> None:
        num_stages = timeline.schedule.num_stages
        self._offload, self._reload, self._size = (costs.column(name, num_stages) for name in OFFLOAD_COLUMNS)
        steps = list(timeline.steps(rank))
        self._starts, self._ends = [step[0].start for step in steps], [step[0].end for step in steps]
        self._out, self._in = _Lane(), _Lane()  # the second one in reversed time: as late as possible
        lifetimes = _find_lifetimes(timeline, rank)
        self._total = sum(self._size[lifetime.stage] for lifetime in lifetimes)
        hidden = [copied for key, lifetime in enumerate(lifetimes) if (copied := self._hide(key, lifetime)) is not None]
        self.num_hidden = len(hidden)
        chosen = {copied.lifetime for copied in hidden}
        starts = {lifetime: -self._in.ends[key] for key, lifetime in enumerate(lifetimes) if lifetime in chosen}
        hidden = [Copied(lifetime, self._last_step_before(starts[lifetime]), starts[lifetime]) for lifetime in starts]
        others = [
            copied
            for lifetime in lifetimes
            if lifetime not in chosen and (copied := self._expose(lifetime)) is not None
        ]
        self.copies = [*_spread(hidden), *_spread(others)]

    def count_of_share(self, share: float) -> int:
        """How many of the copies are that share of the rank's activations."""
        wanted, size = share * self._total * ROUNDING, 0.0
        for count, copied in enumerate(self.copies):
            size += self._size[copied.lifetime.stage]
            if size > wanted:
                return count
        return len(self.copies)

    def _hide(self, key: int, lifetime: Lifetime) -> Copied | None:
        """The copies of a lifetime if they and those chosen before hide, and a step runs while it is on the host."""
        out = self._out.add(key, lifetime.ready, self._offload[lifetime.stage])
        back = self._in.add(key, -lifetime.due, self._reload[lifetime.stage])
        start = -self._in.ends[key]
        reload = self._last_step_before(start)
        is_useful = reload - 1 > lifetime.forward and self._out.ends[key] <= self._starts[reload - 1] * ROUNDING
        if is_useful and all(self._out.ends[one] <= -self._in.ends[one] * ROUNDING for one in {*out, *back}):
            return Copied(lifetime, reload, start)
        self._out.undo(key, lifetime.ready, out)
        self._in.undo(key, -lifetime.due, back)
        return None

    def _expose(self, lifetime: Lifetime) -> Copied | None:
        """The copies of a lifetime without regard to others; None if no step is between F and the backward."""
        if lifetime.backward - lifetime.forward < 2:
            return None
        start = lifetime.due - self._reload[lifetime.stage]
        return Copied(lifetime, max(lifetime.forward + 2, self._last_step_before(start)), start)

    def _last_step_before(self, time: float) -> int:
        """The step before which a copy is put that shall start at a time: all steps before that one have ended."""
        return bisect_right(self._ends, time * ROUNDING)


def _find_lifetimes(timeline: Timeline, rank: int) -> list[Lifetime]:
    """The lifetimes of a rank: those of stages with the longest mean duration first, then in the order of F."""
    forwards: dict[tuple[int, int], tuple[int, float]] = {}
    lifetimes: list[Lifetime] = []
    for index, step in enumerate(timeline.steps(rank)):
        for _, action, start, end in step:
            key = action.stage, action.microbatch
            if timeline.schedule.is_checkpointed(action):
                continue
            if action.kind is Kind.F:
                forwards[key] = index, end
            elif action.kind in BACKWARD:
                forward, ready = forwards[key]
                lifetimes.append(Lifetime(*key, forward, index, ready, start))
    durations: dict[int, list[float]] = defaultdict(list)
    for lifetime in lifetimes:
        durations[lifetime.stage].append(lifetime.due - lifetime.ready)
    means = {stage: sum(times) / len(times) for stage, times in durations.items()}
    return sorted(lifetimes, key=lambda lifetime: (-means[lifetime.stage], lifetime.forward))


def _spread(copies: Sequence[Copied]) -> list[Copied]:
    """The copies by stages in their order; any first ones of a stage are spread over its microbatches."""
    stages: dict[int, list[Copied]] = defaultdict(list)
    for copied in copies:
        stages[copied.lifetime.stage].append(copied)
    return [own[index] for own in stages.values() for index in sorted(range(len(own)), key=_reverse_bits)]


def _reverse_bits(number: int) -> float:
    """The binary digits of a number after the point, the last one first: 1 is 0.5, 2 is 0.25, 3 is 0.75."""
    value, digit = 0.0, 0.5
    while number:
        value += digit * (number & 1)
        number, digit = number >> 1, digit / 2
    return value


def _place(schedule: Schedule, ranks: Sequence[_Rank], counts: Sequence[int]) -> Schedule:
    """The schedule with the first copies of each rank."""
    rows = [_place_row(row, rank.copies[:count]) for row, rank, count in zip(schedule.rows, ranks, counts, strict=True)]
    return replace(Schedule.of(schedule.problem, schedule.placement, rows, schedule.name), rebuild=schedule.rebuild)


def _place_row(row: Sequence[Step], copies: Sequence[Copied]) -> list[Step]:
    offloaded = {(copied.lifetime.stage, copied.lifetime.microbatch) for copied in copies}
    reloads: dict[int, list[Action]] = defaultdict(list)
    for copied in sorted(copies, key=lambda copied: (copied.start, copied.lifetime.due)):
        reloads[copied.reload].append(Action(copied.lifetime.stage, Kind.RELOAD, copied.lifetime.microbatch))
    placed: list[Step] = []
    for index, step in enumerate(row):
        placed += [*reloads[index], step]
        for action in actions_of([step]):
            if action.kind is Kind.F and (action.stage, action.microbatch) in offloaded:
                placed.append(action._replace(kind=Kind.OFFLOAD))
    return placed


def _fit_counts(schedule: Schedule, costs: Costs, ranks: Sequence[_Rank]) -> list[int]:
    """The fewest copies of each rank that keep it within the limit; ConfigError if all of them do not."""
    limit = costs.memory_limit
    if limit is None:
        raise ConfigError("offload='fit' has no limit to keep: set memory_limit in the costs, or use 'auto'")

    def peaks(counts: Sequence[int]) -> tuple[float, ...]:
        return simulate(_place(schedule, ranks, counts), costs).peak_memory

    low, high = [0] * len(ranks), [len(rank.copies) for rank in ranks]
    fits: Callable[[float], bool] = lambda peak: peak <= limit * ROUNDING  # noqa: E731
    least = peaks(high)
    for rank, peak in enumerate(least):
        if not fits(peak):
            raise ConfigError(
                f"offload='fit': rank {rank} needs {size_text(peak, costs.memory_unit)} with all activations offloaded "
                f"that can be, which is more than memory_limit={size_text(limit, costs.memory_unit)}"
            )
    while any(a < b for a, b in zip(low, high, strict=True)):
        middle = [(a + b) // 2 for a, b in zip(low, high, strict=True)]
        for rank, peak in enumerate(peaks(middle)):
            if fits(peak):
                high[rank] = middle[rank]
            else:
                low[rank] = min(high[rank], middle[rank] + 1)
    return high
