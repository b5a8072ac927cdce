"""Why time is lost: the cause of every idle gap, and the critical path. For simulated and measured timelines alike.

An action starts when its rank is free and what it needs has arrived. So the time before it is spent
    warm-up         before the first action of the rank
    waiting         until the result it needs is made (on another rank)
    communication   from that moment until it starts: the result travels; or the rank's own blocking send
    cool-down       after the last action of the rank, until the last one of all ranks
    other           measured runs only: the result was there, and still the rank did nothing (launch, allocation, noise)
    sharding        while its weights are gathered; after the last action of the rank, while its gradients are reduced
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple

from zeropipe.core.action import Action, B, Kind, W
from zeropipe.core.jit import Arrays, Floats, Ints
from zeropipe.core.needs import dependencies, free_sends
from zeropipe.core.packed import decode, is_joined, kind_of, stage_of
from zeropipe.core.shard_timeline import gathers
from zeropipe.core.timeline import Span, Timeline

CAUSES = ("warm-up", "waiting for data", "communication", "cool-down", "other", "sharding")
_NUM_CAUSES = len(CAUSES)
_WARM_UP, _WAITING, _COMMUNICATION, _COOL_DOWN, _OTHER, _SHARDING = range(_NUM_CAUSES)


class Idle(NamedTuple):
    """Idle time of one rank by cause."""

    warm_up: float
    waiting: float
    communication: float
    cool_down: float
    other: float
    sharding: float = 0.0

    @property
    def total(self) -> float:
        return sum(self)


class Gap(NamedTuple):
    """One idle piece of a rank: from `start` to `end`, before `action`, for want of `needs` (an action elsewhere)."""

    rank: int
    start: float
    end: float
    cause: str
    action: Action | None
    needs: Action | None


class Hop(NamedTuple):
    """One action of the critical path, and what bound its start.

    "start", "rank" (the action before), "data", or "weights" (its stage was being gathered).
    """

    rank: int
    action: Action
    start: float
    end: float
    bound_by: str


@dataclass(frozen=True)
class Reasons:
    """Per action, as indices into the schedule's codes (-1 for none).

    `remote` and `own` made what it needs; `before` is the step before it on its rank, and `waited` the result that kept
    the rank idle before it (`-1` where the rank was busy or the cause is not data). `gathers` is when the UNSHARD began
    that was under way until it started; else its own start. `reduced` is each rank's last end of a REDUCE_GRAD.
    """

    arrays: Arrays
    remote: Ints
    own: Ints
    before: Ints
    waited: Ints
    ranks: Ints
    message: float  # a typical message's time, where the receiver was waiting for it
    gathers: Floats
    reduced: Floats


@lru_cache(maxsize=4)
def reasons(timeline: Timeline) -> Reasons:
    """What every action needed and waited for."""
    deps = dependencies(timeline.schedule)
    xp, size = deps.arrays, timeline.schedule.num_actions
    maker = xp.full_ints(deps.num_keys, -1)
    remote, own, before, waited, ranks = (xp.full_ints(size, -1) for _ in range(5))
    message = xp.call(
        reasons_kernel, deps.codes, deps.offsets, deps.remote, deps.own, deps.makes, deps.to,
        xp.floats(timeline.start), xp.floats(timeline.end), timeline.measured,
        *free_sends(deps, timeline.blocking, timeline.blocking_ends),
        maker, remote, own, before, waited, ranks,
    )  # fmt: skip
    return Reasons(
        xp,
        remote,
        own,
        before,
        waited,
        ranks,
        float(message),
        *gathers(xp, timeline.schedule, timeline.start, timeline.sharding),
    )


def reasons_kernel(  # type: ignore[no-untyped-def]
    codes,
    offsets,
    remote_key,
    own_key,
    makes,
    to,
    start,
    end,
    measured,
    free_first,
    free_last,
    maker,
    remote,
    own,
    before,
    waited,
    ranks,
):
    """Fill the index columns; returns the mean time of a message whose receiver was idle when it left.

    A result made before the rank was free may have been on its way; but a rank that blocks on a send of its own is
    held by that one, which left later.
    """
    for rank in range(len(offsets) - 1):
        for at in range(offsets[rank], offsets[rank + 1]):
            ranks[at] = rank
            if makes[at] >= 0:
                maker[makes[at]] = at
    total = 0.0
    count = 0
    for sweep in range(2):  # the second one knows how long a message takes
        typical = total / count if count else 0.0
        for rank in range(len(offsets) - 1):
            previous = -1
            sending = False
            at = offsets[rank]
            while at < offsets[rank + 1]:
                last = at + is_joined(codes[at])
                latest = -1
                for step in range(at, last + 1):
                    before[step] = previous
                    if own_key[step] >= 0:
                        own[step] = maker[own_key[step]]
                    if remote_key[step] >= 0:
                        source = maker[remote_key[step]]
                        remote[step] = source
                        if source >= 0 and ranks[source] != rank and (latest < 0 or end[source] > end[latest]):
                            latest = source
                if latest >= 0:
                    free = end[previous] if previous >= 0 else start[at]
                    if sweep == 0:
                        if previous >= 0 and end[latest] > free:
                            total += max(0.0, start[at] - end[latest])
                            count += 1
                    elif previous < 0 or (
                        start[at] > free
                        and (not measured or end[latest] + typical > free)
                        and (not sending or end[latest] > free)
                    ):
                        for step in range(at, last + 1):
                            waited[step] = latest
                sending = False
                for step in range(at, last + 1):
                    if to[step] >= 0 and (step < free_first[rank] or step > free_last[rank]):
                        sending = True
                previous = last
                at = last + 1
    return total / count if count else 0.0


def idle(timeline: Timeline) -> tuple[Idle, ...]:
    """Idle time of each rank by cause. The sum over causes is the makespan minus the rank's busy time."""
    found = reasons(timeline)
    xp = found.arrays
    totals = xp.full_floats(timeline.num_ranks * _NUM_CAUSES)
    xp.call(
        idle_kernel, xp.list_ints(timeline.schedule.packed.offsets),
        xp.floats(timeline.start), xp.floats(timeline.end), found.waited, found.message, timeline.measured,
        timeline.first_start, timeline.first_start + timeline.makespan, found.gathers, found.reduced, totals,
    )  # fmt: skip
    rows = (totals[at : at + _NUM_CAUSES] for at in range(0, len(totals), _NUM_CAUSES))
    return tuple(Idle(*map(float, row)) for row in rows)


