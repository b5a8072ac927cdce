"""Times that no schedule can beat: proven lower bounds of the makespan, or of the longest rank's own span.

The bounds hold for every schedule of the placement, also with B and Overlaps. Equal microbatches may be thought to
keep their order in every pass: renumbering them never breaks a schedule. Most bounds look at one rank and let all
others be as fast as a microbatch alone:

- warm-up: until the first I can arrive a rank has only F to run, and no more of them than memory holds;
- drain: after the last F the last I is as far away; until then a rank has only the I of the activations it holds then,
  and W; and behind its last I come the I of the ranks before it, and their W;
- memory: an activation stays for as long as a microbatch needs to come back, so only so many pass through a rank;
- work, and the traffic of a link that takes one message at a time.

One looks at all ranks of a line: microbatches that take turns in the memory of a rank have to pass each other on the
ranks behind it (crossing.py).
"""

from __future__ import annotations

from math import ceil

import numpy as np

from zeropipe.search.laps import in_turns
from zeropipe.search.model import Array, Task
from zeropipe.search.way import Way, way_of

EXACT = 1e-12  # relative: sums of times are rounded
QUICK, THOROUGH = 30_000, 400_000  # states that following microbatches round and round looks at, 1 to 2 us each
CLOSE = 5e-10  # relative: so near to a value is at it
LATER = 1.25  # a memory bound that is so far below another one will not reach it


def lower_bound(task: Task, effort: int = QUICK, cap: float = np.inf, stop: Array | None = None) -> float:
    """A proven lower bound of what the task minimises.

    One above `cap`, a value that was found, is of no use: knowing that saves time. `stop[0] = 1` ends it at once.
    """
    way, stop = way_of(task), np.zeros(1, np.int64) if stop is None else stop
    best = max(_link_bound(task, way), *(_rank_bound(task, way, rank) for rank in range(task.num_ranks)))
    if best < cap:
        best = max(best, _turns_bound(task, way, best, effort, cap * (1 - CLOSE), stop))
    return float(best) * (1 - EXACT)


def _turns_bound(task: Task, way: Way, best: float, effort: int, cap: float, stop: Array) -> float:
    """By microbatches that take turns in the memory of a rank and have to pass each other on their way."""
    found, blocked = 0.0, float(task.model.lag.max()) if task.model.blocks else 0.0
    drain = np.array([_drain(task, way, rank) for rank in range(task.num_ranks)])
    least = {}
    for rank, stage in enumerate(task.first_stages):
        begins = 0.0 if task.span else float(way.head[stage])
        more = _behind(task, way, stage) + begins - blocked
        stages = np.array(task.placement.stages_of(rank))
        least[stage] = _rounds(task, way, stages, float(task.model.limit[rank])) + more, more
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
    model, m, num_stages = task.model, task.num_microbatches, task.num_stages
    stages = np.flatnonzero(model.home[:num_stages] == rank)
    if not len(stages):
        return 0.0
    last = 2 * num_stages - 1
    f, i, w = way.lasts[stages], way.lasts[last - stages], way.weight[stages]
    a, b = int(stages[0]), int(stages[-1])
    work = m * float((f + i + w).sum())
    begins = float(way.head[a])
    away = float(way.head[last - b]) - begins  # from the begin of the first F to that of the first I
    activation, room = model.needs[stages], float(model.limit[rank])
    busy = _most(f, activation, room, m)
    if task.in_line or not task.span:  # the F arrive one by one, too
        busy = min(busy, sum(_arriving(task, way, int(stage), away + begins) for stage in stages))
    warm = max(0.0, away - busy)
    apart = m * float(activation.sum()) > room or m * float(f.sum()) >= away  # the two waits do not overlap
    idle = warm if apart else 0.0
    ends = way.head[last - stages] + i + w
    ways = [
        float(ends.max()) - begins,
        work + warm,
        work + idle + _drain(task, way, rank),
    ]
    ways.append(_rounds(task, way, stages, room) + _behind(task, way, a))
    ways.append(_area(task, way, stages, room, work))
    if model.blocks:
        ways = [
            one - float(model.lag.max()) for one in ways
        ]  # behind the last action of a rank its message is not counted
    return max(ways) + (0.0 if task.span else begins)


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


def _drain(task: Task, way: Way, rank: int) -> float:
    """What comes on top of a rank's work between its last F and the end of everything, in the best of all ways.

    With x activations alive at the last F and y owed W, time for x I and x + y W can be used while waiting. W that are
    put off until after the last I run while the ranks before it go on.
    """
    model, m, p, last = task.model, task.num_microbatches, task.problem, 2 * task.num_stages - 1
    stages = np.flatnonzero(model.home[: task.num_stages] == rank)
    if not len(stages):
        return 0.0
    i, w, activation, stash = way.lasts[last - stages], way.weight[stages], model.needs[stages], way.stash[stages]
    a, b, room = int(stages[0]), int(stages[-1]), float(model.limit[rank])
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
        for whole in (np.floor, np.ceil):
            late = np.clip(whole(wish / piece) * piece if piece > 0 else 0.0, time_w, use - x * time_i)
            best = min(best, float(np.min(np.maximum(-late, back - use) + np.maximum(late, chain))))
    return best


def _rounds(task: Task, way: Way, stages: Array, room: float) -> float:
    """From the first F of a rank to its last I, by memory alone.

    When F of a rank's v-th stage begins, its microbatch is alive in the stages before it, too. What is left holds so
    many others in the first stage, and the I of the one before those has ended.
    """
    model, last, m, parts = task.model, 2 * task.num_stages - 1, task.num_microbatches, task.problem.num_weight_parts
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


def _area(task: Task, way: Way, stages: Array, room: float, work: float) -> float:
    """A rank's span, by the memory that its activations take over time: no more than the limit all along."""
    model, last, m = task.model, 2 * task.num_stages - 1, task.num_microbatches
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
