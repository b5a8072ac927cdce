"""Times that no schedule can beat: proven lower bounds of the makespan, or of the longest rank's own span.

The bounds hold for every schedule of the placement, also with B and Overlaps. Equal microbatches may be thought to
keep their order in every pass: renumbering them never breaks a schedule. Most bounds look at one rank and let all
others be as fast as a microbatch alone:

- warm-up: until the first I can arrive a rank has only F to run, and no more of them than memory holds;
- drain: after the last F the last I is as far away; until then a rank has only the I of the activations it holds then,
  and W; and behind its last I come the I of the ranks before it, and their W;
- memory: an activation stays for as long as a microbatch needs to come back, so only so many pass through a rank;
- work, and the traffic of a link that takes one message at a time.

Two look at several ranks. A few of them, or all, do their work in the best of all orders, with their memory (few.py).
And microbatches that take turns in the memory of a rank have to pass each other on the ranks behind it (crossing.py).
"""

from __future__ import annotations

from math import ceil

import numpy as np

from zeropipe.searching.bound.few import Asked, Few, Limits, few_of
from zeropipe.searching.bound.laps import in_turns, waits
from zeropipe.searching.bound.way import Way, blocked_after, way_of
from zeropipe.searching.model import Array, Task

EXACT = 1e-12  # relative: sums of times are rounded
QUICK, THOROUGH = 30_000, 400_000  # states that each kernel looks at, 0.5 to 2 us each
MORE = 16  # times as many in the next round, where the effort allows it
CLOSE = 5e-10  # relative: so near to a value is at it
POINTS = 120  # at most so often a rank is asked how long it takes for fewer microbatches, for all ranks together
LATER = 1.25  # a memory bound that is so far below another one will not reach it


def lower_bound(task: Task, effort: int = QUICK, cap: float = np.inf, stop: Array | None = None) -> float:
    """A proven lower bound of what the task minimises.

    One above `cap`, a value that was found, is of no use: knowing that saves time. `stop[0] = 1` ends it at once.
    """
    way, stop = way_of(task), np.zeros(1, np.int64) if stop is None else stop
    best = max(_link_bound(task, way), *(_rank_bound(task, way, rank) for rank in range(task.num_ranks)))
    share, below = effort if effort < MORE * THOROUGH else THOROUGH, cap * (1 - CLOSE)
    few = None
    while best < cap:
        if not task.span or task.in_line:
            few = few or Asked(task, way, [_limits(task, way, rank) for rank in range(task.num_ranks)], stop)
            best = few.by_few(best, below, share)
        if best < cap:
            best = max(best, _turns_bound(task, way, best, share, below, stop))
        if share == effort or stop[0]:
            break
        share = min(effort, share * MORE)
    return float(best) * (1 - EXACT)


def all_ranks(task: Task) -> Few:
    """What is known of the passes of all ranks, and of the time behind each of them."""
    way = way_of(task)
    limits = [_limits(task, way, rank) for rank in range(task.num_ranks)]
    return few_of(task, way, limits, tuple(range(task.num_ranks)))


