"""Bounds in closed form: by the work, the drain and the memory of one rank, and by the traffic of a serial link.

All other ranks are as fast as if a microbatch were alone, at the least cost of everything: `earliest_times`, the basis
of all bounds. docs/search-method.md has the proofs.
"""

from __future__ import annotations

from math import ceil
from typing import NamedTuple

import numpy as np

from zeropipe.searching.tables import Array
from zeropipe.searching.task import SearchTask


class EarliestTimes(NamedTuple):
    """Least durations, and the path of a microbatch that is alone."""

    duration: Array  # of each pass
    lag: Array  # of its result
    w_duration: Array  # of each stage's full W
    stash: Array  # of each stage
    start: Array  # of each pass
    to_end: Array  # least time from the start of each pass to the end of everything
    alone: Array  # how much longer each pass takes in no Overlap
    w_apart: Array  # of each stage: how much less its Overlaps save if its W is in none of them


def earliest_times(task: SearchTask) -> EarliestTimes:
    """Return the least times of a task, whether backwards are split or not and Overlaps are used or not."""
    tables, num_stages, costs = task.tables, task.num_stages, task.costs
    f, i, w, b, overlap = (np.array(costs.column(name, num_stages)) for name in ("f", "i", "w", "b", "overlap"))
    # a B may be cheaper than I and W; an Overlap of two stages saves half of what each stage's own pair saves, or with
    # phases at most half of what each one's best pair saves
    half_saved = np.maximum(np.maximum(f + b - overlap, 0), task.phase_savings) / 2
    full, first = np.minimum(b, i + w), np.minimum(i, b)
    excess = max(0.0, float((half_saved - f).max()), float((half_saved - first).max()))
    least_f, least_i = (np.maximum(0, time - half_saved - np.where(half_saved > 0, excess, 0)) for time in (f, first))
    w = np.maximum(0, full - first)
    duration, lag = np.concatenate([least_f, least_i[::-1]]), tables.lag
    alone = np.concatenate([f, first[::-1]]) - duration
    if tables.blocking:  # a message is part of the sender's work
        duration, lag = duration + lag, np.zeros_like(lag)
    to_end, after = np.zeros(2 * num_stages), 0.0
    for x in range(task.last_pass, -1, -1):
        if x >= num_stages:  # its W follows
            after = max(after, float(w[task.last_pass - x]))
        to_end[x] = after = after + duration[x]
        if x:
            after += lag[x - 1]
    return EarliestTimes(
        duration=duration, lag=lag, w_duration=w,
        stash=np.minimum(costs.column("stash", num_stages), costs.column("activation", num_stages)),
        start=np.concatenate([[0.0], np.cumsum(duration + lag)[:-1]]), to_end=to_end, alone=alone,
        w_apart=np.minimum(half_saved, task.savings_by_w),
    )  # fmt: skip


def max_unfinished_send(task: SearchTask) -> float:
    """Return how much of a blocked sender's work may come after the end of its last action."""
    return float(task.tables.lag.max()) if task.tables.blocking else 0.0


def time_after_last_i(task: SearchTask, times: EarliestTimes, stage: int) -> float:
    """Return the least time from the last I of `stage`, the first of its rank, to the end of what counts.

    For spans: to the end of the span of a rank before it, less how much earlier that span began. Where the ranks before
    it have one of the first stages each, the I that follow are the last ones of their ranks, so they run alone.
    """
    stages = np.arange(stage + 1)
    i = task.last_pass - stages
    ends = times.start[i] + times.duration[i] + times.w_duration[stages]
    if task.has_fixed_starts:
        ends[:-1] += np.cumsum(times.alone[i[:-1]][::-1])[::-1]
    if task.minimizes_span:
        firsts = np.array(task.first_stages)[task.tables.rank[stages]]
        ends = ends + times.start[stage] - times.start[firsts]
    return float(ends.max() - times.start[i[-1]] - times.duration[i[-1]])


class RankLimits(NamedTuple):
    """Least times of one rank, where passes may interrupt W."""

    drain: float  # beyond its work, between its last F and the end of everything
    times: Array  # from its first F to the end of everything, for each number of microbatches
    num_slots: int  # activations of its first stage that fit
    slot_wait: float  # from the end of an I of that stage to the F that takes over its memory


def link_bound(task: SearchTask, times: EarliestTimes) -> float:
    """Return a bound by the messages of each serial link, which takes one at a time."""
    tables, best = task.tables, 0.0
    if tables.blocking:  # the work of the senders includes their messages
        return best
    for link in set(tables.link.tolist()) - {-1}:
        senders = np.flatnonzero(tables.link == link)
        before = float((times.start[senders] + times.duration[senders]).min())
        after = float((tables.lag[senders] - tables.link_time[senders] + times.to_end[senders + 1]).min())
        end = before + task.num_microbatches * float(tables.link_time[senders].sum()) + after
        # a span begins with its rank's first F, which may be the last one of all ranks
        best = max(best, end - (float(times.start[: task.num_stages].max()) if task.minimizes_span else 0.0))
    return best


