"""The Timeline: when each rank ran which action, simulated or measured."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cached_property
from typing import NamedTuple

from zeropipe.core import notebook
from zeropipe.core.action import Action, Kind
from zeropipe.core.jit import Floats, Ints, arrays
from zeropipe.core.offload_timeline import Offloading
from zeropipe.core.overlap import walk_step
from zeropipe.core.packed import is_joined
from zeropipe.core.phases import Phases, PhaseSpan
from zeropipe.core.schedule import Schedule
from zeropipe.core.shard_timeline import Sharding
from zeropipe.core.units import percent, size_text, time_text

ROUNDING = 1 + 1e-9  # sums of times or sizes whose ratio is below this are equal


class Span(NamedTuple):
    """One action of one rank in time. Both halves of an Overlap share start and end."""

    rank: int
    action: Action
    start: float
    end: float


class Memory(NamedTuple):
    """Memory levels per action, in the order of the schedule's codes: packed float64.

    `during` is the level while the action runs, with what it allocates; `after` is the level when it has ended.
    """

    during: bytes
    after: bytes


@dataclass(frozen=True)
class Origin:
    """How a recorded run was set up. Costs of other settings do not apply to it."""

    layers: tuple[int, ...]  # of each stage
    ac: str = "none"
    microbatch_size: int = 1  # sequences
    sequence: int = 0  # tokens; 0 if sequences differ
    dtype: str = "float32"
    tp: int = 1
    compile: bool = False
    lora: bool = False
    sequence_parallel: bool = False


@dataclass(frozen=True, repr=False)
class Timeline:
    """The times of all actions of a schedule: packed float64 columns, aligned with `schedule.packed`."""

    schedule: Schedule
    start: bytes
    end: bytes
    memory: Memory | None = None
    memory_limit: float | None = None
    unit: str = ""  # "s" for seconds; empty for the costs' own unit
    memory_unit: str = ""  # "B" for bytes; empty for the costs' own unit
    label: str = ""
    measured: bool = False
    blocking: bool = False  # simulated with blocking sends: the sender's next action waits for them
    blocking_ends: bool = False  # the same in warm-up and cool-down only
    sharding: Sharding | None = None  # gathers and reductions of sharded stages
    origin: Origin | None = None  # of a recorded run, if known
    phases: Phases | None = None  # of the layers of each stage, if they are known
    offloading: Offloading | None = None  # copies of activations to the host and back

    @property
    def num_ranks(self) -> int:
        return self.schedule.num_ranks

    @property
    def title(self) -> str:
        """The label, or the schedule's name."""
        return self.label or self.schedule.name

    def spans(self, rank: int) -> Iterator[Span]:
        """The computations of `rank`, in order."""
        for code, first, last in self.schedule.packed.entries(rank, self.start, self.end):
            yield Span(rank, self.schedule.decode(code), first, last)

    def steps(self, rank: int) -> Iterator[tuple[Span, ...]]:
        """The steps of `rank`: one span each, or the two of an Overlap."""
        forward: Span | None = None
        for code, span in zip(self.schedule.packed.row(rank), self.spans(rank), strict=True):
            if is_joined(code):
                forward = span
            else:
                yield (span,) if forward is None else (forward, span)
                forward = None

    def phase_spans(self, step: tuple[Span, ...]) -> Iterator[PhaseSpan]:
        """The phases in time of a step; what it has beside its layers comes before an embedding's or after a head's.

        None of a measured step: phases are measured as means.
        """
        if self.phases is None or self.measured:
            return
        actions = tuple(span.action for span in step)
        spans = walk_step(self.phases, actions)
        rest = max(0.0, step[0].end - step[0].start - max((span.end for span in spans), default=0.0))
        last = self.schedule.num_stages - 1
        is_first = any(action.stage == (0 if action.kind is Kind.F else last) for action in actions)
        begin = step[0].start + (rest if is_first else 0.0)
        yield from (span._replace(start=begin + span.start, end=begin + span.end) for span in spans)

    def sharding_spans(self, rank: int) -> Iterator[Span]:
        """The gathers and reductions of `rank`, in order."""
        for action, first, last in self.sharding.events(rank) if self.sharding else ():
            yield Span(rank, action, first, last)

    def offloading_spans(self, rank: int) -> Iterator[Span]:
        """The copies of `rank` to and from its host, in order."""
        for action, first, last in self.offloading.events(rank) if self.offloading else ():
            yield Span(rank, action, first, last)

    @property
    def peak_host_memory(self) -> tuple[float, ...]:
        """The most that each rank has on its host."""
        if self.offloading is None:
            return (0.0,) * self.num_ranks
        return tuple(map(self.offloading.peak_host_memory, range(self.num_ranks)))

    @cached_property
    def _stats(self) -> tuple[list[float], list[float], list[float], list[float]]:
        """Per rank: first start, last end, busy time, peak memory."""
        xp = arrays(self.schedule.num_actions)
        first, last, busy, peak = (xp.full_floats(self.num_ranks) for _ in range(4))
        levels = [xp.floats(column) for column in self.memory] if self.memory else [xp.full_floats(0)] * 2
        xp.call(
            stats_kernel, xp.list_ints(self.schedule.packed.offsets),
            xp.floats(self.start), xp.floats(self.end), *levels, first, last, busy, peak,
        )  # fmt: skip
        for rank in range(self.num_ranks) if self.sharding else ():
            if span := self.sharding.span(rank):  # type: ignore[union-attr]
                first[rank], last[rank] = min(first[rank], span[0]), max(last[rank], span[1])
        return tuple([float(x) for x in column] for column in (first, last, busy, peak))  # type: ignore[return-value]

    @property
    def makespan(self) -> float:
        """Last end minus first start, over all ranks, with gathers and reductions."""
        first, last, _, _ = self._stats
        return max(last) - min(first)

    @property
    def first_start(self) -> float:
        """The earliest start over all ranks."""
        return min(self._stats[0])

    @property
    def busy(self) -> tuple[float, ...]:
        """The time in which each rank runs an action (two at once count once)."""
        return tuple(self._stats[2])

    @property
    def rank_span(self) -> tuple[float, ...]:
        """Last end minus first start of each rank."""
        first, last, _, _ = self._stats
        return tuple(b - a for a, b in zip(first, last, strict=True))

    @property
    def idle_fraction(self) -> float:
        """1 - busy/makespan, busy being the mean over the ranks: "idle" in all pictures, tables and pages."""
        return sum(self.rank_idle_fraction) / self.num_ranks

    @property
    def rank_idle_fraction(self) -> tuple[float, ...]:
        """1 - busy/makespan for each rank; `idle_fraction` is their mean."""
        makespan = self.makespan
        return tuple(max(0.0, 1 - busy / makespan) if makespan > 0 else 0.0 for busy in self.busy)  # sums are rounded

    @property
    def bubble(self) -> float:
        """The Zero Bubble paper's rate: 1 - busy/cost, cost being the longest rank's last end - first start.

        With unequal stages, busy is the mean over the ranks. Unlike `idle_fraction`, it leaves out that ranks start
        and end at different times: ranks of zbv are idle for 5.9% of the makespan at a bubble rate of 0.
        """
        return sum(self.rank_bubble) / self.num_ranks

    @property
    def bubble_to_ideal(self) -> float:
        """Megatron-LM's number: (makespan - ideal) / ideal, ideal being the mean busy time of the ranks.

        It is (p - 1) / m for 1F1B with equal stages. Unlike `bubble`, it uses the makespan, and may exceed 1.
        """
        ideal = sum(self.busy) / self.num_ranks
        return max(0.0, self.makespan / ideal - 1) if ideal > 0 else 0.0

    @property
    def rank_bubble(self) -> tuple[float, ...]:
        """1 - busy/cost for each rank, with the same cost for all; `bubble` is their mean."""
        cost = max(self.rank_span)
        return tuple(max(0.0, 1 - busy / cost) if cost > 0 else 0.0 for busy in self.busy)  # sums are rounded

    @property
    def peak_memory(self) -> tuple[float, ...]:
        """The highest memory level of each rank, in the costs' unit (by default one microbatch of a stage = 1)."""
        return tuple(self._stats[3])

    @property
    def over_limit(self) -> tuple[int, ...]:
        """The ranks whose peak exceeds the memory limit by more than rounding."""
        if self.memory_limit is None or self.memory is None:
            return ()
        limit = self.memory_limit * ROUNDING
        return tuple(rank for rank, peak in enumerate(self.peak_memory) if peak > limit)

    def with_label(self, label: str) -> Timeline:
        """The same timeline with another title."""
        return replace(self, label=label)

    def __str__(self) -> str:
        figures = [f"makespan {time_text(self.makespan, self.unit)}", f"idle {percent(self.idle_fraction)}"]
        if self.memory:
            figures.append(f"peak memory {size_text(max(self.peak_memory), self.memory_unit)}")
        if self.over_limit:
            assert self.memory_limit is not None
            figures[-1] += f", over the limit of {size_text(self.memory_limit, self.memory_unit)}"
        return f"{self.title}: {self.schedule.sizes}: {', '.join(figures)}"

    def __repr__(self) -> str:
        return f"<Timeline {self}>"

    def _repr_html_(self) -> str | None:
        """The picture that Jupyter shows."""
        return notebook.render_html and notebook.render_html(self)


def stats_kernel(
    offsets: Ints, start: Floats, end: Floats, during: Floats, after: Floats, first: Floats, last: Floats, busy: Floats,
    peak: Floats,
) -> None:  # fmt: skip
    """First start, last end, busy time and peak memory of each rank; those of an empty rank are the earliest start."""
    earliest = start[0] if len(start) > 0 else 0.0
    for rank in range(len(offsets) - 1):
        if offsets[rank] < offsets[rank + 1]:
            earliest = min(earliest, start[offsets[rank]])
    for rank in range(len(offsets) - 1):
        begin, stop = offsets[rank], offsets[rank + 1]
        if begin == stop:
            first[rank] = earliest
            last[rank] = earliest
            continue
        first[rank] = start[begin]
        total = 0.0
        top = 0.0
        latest = start[begin]
        for at in range(begin, stop):
            if end[at] > latest:  # not for the second half of an Overlap; actions of a file may overlap in time
                total += end[at] - (start[at] if start[at] > latest else latest)
                latest = end[at]
            if len(during) > 0:
                top = max(top, during[at], after[at])  # after an I with recomputation there may be more than before
        last[rank] = latest
        busy[rank] = total
        peak[rank] = top