def cut_gap(free: float, start: float, made: float, known: bool, message: float, measured: bool) -> tuple[float, float]:
    """When the waiting of a gap from `free` to `start` ends, and when its communication; what is left has no cause.

    `made` is the end of the result that was waited for, if that is `known`.
    """
    if not known:
        # a simulated rank that has all it needs is idle only while its own blocking send is under way
        return free, free if measured else start
    ready = min(start, max(free, made))
    if measured and made <= free:
        return ready, min(start, max(free, made + message))
    return ready, start


def held_from(free: float, start: float, made: float, gathers: float) -> float:
    """From when on a gap from `free` to `start` is one of sharding: `made` is the end of what else was waited for."""
    return min(start, max(free, made, gathers)) if gathers < start else start


def idle_kernel(  # type: ignore[no-untyped-def]
    offsets, start, end, waited, message, measured, begin, finish, gathers, reduced, totals
):
    """Add up the idle time of each rank by cause."""
    for rank in range(len(offsets) - 1):
        base = _NUM_CAUSES * rank
        if offsets[rank] == offsets[rank + 1]:
            totals[base + _WARM_UP] = finish - begin
            continue
        free = begin
        for at in range(offsets[rank], offsets[rank + 1]):
            if start[at] > free:
                source = waited[at]
                made = end[source] if source >= 0 else free
                until = held_from(free, start[at], made, gathers[at])
                totals[base + _SHARDING] += start[at] - until
                if at == offsets[rank]:
                    totals[base + _WARM_UP] += until - free
                else:
                    ready, arrived = cut_gap(free, until, made, source >= 0, message, measured)
                    totals[base + _WAITING] += ready - free
                    totals[base + _COMMUNICATION] += arrived - ready
                    totals[base + _OTHER] += until - arrived
            free = max(free, end[at])
        ended = max(free, min(finish, reduced[rank]))
        totals[base + _SHARDING] += ended - free
        totals[base + _COOL_DOWN] += finish - ended