def rank_bound(task: SearchTask, times: EarliestTimes, rank: int) -> float:
    """Return a bound by the path of a microbatch to the last W of a rank, and by the rank's own times."""
    stages = np.array(task.placement.stages_of(rank))
    i, start = task.last_pass - stages, float(times.start[stages[0]])
    path = float((times.start[i] + times.duration[i] + times.w_duration[stages]).max()) - start
    span = max(path, float(rank_times(task, times, rank, in_parts=True)[-1]), _overlap_time(task, times, rank))
    if task.has_fixed_starts:  # the first F of the ranks before it run alone
        start += float(times.alone[: stages[0]].sum())
    return span + (0.0 if task.minimizes_span else start) - max_unfinished_send(task)


def _overlap_time(task: SearchTask, times: EarliestTimes, rank: int) -> float:
    """Return the least time from a rank's first F to the end of everything, by what no Overlap can save.

    The first F and the last I of a rank are in no Overlap. Nor is a W that runs after the last I, while ranks before
    it finish: but for the W of that I, an Overlap without it saves less.
    """
    stages = np.array(task.placement.stages_of(rank))
    first, w = stages[0], times.w_duration[stages]
    i = task.last_pass - stages
    work = task.num_microbatches * float((times.duration[stages] + times.duration[i] + w).sum())
    alone = float(times.alone[first] + times.alone[task.last_pass - first])
    loss = min((float(apart / time) for apart, time in zip(times.w_apart[stages], w) if time > 0), default=1.0)
    late = max(0.0, time_after_last_i(task, times, int(first)) - float(times.w_duration[first]))
    return work + float(warm_up_times(task, times, rank)[0][-1]) + alone + min(1.0, loss) * late


def rank_limits(task: SearchTask, times: EarliestTimes, rank: int) -> RankLimits:
    """Return the least times of a rank."""
    return RankLimits(
        drain=drain_time(task, times, rank, float(task.tables.limit[rank]), in_parts=False),
        times=rank_times(task, times, rank, in_parts=False),
        num_slots=num_slots(task, rank),
        slot_wait=slot_wait(task, times, rank),
    )


def rank_times(task: SearchTask, times: EarliestTimes, rank: int, in_parts: bool) -> Array:
    """Return the least time from a rank's first F to the end of everything, for each number of microbatches."""
    stages, number = np.array(task.placement.stages_of(rank)), np.arange(task.num_microbatches + 1)
    i = task.last_pass - stages
    work = number * float((times.duration[stages] + times.duration[i] + times.w_duration[stages]).sum())
    warm_up, before_drain = warm_up_times(task, times, rank)
    drain = drain_time(task, times, rank, float(task.tables.limit[rank]), in_parts)
    turnover = turnover_times(task, times, rank) + time_after_last_i(task, times, int(stages[0]))
    least = (work + warm_up, work + before_drain + drain, turnover)
    found: Array = np.where(number > 0, np.max(least, axis=0), 0.0)
    return found


def warm_up_times(task: SearchTask, times: EarliestTimes, rank: int) -> tuple[Array, Array]:
    """Return how long a rank waits before its first I, for each number of microbatches.

    Until then it has only F to run, and no more of them than fit. The second array is 0 where the drain may be the same
    time: all F fit, and end before the first I arrives.
    """
    tables, stages, number = task.tables, np.array(task.placement.stages_of(rank)), np.arange(task.num_microbatches + 1)
    f, activation, limit = times.duration[stages], tables.memory[stages], float(tables.limit[rank])
    until_i = float(times.start[task.last_pass - stages[-1]] - times.start[stages[0]])
    found = np.maximum(0.0, until_i - max_time_that_fits(f, activation, limit, number))
    is_before_drain = (number * activation.sum() > limit) | (number * f.sum() >= until_i)
    return found, np.where(is_before_drain, found, 0.0)


def num_slots(task: SearchTask, rank: int) -> int:
    """Return how many activations of its first stage fit on a rank: all microbatches, or fewer."""
    activation, limit = float(task.tables.memory[task.first_stages[rank]]), float(task.tables.limit[rank])
    if activation <= 0 or limit >= task.num_microbatches * activation:
        return task.num_microbatches
    return int(limit / activation)


def slot_wait(task: SearchTask, times: EarliestTimes, rank: int) -> float:
    """Return the least time from the end of an I of a rank's first stage to the F that takes over its memory.

    Where the I does not free enough, parts of its W have to run, or the I of the next microbatch.
    """
    stage, parts = task.first_stages[rank], task.tables.weight_parts
    activation, stash = float(task.tables.memory[stage]), float(times.stash[stage])
    excess = num_slots(task, rank) * activation + stash - float(task.tables.limit[rank])
    if excess <= 0:
        return 0.0
    i = float(times.duration[task.last_pass - stage])
    w = ceil(excess / stash * parts - 1e-9) * float(times.w_duration[stage]) / parts
    if stash >= activation:
        return w
    return min(w, i + (0.0 if excess <= activation - stash else min(w, i)))


