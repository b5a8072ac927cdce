"""Bound by a few ranks that do one thing at a time and keep their memory limits (subset_kernel.py)."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from zeropipe.core.jit import compiled
from zeropipe.searching.bounds.pending_w import pending_w
from zeropipe.searching.bounds.rank_bounds import EarliestTimes, RankLimits, max_unfinished_send, rank_limits
from zeropipe.searching.bounds.subset_kernel import SubsetBuffers, SubsetTables, subset_bound, total_effort
from zeropipe.searching.tables import Array
from zeropipe.searching.task import SearchTask

TOLERANCE = 1e-11  # of a microbatch's path, for all its passes together
FIRST_STEP = 0.001  # relative: the first target above the best bound so far
STEP_GROWTH = 2.0  # of the step with each target that is reached
FIRST_SHARE = 1_000  # states of effort for one subset at first
SHARE_GROWTH = 4  # once all subsets had their share
RETRY_GROWTH = SHARE_GROWTH**4  # before a subset that gave nothing new is tried again
FIRST_KEPT = 8  # states of a group that are kept apart at first
KEPT_SHRINKS = 4  # times fewer where the share did not suffice
MIN_STATES = 64  # that the buffers hold
MAX_CELLS = 4_000_000  # numbers in all states of the buffers
UNLIMITED_EFFORT = 1 << 62


@dataclass
class RankSubset:
    """What is known of one subset of the ranks."""

    ranks: tuple[int, ...]
    value: float = 0.0  # best bound by these ranks
    effort: int = 0  # most states that one try took
    kept: int = FIRST_KEPT  # states of a group that are kept apart
    is_explored: bool = False  # all orders were followed, with merged states
    is_exact: bool = False  # and none were merged: more effort gives no more
    retry_share: int = 0  # share of the effort from which on it is tried again


class SubsetBounds:
    """Bounds by subsets of the ranks, which get better with every call."""

    def __init__(self, task: SearchTask, times: EarliestTimes, rank_bounds: list[float], stop: Array) -> None:
        self._task, self._times, self._rank_bounds, self._stop = task, times, rank_bounds, stop
        self._limits = [rank_limits(task, times, rank) for rank in range(task.num_ranks)]
        self._share = FIRST_SHARE
        self._subsets: dict[tuple[int, ...], RankSubset] = {}

    def raise_bound(self, best: float, cap: float, effort: int) -> float:
        """Return a bound that is at least `best` and at most `cap`: by single ranks, then by more and more together.

        Each subset gets a share of the effort, and when all have had it, a larger one.
        """
        while best < cap and effort > 0 and not self._stop[0]:
            before = effort
            best, effort = self._grow_subsets(best, cap, effort)
            retry_share = max((subset.retry_share for subset in self._subsets.values()), default=0)
            if effort == before and self._share >= retry_share:
                break
            self._share = min(UNLIMITED_EFFORT, SHARE_GROWTH * self._share)
        return best

    def _grow_subsets(self, best: float, cap: float, effort: int) -> tuple[float, int]:
        """Begin with single ranks, and add the rank that gives most again and again; return bound and effort left."""
        chosen: tuple[int, ...] = ()
        while len(chosen) < self._task.num_ranks:
            ranks = [rank for rank in range(self._task.num_ranks) if rank not in chosen]
            larger = [self._subset(tuple(sorted((*chosen, rank)))) for rank in ranks]
            for subset in sorted(larger, key=lambda subset: -(subset.value or np.inf)):
                had = effort
                best, effort = self._try_subset(subset, best, cap, effort)
                subset.effort = max(subset.effort, had - effort)
                if best >= cap or effort <= 0:
                    return best, effort
            found = max(larger, key=lambda subset: self._promise(subset, best))
            if not found.is_explored:  # with more ranks it would not be either
                break
            chosen = found.ranks
        return best, effort

    def _subset(self, ranks: tuple[int, ...]) -> RankSubset:
        return self._subsets.setdefault(ranks, RankSubset(ranks))

    def _promise(self, subset: RankSubset, best: float) -> tuple[float, int]:
        """Return what subsets are chosen by: the bound; of equal ones the number of states."""
        value = max(subset.value, self._rank_bounds[subset.ranks[0]] if len(subset.ranks) == 1 else 0.0)
        return round(value / best, 6) if best else value, subset.effort

    def _try_subset(self, subset: RankSubset, best: float, cap: float, effort: int) -> tuple[float, int]:
        """Raise the bound by one subset, target after target, each by a share of the effort; return what is left."""
        share = self._share
        if subset.is_exact or share < subset.retry_share:
            return best, effort
        tables = subset_tables(self._task, self._times, self._limits, subset.ranks)
        buffers = _buffers(tables, max(MIN_STATES, share), self._stop)
        rounding = tables.tolerance * len(tables.rank) * self._task.num_microbatches
        above = max_unfinished_send(self._task) + rounding
        step, value = FIRST_STEP, 0.0
        while effort > 0 and best < cap and not self._stop[0]:
            target = min(cap, best * (1 + step))
            found = compiled(subset_bound)(
                tables=tables, buffers=buffers, cap=target + above, max_kept=subset.kept, effort=min(share, effort)
            )
            examined = int(total_effort(buffers))
            effort -= examined
            value = max(value, min(float(found) - above, cap))
            best = max(best, value)
            if float(found) - above >= target * (1 - 1e-12):
                step *= STEP_GROWTH
            elif self._can_retry(subset, bool(buffers.is_complete[0]), bool(buffers.has_merged[0]), examined, step):
                step = FIRST_STEP
            else:
                break
        if subset.is_explored and not subset.is_exact and value <= subset.value and value < best:
            subset.retry_share = min(UNLIMITED_EFFORT, share * RETRY_GROWTH)
        subset.value = max(subset.value, value)
        return best, effort

    def _can_retry(self, subset: RankSubset, is_complete: bool, has_merged: bool, examined: int, step: float) -> bool:
        """Learn from a target that was not reached; return whether to try a nearer one."""
        if not is_complete:
            if step > FIRST_STEP:  # the target was too far
                return True
            subset.kept = max(1, subset.kept // KEPT_SHRINKS)
            return False
        subset.is_explored, subset.is_exact = True, not has_merged
        if subset.is_exact:
            return False
        subset.kept *= 2
        return 2 * examined <= self._share


def subset_tables(
    task: SearchTask, times: EarliestTimes, limits: list[RankLimits], ranks: tuple[int, ...]
) -> SubsetTables:
    """Return the tables of some ranks; `limits` are those of all ranks."""
    tables, m, parts = task.tables, task.num_microbatches, task.tables.weight_parts
    passes = np.flatnonzero(np.isin(tables.rank, ranks))
    stages = passes[: len(passes) // 2]
    rank, duration = np.searchsorted(ranks, tables.rank[passes]), times.duration[passes]
    w_duration, activation, stash = times.w_duration[stages], tables.memory[stages], times.stash[stages]
    own = [np.flatnonzero(rank[: len(stages)] == one) for one in range(len(ranks))]
    limit = tables.limit[list(ranks)]
    has_ample_memory = np.array([m * float(activation[mine].sum()) <= most for mine, most in zip(own, limit)])
    freeing = [mine[stash[mine] > 0] for mine in own]
    is_whole = [task.is_split_best and not ample for ample in has_ample_memory.tolist()]
    link_time = np.where(tables.link >= 0, tables.link_time, 0.0)
    spacing = max(column[: stages[0]].max(initial=0.0) for column in (times.duration, link_time))
    return SubsetTables(
        num_microbatches=m, tolerance=TOLERANCE * float(times.start[-1]) / len(passes), rank=rank, duration=duration,
        lag=np.append(times.start[passes[1:]] - times.start[passes[:-1]] - duration[:-1], 0.0),
        arrival=float(times.start[stages[0]]) + np.arange(m) * spacing,
        work=duration + np.concatenate([np.zeros(len(stages)), w_duration[::-1]]),
        to_end=_times_to_end(task, times, limits, passes, ranks), w_duration=w_duration, activation=activation,
        stash=stash, limit=np.minimum(limit, 1e290),
        part_memory=np.array([float(stash[some].max(initial=0.0)) / parts or 1.0 for some in freeing]),
        part_duration=np.array(
            [float(w_duration[some].min()) / parts if len(some) else 0.0 for some in freeing]
        ),
        w_per_memory=np.array(
            [float((w_duration[some] / stash[some]).min()) if len(some) else 0.0 for some in freeing]
        ),
        drain=np.array([limits[one].drain for one in ranks]),
        last_f=np.array([mine[-1] for mine in own]),
        span_start=np.array([times.start[task.first_stages[one]] if task.minimizes_span else 0.0 for one in ranks]),
        has_ample_memory=has_ample_memory,
        never_deadlocks=has_ample_memory | np.array([len(mine) == 1 for mine in own]),
        stage_start=np.cumsum([0, *map(len, own)]), stages=np.concatenate(own),
        hash=np.random.default_rng(1).integers(1 << 40, 1 << 50, len(passes)),
        pending=pending_w(w_duration, stash, own, limit, is_whole, parts, m),
    )  # fmt: skip


def _times_to_end(
    task: SearchTask, times: EarliestTimes, limits: list[RankLimits], passes: Array, ranks: tuple[int, ...]
) -> Array:
    """Return the least time from the start of each pass of each microbatch to the end of everything.

    The last microbatch runs each pass behind the others.
    """
    start, duration, to_end = times.start, times.duration, times.to_end
    rank_start = np.zeros(task.num_ranks)
    if task.minimizes_span:  # ends are relative to the first F of their rank
        half, rank_start = task.num_stages, start[task.first_stages]
        ends = (start + duration)[: half - 1 : -1] + times.w_duration - rank_start[task.tables.rank[:half]]
        to_end = np.maximum.accumulate(np.append(ends, np.full(half, ends.min())))[::-1] - start
    behind = (task.num_microbatches - 1 - np.arange(task.num_microbatches))[:, None]
    found = np.array([(behind * duration[x:] + start[x:] - start[x] + to_end[x:]).max(axis=1) for x in passes])
    for row, x in zip(found, passes):
        for rank in ranks:
            np.maximum(row, _time_by_rank(task, times, limits[rank], rank, x) - rank_start[rank], out=row)
    return found


def _time_by_rank(task: SearchTask, times: EarliestTimes, limits: RankLimits, rank: int, x: int) -> Array:
    """Return the least time from the start of pass x of each microbatch to the end of everything, by one rank.

    The rank runs this microbatch and all later ones, if it comes to them after x. And it runs those that wait for the
    memory of this one, if the I that frees it comes after x.
    """
    m, first_f, start = task.num_microbatches, task.first_stages[rank], times.start
    last_i, num_waiting = task.last_pass - first_f, max(0, m - limits.num_slots)
    found = np.zeros(m)
    if first_f >= x:
        found = start[first_f] - start[x] + limits.times[:0:-1]
    if last_i >= x:
        freed = start[last_i] + times.duration[last_i] - start[x] + limits.slot_wait
        found[:num_waiting] = np.maximum(found[:num_waiting], freed + limits.times[num_waiting:0:-1])
    return found


def _buffers(tables: SubsetTables, max_states: int, stop: Array) -> SubsetBuffers:
    """Allocate buffers for `max_states` states of a layer, or as many as MAX_CELLS allows."""

    def ints(*size: int) -> Array:
        return np.zeros(size, np.int64)

    num_passes, num_ranks = len(tables.rank), len(tables.limit)
    max_live = tables.limit[tables.rank[0]] / tables.activation[0] if tables.activation[0] > 0 else np.inf
    width = min(tables.num_microbatches, int(min(max_live, 1e9)) + 1) + 2 * num_ranks
    size = min(max_states, MAX_CELLS // (2 * width))
    return SubsetBuffers(
        counts=ints(2, size, num_passes), hashes=ints(2, size), first=ints(2, size), next=ints(2, size),
        states=np.zeros((2, size, width)), table=ints(2 * size), slots=ints(size), start=np.zeros(2 * num_passes),
        w_end=np.zeros(2 * num_passes), delay=np.zeros(num_passes), spare_memory=np.zeros(num_passes),
        successor=ints(num_passes), new=np.zeros(width), next_pass=ints(width), work_left=np.zeros(num_ranks),
        level=np.zeros(num_ranks), stashed=np.zeros(num_ranks), w_total=np.zeros(num_ranks), num_groups=ints(1),
        num_states=ints(1), num_compared=ints(1), num_examined=ints(1), is_complete=ints(1), has_merged=ints(1),
        stop=stop,
    )  # fmt: skip
