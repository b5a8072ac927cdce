"""`SearchTask`: sizes, placement, costs and memory of a search, as flat tables; and rows as a Schedule."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np

from zeropipe.core.action import F, I, W
from zeropipe.core.jit import compiled
from zeropipe.core.packed import PackedRows, encode, kind_of, microbatch_of, stage_of
from zeropipe.core.placement import Placement, Problem
from zeropipe.core.schedule import Schedule
from zeropipe.core.timeline import ROUNDING, Timeline
from zeropipe.core.units import size_text
from zeropipe.errors import ConfigError
from zeropipe.searching.row_kernels import simulate_rows
from zeropipe.searching.tables import Array, PassTables, row_buffers
from zeropipe.sim.costs import Costs
from zeropipe.sim.tables import phase_savings

LIMIT_RATIO = 1.06  # of neighbouring memory limits that are searched, where they are many


@dataclass(frozen=True)
class SearchTask:
    """One placement under one memory limit."""

    problem: Problem
    placement: Placement
    costs: Costs
    minimizes_span: bool  # of the longest rank, instead of the makespan
    rank_limits: tuple[float, ...] | None = None  # memory of each rank; by default all have the limit of the costs

    @property
    def num_ranks(self) -> int:
        return self.problem.num_ranks

    @property
    def num_stages(self) -> int:
        return self.problem.num_stages

    @property
    def num_microbatches(self) -> int:
        return self.problem.num_microbatches

    @property
    def num_actions(self) -> int:
        """Number of F, I and parts of W."""
        return self.num_stages * self.num_microbatches * (2 + self.problem.num_weight_parts)

    @property
    def last_pass(self) -> int:
        """Number of the last pass: the I of stage s is pass last_pass - s."""
        return 2 * self.num_stages - 1

    @cached_property
    def is_split_best(self) -> bool:
        """Whether no B and no Overlap is faster than F, I and W one after the other."""
        f, i, w, b, overlap = (np.array(self.costs.column(x, self.num_stages)) for x in ("f", "i", "w", "b", "overlap"))
        # the message of a B is sent at its end, when that of its I may have arrived already
        return not self.costs.blocking and bool(
            np.all(b >= i + w) and np.all(overlap >= f + b) and not self.phase_savings.any()
        )

    @cached_property
    def phase_savings(self) -> Array:
        """The most that an Overlap with an F or a backward of each stage saves because of phases."""
        pairs = self._pair_savings.max(axis=0)
        return np.asarray(np.maximum(pairs.max(axis=0), pairs.max(axis=1)))

    @cached_property
    def savings_by_w(self) -> Array:
        """How much more an Overlap with a B of each stage saves at least than one with its I, because of phases."""
        without, whole = self._pair_savings
        return np.asarray(np.maximum(0.0, (whole - without).min(axis=0)))

    @cached_property
    def _pair_savings(self) -> Array:
        """What Overlaps save because of phases: with an I and with a B, by the stage of the F and that of the other."""
        classes, savings = phase_savings(self.costs, self.num_stages)
        if not classes:
            return np.zeros((2, self.num_stages, self.num_stages))
        size = max(classes) + 1
        return np.array(savings).reshape(2, size, size)[:, classes][:, :, classes]

    @cached_property
    def has_overlap_savings(self) -> bool:
        """Whether some Overlap is faster than its two actions one after the other."""
        f, b, overlap = (np.array(self.costs.column(name, self.num_stages)) for name in ("f", "b", "overlap"))
        return bool(np.any(f + b > overlap) or self.phase_savings.any())

    @property
    def memory_limits(self) -> tuple[float, ...]:
        """The memory limit of each rank, weights included."""
        if self.rank_limits is not None:
            return self.rank_limits
        return (np.inf if self.costs.memory_limit is None else self.costs.memory_limit,) * self.num_ranks

    @cached_property
    def activation_limits(self) -> Array:
        """The memory of each rank that its weights leave."""
        limits = np.array(self.memory_limits)
        np.subtract.at(limits, np.array(self.placement.copies[0]), self.costs.column("weights", self.num_stages))
        return limits

    def with_limit(self, limit: float) -> SearchTask:
        """Return the task with at most this memory on each rank."""
        return replace(self, rank_limits=tuple(min(limit, own) for own in self.memory_limits))

    def with_microbatches(self, num_microbatches: int) -> SearchTask:
        """Return the task with another number of microbatches."""
        return replace(self, problem=replace(self.problem, num_microbatches=num_microbatches))

    def fits(self, timeline: Timeline) -> bool:
        """Whether no rank exceeds its limit by more than rounding."""
        return all(peak <= limit * ROUNDING for peak, limit in zip(timeline.peak_memory, self.memory_limits))

    def require_memory(self) -> None:
        """Raise ConfigError unless each rank has memory for its weights and one microbatch."""
        activation, stash = (np.array(self.costs.column(name, self.num_stages)) for name in ("activation", "stash"))
        for rank in range(self.num_ranks):
            stages = list(self.placement.stages_of(rank))
            live = np.cumsum(activation[stages])
            needed = float(max(live.max(), (live + stash[stages] - activation[stages]).max()))
            limit, free = self.memory_limits[rank], float(self.activation_limits[rank])
            if needed > free * ROUNDING:
                sizes = (size_text(size, self.costs.memory_unit) for size in (limit, needed + limit - free))
                raise ConfigError(
                    "memory_limit={}: rank {rank} needs {} for its weights and one microbatch; raise the limit, or "
                    "use more ranks".format(*sizes, rank=rank)
                )

    @cached_property
    def first_stages(self) -> list[int]:
        """The first stage of each rank."""
        return [self.placement.stages_of(rank)[0] for rank in range(self.num_ranks)]

    @property
    def has_fixed_starts(self) -> bool:
        """Whether each rank's first action is reached by first actions alone, so that none of them has to wait."""
        return sorted(self.first_stages) == list(range(self.num_ranks))

    @cached_property
    def tables(self) -> PassTables:
        """Costs and memory for the kernels."""
        f, i, w, activation, stash = (
            np.array(self.costs.column(name, self.num_stages)) for name in ("f", "i", "w", "activation", "stash")
        )
        stage_rank, parts = np.array(self.placement.copies[0], np.int64), self.problem.num_weight_parts
        rank = np.concatenate([stage_rank, stage_rank[::-1]])
        num_passes = np.bincount(rank, minlength=self.num_ranks)
        lag, link_time, link = self._messages(rank)
        return PassTables(
            num_microbatches=self.num_microbatches, weight_parts=parts, blocking=bool(self.costs.blocking),
            blocking_ends=bool(self.costs.blocking_ends),
            row_start=np.concatenate([[0], np.cumsum(num_passes * self.num_microbatches)]), rank=rank,
            rank_passes=np.argsort(rank, kind="stable"), duration=np.concatenate([f, i[::-1]]), lag=lag,
            link_time=link_time, link=link, memory=np.concatenate([activation, (stash - activation)[::-1]]),
            w_duration=w / parts, w_memory=stash / parts, limit=self.activation_limits * ROUNDING,
        )  # fmt: skip

    def _messages(self, rank: Array) -> tuple[Array, Array, Array]:
        """Return the lag of each pass, how long its message occupies a link, and which link (-1: none)."""
        size, message = len(rank), self.costs.column("message", self.num_stages)
        lag, link_time, link = np.zeros(size), np.zeros(size), np.full(size, -1, np.int64)
        links: dict[tuple[int, int], int] = {}
        for x in range(size - 1):
            edge = int(rank[x]), int(rank[x + 1])
            if edge[0] == edge[1]:
                continue
            cost = self.costs.link(*edge)
            # the gradient going back over a boundary is as large as the activation that crossed it
            boundary = x if x < size // 2 else size - 2 - x
            link_time[x] = message[boundary] / cost.bandwidth if cost.bandwidth else 0.0
            lag[x] = cost.p2p + link_time[x]
            if self.costs.serial_links:
                link[x] = links.setdefault(edge, len(links))
        return lag, link_time, link

    @cached_property
    def passes_by_rank(self) -> list[Array]:
        """The passes of each rank, along a microbatch's path."""
        return [np.flatnonzero(self.tables.rank == rank) for rank in range(self.num_ranks)]

    @cached_property
    def solo_starts(self) -> Array:
        """When each pass begins if a microbatch is alone."""
        return np.concatenate([[0.0], np.cumsum(self.tables.duration + self.tables.lag)[:-1]])

    def to_schedule(self, rows: Array, min_fit: Array, name: str = "searched") -> Schedule:
        """Return rows, with their W, as a Schedule."""
        tables, num_passes = self.tables, 2 * self.num_stages
        actions = np.full(self.num_actions, -1, np.int64)
        compiled(simulate_rows)(tables=tables, buffers=row_buffers(tables), rows=rows, min_fit=min_fit, out=actions)
        offsets = tuple((tables.row_start // 2 * (2 + tables.weight_parts)).tolist())
        is_f, is_w = actions < self.num_stages, actions >= num_passes
        kind = np.where(is_f, F, np.where(is_w, W, I))
        stage = np.where(is_f, actions, np.where(is_w, actions - num_passes, num_passes - 1 - actions))
        microbatch = _occurrence(actions) // np.where(is_w, tables.weight_parts, 1)
        codes: Array = encode(stage, kind, microbatch)
        return Schedule(self.problem, self.placement, PackedRows(codes.tobytes(), offsets), name)

    def smaller_limits(self) -> list[float]:
        """Return memory limits below the task's own, the largest first.

        They do not depend on the task's own limit: a search that also searches below its limit finds whatever a search
        with less memory finds. There are none where ranks have different limits.
        """
        activation = max(self.costs.column("activation", self.num_stages))
        if activation <= 0 or min(self.memory_limits) < max(self.memory_limits):
            return []
        weights = np.zeros(self.num_ranks)
        np.add.at(weights, np.array(self.placement.copies[0]), self.costs.column("weights", self.num_stages))
        base = float(weights.max())
        max_live = min(
            float(self.num_microbatches * self.problem.stages_per_rank), (max(self.memory_limits) - base) / activation
        )
        counts, count = [], 1
        while count < max_live * (1 - 1e-9):
            counts.append(count)
            count = max(count + 1, round(count * LIMIT_RATIO))
        return [base + count * activation for count in reversed(counts)]


def timeline_value(timeline: Timeline, minimizes_span: bool) -> float:
    """Return the longest rank's span, or the makespan."""
    return max(timeline.rank_span) if minimizes_span else timeline.makespan


def _occurrence(values: Array) -> Array:
    """Return for each value how many equal ones come before it."""
    order = np.argsort(values, kind="stable")
    ordered = values[order]
    starts = np.flatnonzero(np.concatenate([[True], ordered[1:] != ordered[:-1]]))
    counts = np.diff(np.append(starts, len(values)))
    found = np.empty(len(values), np.int64)
    found[order] = np.arange(len(values)) - np.repeat(starts, counts)
    return found


def schedule_passes(schedule: Schedule) -> Array:
    """Return the rows of a schedule as passes: F, and I or B."""
    codes = np.frombuffer(schedule.packed.codes, np.int64)
    return _passes(codes[kind_of(codes) != W], schedule.num_stages)


def pass_starts(timeline: Timeline) -> Array:
    """Return when each pass of each microbatch begins, one line per pass."""
    schedule = timeline.schedule
    starts = np.zeros((2 * schedule.num_stages, schedule.num_microbatches))
    codes = np.frombuffer(schedule.packed.codes, np.int64)
    is_pass = kind_of(codes) != W
    index = _passes(codes[is_pass], schedule.num_stages), microbatch_of(codes[is_pass])
    starts[index] = np.frombuffer(timeline.start)[is_pass]
    return starts


def _passes(codes: Array, num_stages: int) -> Array:
    passes: Array = np.where(kind_of(codes) == F, stage_of(codes), 2 * num_stages - 1 - stage_of(codes))
    return passes