def turnover_times(task: SearchTask, times: EarliestTimes, rank: int) -> Array:
    """Return the least time from a rank's first F to its last I by its memory, for each number of microbatches.

    When the F of a stage begins, its microbatch is live in the rank's stages before it, too. The memory that is left
    holds a number of others in the first stage, and the I of the one before those has ended.
    """
    tables, m, stages = task.tables, task.num_microbatches, np.array(task.placement.stages_of(rank))
    first, limit, parts = stages[0], float(tables.limit[rank]), tables.weight_parts
    activation, stash = float(tables.memory[first]), float(times.stash[first])
    found, count = np.zeros(m + 1), np.arange(m)
    if activation <= 0 or limit == np.inf:
        return found
    f, i = float(times.duration[first]), float(times.duration[task.last_pass - first])
    end = float(times.start[task.last_pass - first]) + i
    for stage, live in zip(stages, np.cumsum(tables.memory[stages]).tolist()):
        if live > limit:
            break
        num_others = int((limit - live) / activation)
        excess, again = live + num_others * activation + stash - limit, end - float(times.start[stage])
        if excess > 0:  # parts of a W, or another I, must have freed memory as well
            again += min(ceil(excess / stash * parts - 1e-9) * float(times.w_duration[first]) / parts, i)
        rounds, rest = np.divmod(count, num_others + 1)
        path = end - float(times.start[first])
        found[1:] = np.maximum(found[1:], path + rounds * again + rest * max(f, i))
    return found


def drain_time(task: SearchTask, times: EarliestTimes, rank: int, limit: float, in_parts: bool) -> float:
    """Return the least time beyond a rank's work between its last F and the end of everything.

    With x live activations and y pending W at the last F, x I and x + y W can run while the rank waits. W that are put
    off until after the last I run while the ranks before it finish: in whole parts, or for any time.
    """
    stages, tables = np.array(task.placement.stages_of(rank)), task.tables
    last_i, last_f = task.last_pass - stages[0], stages[-1]
    i, w = times.duration[task.last_pass - stages], times.w_duration[stages]
    activation, stash = tables.memory[stages], times.stash[stages]
    # from the end of the last F to that of the last I, and from there to the end of everything
    wait = float(times.start[last_i] + i[0] - times.start[last_f] - times.duration[last_f])
    after = time_after_last_i(task, times, int(stages[0]))
    if any(len(set(column.tolist())) > 1 for column in (i, w, activation, stash)):
        count = np.array([task.num_microbatches])
        usable = float(max_time_that_fits(np.append(i + w, w), np.append(activation, stash), limit, count)[0])
        put_off = max(float(w.min()), min(after, usable - wait))
        return max(-put_off, wait - usable) + max(put_off, after)
    return _uniform_drain(
        task, len(stages), (float(i[0]), float(w[0])), (float(activation[0]), float(stash[0])), limit, wait, after,
        in_parts,
    )  # fmt: skip


def _uniform_drain(
    task: SearchTask, num_stages: int, times: tuple[float, float], memory: tuple[float, float], limit: float,
    wait: float, after: float, in_parts: bool,
) -> float:  # fmt: skip
    """Return the drain of a rank whose stages have equal I and W and equal memory: the least over all x and y."""
    (i, w), (activation, stash), parts = times, memory, task.problem.num_weight_parts
    num_all = num_stages * task.num_microbatches
    max_live = num_all if activation <= 0 or limit == np.inf else max(1, min(num_all, int(limit / activation)))
    live = np.arange(1, max_live + 1)
    part, part_memory = w / parts, stash / parts
    pending = (num_all - live) * parts
    if part_memory > 0 and limit < np.inf:
        pending = np.minimum(pending, np.maximum(limit - live * activation, 0) // part_memory)
    usable = live * (i + w) + pending * part
    free = np.maximum(usable - wait, w)
    best = np.inf
    for put_off in (np.minimum(free, max(after, w)), free):
        rounded = (np.floor(put_off / part), np.ceil(put_off / part)) if in_parts and part > 0 else (put_off,)
        for amount in rounded:
            late = np.clip(amount * part if in_parts else amount, w, usable - live * i)
            best = min(best, float(np.min(np.maximum(-late, wait - usable) + np.maximum(late, after))))
    return best


def max_time_that_fits(time: Array, memory: Array, limit: float, count: Array) -> Array:
    """Return the longest time of actions whose memory fits into `limit`, each kind at most `count` times."""
    if limit == np.inf or memory.max() <= 0:
        return count * float(time.sum())
    if np.all(memory == memory[0]):  # then it is a number of actions
        memory, limit = np.ones(len(memory)), float(int(limit / memory[0]))
    total, left = np.zeros(len(count)), np.full(len(count), limit)
    for kind in sorted(range(len(time)), key=lambda kind: -time[kind] / max(memory[kind], 1e-300)):
        number = np.minimum(count, left / memory[kind]) if memory[kind] > 0 else count
        total += number * time[kind]
        left -= number * memory[kind]
    return total