def _limits(task: Task, way: Way, rank: int) -> Limits:
    """What is known of one rank where W may be interrupted by passes."""
    m, a, room = task.num_microbatches, task.first_stages[rank], float(task.model.limit[rank])
    size = float(task.model.needs[a])
    fits = m if size <= 0 else int(min(m, room / size))
    takes = np.zeros(m + 1)
    for n in range(m, 0, -max(1, m * task.num_ranks // POINTS)):
        takes[n] = max(_ways(task, way, rank, n, first=False))
    return Limits(
        _drain(task, way, rank, m, room, whole=False),
        np.maximum.accumulate(takes),
        fits,
        waits(task, way, a, fits, room),
    )


def _turns_bound(task: Task, way: Way, best: float, effort: int, cap: float, stop: Array) -> float:
    """By microbatches that take turns in the memory of a rank and have to pass each other on their way."""
    found, blocked = 0.0, blocked_after(task)
    m, anything = task.num_microbatches, np.inf  # memory of the ranks behind is not followed
    drain = np.array([_drain(task, way, rank, m, anything, whole=False) for rank in range(task.num_ranks)])
    least = {}
    for rank, stage in enumerate(task.first_stages):
        begins = 0.0 if task.span else float(way.head[stage])
        more = _behind(task, way, stage) + begins - blocked
        stages = np.array(task.placement.stages_of(rank))
        least[stage] = _rounds(task, way, stages, float(task.model.limit[rank]), m) + more, more
    for stage, (rounds, more) in sorted(least.items(), key=lambda item: -item[1][0]):
        if rounds * LATER > max(best, found):
            behind = _behind(task, way, stage)
            lap, effort = in_turns(task, way, stage, cap - more, drain, behind, effort, stop)
            found = max(found, lap + more)
    return found


def _link_bound(task: Task, way: Way) -> float:
    """Every message of a link that takes one at a time, one after the other."""
    model, best = task.model, 0.0
    if model.blocks:  # then the senders' work says more
        return best
    for edge in set(model.edge.tolist()) - {-1}:
        over = np.flatnonzero(model.edge == edge)
        before = float((way.head[over] + way.lasts[over]).min())
        after = float((model.lag[over] - model.holds[over] + way.tail[over + 1]).min())
        least = before + task.num_microbatches * float(model.holds[over].sum()) + after
        # a span begins with its own rank's first F, which may be as late as the last of the links
        best = max(best, least - (float(way.head[: task.num_stages].max()) if task.span else 0.0))
    return best


def _rank_bound(task: Task, way: Way, rank: int) -> float:
    if rank not in task.model.home:
        return 0.0
    begins = 0.0 if task.span else float(way.head[task.first_stages[rank]])
    # behind the last action of a rank its message is not counted
    return max(_ways(task, way, rank, task.num_microbatches)) + begins - blocked_after(task)


def _ways(task: Task, way: Way, rank: int, m: int, first: bool = True) -> list[float]:
    """Of m microbatches: least times from the begin of a rank's first F to the end of everything.

    If they are not the `first` ones, all may have arrived before, and W may be interrupted by passes.
    """
    model, num_stages = task.model, task.num_stages
    stages, last = np.flatnonzero(model.home[:num_stages] == rank), 2 * num_stages - 1
    f, i, w = way.lasts[stages], way.lasts[last - stages], way.weight[stages]
    a, b = int(stages[0]), int(stages[-1])
    work = m * float((f + i + w).sum())
    begins = float(way.head[a])
    away = float(way.head[last - b]) - begins  # from the begin of the first F to that of the first I
    activation, room = model.needs[stages], float(model.limit[rank])
    warm = _warm_up(task, way, stages, room, m, away, first)
    apart = m * float(activation.sum()) > room or m * float(f.sum()) >= away  # the two waits do not overlap
    idle = warm if apart else 0.0
    ends = way.head[last - stages] + i + w
    return [
        float(ends.max()) - begins,
        work + warm,
        work + idle + _drain(task, way, rank, m, room, whole=first),
        _rounds(task, way, stages, room, m) + _behind(task, way, a),
        _area(task, way, stages, room, work, m),
    ]


def _warm_up(task: Task, way: Way, stages: Array, room: float, m: int, away: float, first: bool) -> float:
    """How long a rank waits for its first I, `away` from its first F: it has only F to run, and no more than fit."""
    busy = _most(way.lasts[stages], task.model.needs[stages], room, m)
    if first and (task.in_line or not task.span):  # the F arrive one by one, too
        until = away + float(way.head[stages[0]])
        busy = min(busy, sum(_arriving(task, way, int(stage), until) for stage in stages))
    return max(0.0, away - busy)


def _behind(task: Task, way: Way, a: int) -> float:
    """The least time from the last I of stage a, the first of its rank, to the end of what counts.

    For spans: to the end of the span of a rank before it, less what that span began earlier.
    """
    num_stages, home = task.num_stages, task.model.home
    last = 2 * num_stages - 1
    ends = way.head[last - np.arange(a + 1)] + way.lasts[last - np.arange(a + 1)] + way.weight[: a + 1]
    if task.span:
        first = [int(np.flatnonzero(home[:num_stages] == home[stage])[0]) for stage in range(a + 1)]
        ends = ends + way.head[a] - way.head[first]
    return float(ends.max() - way.head[last - a] - way.lasts[last - a])


def _arriving(task: Task, way: Way, stage: int, until: float) -> float:
    """The longest time that a stage's F can run before `until`: on its way each comes behind the one before it."""
    time = float(way.lasts[stage])
    every = max(float(way.lasts[: stage + 1].max()), float(task.model.holds[:stage].max(initial=0.0)) * task.serial)
    left = until - float(way.head[stage]) - every * np.arange(task.num_microbatches)
    return float(np.clip(left, 0.0, time).sum())


def _most(time: Array, size: Array, room: float, m: int) -> float:
    """The longest time of actions that fit into `room` together, each stage's at most m times."""
    if room == np.inf:
        return m * float(time.sum())
    if size.max() <= 0:
        return m * float(time.sum())
    if np.all(size == size[0]):
        left, total = int(room / size[0]), 0.0
        for one in sorted(time, reverse=True):
            total += min(m, left) * one
            left -= min(m, left)
        return total
    total = 0.0
    for at in sorted(range(len(time)), key=lambda at: -time[at] / max(size[at], 1e-300)):
        count = min(m, room / size[at]) if size[at] > 0 else m
        total += count * time[at]
        room -= count * size[at]
    return total


def _drain(task: Task, way: Way, rank: int, m: int, room: float, whole: bool) -> float:
    """What comes on top of a rank's work between its last F and the end of everything, in the best of all ways.

    With x activations alive at the last F and y owed W, time for x I and x + y W can be used while waiting. W that are
    put off until after the last I run while the ranks before it go on: whole parts of them, or any time.
    """
    model, p, last = task.model, task.problem, 2 * task.num_stages - 1
    stages = np.flatnonzero(model.home[: task.num_stages] == rank)
    if not len(stages):
        return 0.0
    i, w, activation, stash = way.lasts[last - stages], way.weight[stages], model.needs[stages], way.stash[stages]
    a, b = int(stages[0]), int(stages[-1])
    back = float(
        way.head[last - a] + i[0] - way.head[b] - way.lasts[b]
    )  # from the end of the last F to that of the last I
    chain = _behind(task, way, a)
    count = len(i) * m
    if any(len(set(column.tolist())) > 1 for column in (i, w, activation, stash)):
        most = _most(np.append(i + w, w), np.append(activation, stash), room, m)
        put_off = max(float(w.min()), min(chain, most - back))
        return max(-put_off, back - most) + max(put_off, chain)
    time_i, time_w, size, kept = float(i[0]), float(w[0]), float(activation[0]), float(stash[0])
    k = count if size <= 0 or room == np.inf else max(1, min(count, int(room / size)))
    x = np.arange(1, k + 1)
    piece, part = time_w / p.num_weight_parts, kept / p.num_weight_parts
    owed = (count - x) * p.num_weight_parts
    if part > 0 and room < np.inf:
        owed = np.minimum(owed, np.maximum(room - x * size, 0) // part)
    use = x * (time_i + time_w) + owed * piece
    free = np.maximum(use - back, time_w)
    best = np.inf
    for wish in (np.minimum(free, max(chain, time_w)), free):
        for parts in (np.floor(wish / piece), np.ceil(wish / piece)) if whole and piece > 0 else (wish,):
            late = np.clip(parts * piece if whole else wish, time_w, use - x * time_i)
            best = min(best, float(np.min(np.maximum(-late, back - use) + np.maximum(late, chain))))
    return best


def _rounds(task: Task, way: Way, stages: Array, room: float, m: int) -> float:
    """From the first F of a rank to its last I, of m microbatches, by memory alone.

    When F of a rank's v-th stage begins, its microbatch is alive in the stages before it, too. What is left holds so
    many others in the first stage, and the I of the one before those has ended.
    """
    model, last, parts = task.model, 2 * task.num_stages - 1, task.problem.num_weight_parts
    a, size, stash = int(stages[0]), float(model.needs[stages[0]]), float(way.stash[stages[0]])
    if size <= 0 or room == np.inf:
        return 0.0
    end, gradient = float(way.head[last - a] + way.lasts[last - a]), float(way.lasts[last - a])
    best = 0.0
    for stage, alive in zip(stages, np.cumsum(model.needs[stages])):
        if alive > room:
            break
        others = int((room - alive) / size)
        again = end - float(way.head[stage])
        over = float(alive) + others * size + stash - room
        if over > 0:  # parts of a W, or another I, must have made room as well
            again += min(ceil(over / stash * parts - 1e-9) * float(way.weight[a]) / parts, gradient)
        rounds, rest = divmod(m - 1, others + 1)
        slow = max(gradient, float(way.lasts[a]))
        best = max(best, end - float(way.head[a]) + rounds * again + rest * slow)
    return best


def _area(task: Task, way: Way, stages: Array, room: float, work: float, m: int) -> float:
    """A rank's span, by the memory that its activations take over time: no more than the limit all along."""
    model, last = task.model, 2 * task.num_stages - 1
    size, stash, parts = model.needs[stages], way.stash[stages], task.problem.num_weight_parts
    if room == np.inf or size.max() <= 0:
        return 0.0
    f, i, w = way.lasts[stages], way.lasts[last - stages], way.weight[stages]
    stays = way.head[last - stages] + i - way.head[stages]
    area = m * float((size * stays + stash * w * (parts + 1) / (2 * parts)).sum())
    most, room = float(size.max()), min(room, m * float(size.sum()))
    # at the begin memory grows no faster than F runs, at the end it shrinks no faster than I and W run
    rates = [_rate(size, f), max(_rate(stash, w), _rate(size - stash, i))]
    times = [max(0.0, room - most) / rate if rate > 0 else 0.0 for rate in rates]
    if sum(times) <= work:  # the begin and the end are not the same time
        area += sum(time * (room - most) / 2 for time in times)
    return area / room


def _rate(size: Array, time: Array) -> float:
    """The most memory per time."""
    if np.any((time <= 0) & (size > 0)):
        return float(np.inf)
    return float((size[time > 0] / time[time > 0]).max(initial=0.0))