def gaps(timeline: Timeline) -> list[Gap]:
    """Every idle piece of every rank with its cause, in order. A gap may have a waiting and a communication piece."""
    found = reasons(timeline)
    codes = timeline.schedule.packed.view
    start, end = memoryview(timeline.start).cast("d"), memoryview(timeline.end).cast("d")
    begin, finish = timeline.first_start, timeline.first_start + timeline.makespan
    pieces: list[Gap] = []

    def add(rank: int, first: float, last: float, cause: int, at: int = -1, source: int = -1) -> None:
        if last > first:
            action = decode(codes[at]) if at >= 0 else None
            needs = decode(codes[source]) if source >= 0 else None
            pieces.append(Gap(rank, first, last, CAUSES[cause], action, needs))

    for rank in range(timeline.num_ranks):
        free = begin
        first, stop = timeline.schedule.packed.offsets[rank : rank + 2]
        for at in range(first, stop):
            source = int(found.waited[at])
            made = end[source] if source >= 0 else free
            until = held_from(free, start[at], made, float(found.gathers[at]))
            if at == first:
                add(rank, free, until, _WARM_UP, at, source)
            elif start[at] > free:
                ready, arrived = cut_gap(free, until, made, source >= 0, found.message, timeline.measured)
                add(rank, free, ready, _WAITING, at, source)
                add(rank, ready, arrived, _COMMUNICATION, at, source)
                add(rank, arrived, until, _OTHER, at)
            add(rank, max(free, until), start[at], _SHARDING, at)
            free = max(free, end[at])
        ended = max(free, min(finish, float(found.reduced[rank]))) if stop > first else free
        add(rank, free, ended, _SHARDING)
        add(rank, ended, finish, _COOL_DOWN if stop > first else _WARM_UP)
    return pieces


def span_at(timeline: Timeline, at: int) -> Span:
    """The span of the action at place `at` of the schedule's codes."""
    return Span(
        int(reasons(timeline).ranks[at]), decode(timeline.schedule.packed.view[at]),
        memoryview(timeline.start).cast("d")[at], memoryview(timeline.end).cast("d")[at],
    )  # fmt: skip


def critical_path(timeline: Timeline) -> tuple[Hop, ...]:
    """The chain of actions that made the run as long as it is, first to last."""
    found = reasons(timeline)
    hops = []
    for at in critical_places(timeline):
        source, before = int(found.waited[at]), int(found.before[at])
        span = span_at(timeline, at)
        bound_by = "data" if source >= 0 else "rank" if before >= 0 else "start"
        ready = memoryview(timeline.end).cast("d")[before] if before >= 0 else timeline.first_start
        if source < 0 and span.start > ready and found.gathers[at] < span.start:
            bound_by = "weights"
        hops.append(Hop(*span, bound_by))
    if (last := _last_reduce(timeline)) is not None:
        hops.append(Hop(*last, "rank"))
    return tuple(hops)


def _last_reduce(timeline: Timeline) -> Span | None:
    """The REDUCE_GRAD that the end of the timeline waits for; None if a computation ends last."""
    spans = [span for rank in range(timeline.num_ranks) for span in timeline.sharding_spans(rank)]
    last = max(spans, key=lambda span: span.end, default=None)
    if last is None or last.action.kind is not Kind.REDUCE_GRAD:
        return None
    return last if last.end > max(memoryview(timeline.end).cast("d"), default=last.end) else None


def critical_places(timeline: Timeline) -> list[int]:
    """The critical path as places in the schedule's codes, first to last."""
    found = reasons(timeline)
    if not timeline.schedule.num_actions:
        return []
    xp = found.arrays
    trail = xp.full_ints(timeline.schedule.num_actions)
    first = -1
    if (last := _last_reduce(timeline)) is not None:  # it begins with the gradients that it reduces
        begin, stop = timeline.schedule.packed.offsets[last.rank : last.rank + 2]
        codes = timeline.schedule.packed.view
        places = (at for at in range(stop - 1, begin - 1, -1) if stage_of(codes[at]) == last.action.stage)
        first = next((at for at in places if kind_of(codes[at]) in (B, W)), -1)
    count = xp.call(path_kernel, xp.floats(timeline.end), found.waited, found.before, first, trail)
    return [int(at) for at in trail[:count]][::-1]


def path_kernel(end, waited, before, first, trail):  # type: ignore[no-untyped-def]
    """Walk back from `first`, or else from the last end; returns the number of places written."""
    at = max(first, 0)
    for other in range(len(end)):
        if first < 0 and end[other] > end[at]:
            at = other
    count = 0
    while at >= 0 and count < len(trail):
        trail[count] = at
        count += 1
        at = waited[at] if waited[at] >= 0 else before[at]
    return count
