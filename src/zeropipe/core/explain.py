"""Why time is lost: the cause of every idle gap, and the critical path, of simulated and measured timelines.

An action starts when its rank is free and its inputs have arrived. So the time before it is spent on
    warm-up         before the first action of the rank
    waiting         until its input is produced, on another rank
    communication   from then until it starts: the input is in flight; or a blocking send of its own rank
    cool-down       after the last action of the rank, until the last one of all ranks
    other           of measured runs: the input was there, but the rank was idle (launch, allocation, noise)
    sharding        while its weights are gathered; after the last action of the rank, while gradients are reduced
    offload         while its activations are copied back from the host
"""

from __future__ import annotations

from functools import lru_cache
from math import inf
from typing import NamedTuple

from zeropipe.core.action import BACKWARD, Action, B, Kind, W
from zeropipe.core.jit import Arrays, Floats, Ints, arrays
from zeropipe.core.needs import Dependencies, build_dependencies, find_nonblocking_actions
from zeropipe.core.packed import is_joined, kind_of, stage_of
from zeropipe.core.shard_timeline import find_gathers
from zeropipe.core.timeline import Span, Timeline

CAUSES = ("warm-up", "waiting for data", "communication", "cool-down", "other", "sharding", "offload")
_NUM_CAUSES = len(CAUSES)
_WARM_UP, _WAITING, _COMMUNICATION, _COOL_DOWN, _OTHER, _SHARDING, _OFFLOAD = range(_NUM_CAUSES)


class Idle(NamedTuple):
    """Idle time of one rank by cause."""

    warm_up: float
    waiting: float
    communication: float
    cool_down: float
    other: float
    sharding: float = 0.0
    offload: float = 0.0

    @property
    def total(self) -> float:
        return sum(self)


class Gap(NamedTuple):
    """An idle interval of a rank with one cause, before `action`, which waited for `needs`, an action elsewhere."""

    rank: int
    start: float
    end: float
    cause: str
    action: Action | None
    needs: Action | None


class Reasons(NamedTuple):
    """What each action needed and waited for: indices into the schedule's codes, -1 for none."""

    remote: Ints  # the action of another stage whose result it needs
    own: Ints  # the action of its own stage whose result it needs
    previous: Ints  # the action before it on its rank
    waited: Ints  # the action whose result kept the rank idle before it; -1 if the rank was busy, or for other causes
    ranks: Ints  # its rank
    copied: Ints  # 1 if its RELOAD ended when it started, or later
    gather_start: Floats  # when the UNSHARD started that kept it waiting; else its own start
    reduced: Floats  # by rank: the last end of a REDUCE_GRAD
    message: float  # the mean time of a message whose receiver was waiting for it


def find_reasons(timeline: Timeline) -> Reasons:
    """What every action needed and waited for."""
    return _find_reasons(timeline)[1]


@lru_cache(maxsize=4)
def _find_reasons(timeline: Timeline) -> tuple[Arrays, Reasons]:
    schedule = timeline.schedule
    xp, size = arrays(schedule.num_actions), schedule.num_actions
    deps = build_dependencies(xp, schedule)
    if timeline.sharding is None:
        gather_start, reduced = xp.floats(timeline.start), xp.full_floats(schedule.num_ranks, -inf)
    else:
        gather_start, reduced = find_gathers(xp, schedule, timeline.start, timeline.sharding)
    remote, own, previous, waited, ranks = (xp.full_ints(size, -1) for _ in range(5))
    reasons = Reasons(
        remote=remote, own=own, previous=previous, waited=waited, ranks=ranks, copied=_find_copied(xp, timeline),
        gather_start=gather_start,
        reduced=reduced, message=0.0,
    )  # fmt: skip
    first, last = find_nonblocking_actions(xp, deps, timeline.blocking, timeline.blocking_ends)
    message = xp.call(
        reasons_kernel, deps, xp.floats(timeline.start), xp.floats(timeline.end), timeline.measured, first, last,
        xp.full_ints(deps.num_keys, -1), reasons,
    )  # fmt: skip
    return xp, reasons._replace(message=float(message))


def _find_copied(xp: Arrays, timeline: Timeline) -> Ints:
    """1 for each step with a backward whose RELOAD ended when it started, or later."""
    copied = xp.full_ints(timeline.schedule.num_actions)
    for rank in range(timeline.num_ranks) if timeline.offloading else ():
        ends = {
            (span.action.stage, span.action.microbatch): span.end
            for span in timeline.offloading_spans(rank) if span.action.kind is Kind.RELOAD
        }  # fmt: skip
        at = timeline.schedule.packed.offsets[rank]
        for step in timeline.steps(rank):
            backward = [span for span in step if span.action.kind in BACKWARD]
            waits = any(ends.get((span.action.stage, span.action.microbatch), -inf) >= span.start for span in backward)
            for _ in step:
                copied[at] = int(waits)
                at += 1
    return copied


def reasons_kernel(
    deps: Dependencies, start: Floats, end: Floats, measured: bool, first_nonblocking: Ints, last_nonblocking: Ints,
    producer: Ints, reasons: Reasons,
) -> float:  # fmt: skip
    """Fill the index columns; returns the mean time of a message whose receiver was idle when it was sent.

    A result that was produced before the rank was free may still have been in flight. But a rank with blocking sends
    waits for its own send, which started later.
    """
    codes, offsets, makes, to = deps.codes, deps.offsets, deps.makes, deps.to
    remote, own, previous = reasons.remote, reasons.own, reasons.previous
    waited, ranks = reasons.waited, reasons.ranks
    for rank in range(len(offsets) - 1):
        for at in range(offsets[rank], offsets[rank + 1]):
            ranks[at] = rank
            if makes[at] >= 0:
                producer[makes[at]] = at
    total = 0.0
    count = 0
    for is_second_pass in (False, True):  # the first pass measures messages
        typical = total / count if count else 0.0
        for rank in range(len(offsets) - 1):
            before = -1
            was_sending = False
            at = offsets[rank]
            while at < offsets[rank + 1]:
                last = at + is_joined(codes[at])
                latest = -1
                for half in range(at, last + 1):
                    previous[half] = before
                    if deps.own[half] >= 0:
                        own[half] = producer[deps.own[half]]
                    if deps.remote[half] >= 0:
                        source = producer[deps.remote[half]]
                        remote[half] = source
                        if source >= 0 and ranks[source] != rank and (latest < 0 or end[source] > end[latest]):
                            latest = source
                if latest >= 0:
                    free = end[before] if before >= 0 else start[at]
                    if not is_second_pass:
                        if before >= 0 and end[latest] > free:
                            total += max(0.0, start[at] - end[latest])
                            count += 1
                    elif before < 0 or (
                        start[at] > free
                        and (not measured or end[latest] + typical > free)
                        and (not was_sending or end[latest] > free)
                    ):
                        for half in range(at, last + 1):
                            waited[half] = latest
                was_sending = False
                for half in range(at, last + 1):
                    if to[half] >= 0 and (half < first_nonblocking[rank] or half > last_nonblocking[rank]):
                        was_sending = True
                before = last
                at = last + 1
    return total / count if count else 0.0


def idle_times(timeline: Timeline) -> tuple[Idle, ...]:
    """Idle time of each rank by cause. The sum over causes is the makespan minus the rank's busy time."""
    xp, reasons = _find_reasons(timeline)
    totals = xp.full_floats(timeline.num_ranks * _NUM_CAUSES)
    xp.call(
        idle_kernel, xp.list_ints(timeline.schedule.packed.offsets), xp.floats(timeline.start),
        xp.floats(timeline.end), reasons, timeline.measured, timeline.first_start,
        timeline.first_start + timeline.makespan, totals,
    )  # fmt: skip
    rows = (totals[at : at + _NUM_CAUSES] for at in range(0, len(totals), _NUM_CAUSES))
    return tuple(Idle(*map(float, row)) for row in rows)


class Exchanges(NamedTuple):
    """The time of a rank's exchanges of experts, and what of it no computation hides."""

    total: float
    exposed: float


def sum_exchanges(timeline: Timeline) -> tuple[Exchanges, ...]:
    """The exchanges of each rank; zeros if the timeline has no phases."""
    return tuple(_sum_rank_exchanges(timeline, rank) for rank in range(timeline.num_ranks))


def _sum_rank_exchanges(timeline: Timeline, rank: int) -> Exchanges:
    total = exposed = 0.0
    for step in timeline.steps(rank) if timeline.phases else ():
        spans = list(timeline.phase_spans(step))
        lasts = [(span.is_exchange, span.end - span.start) for span in spans]
        total += sum(time for is_exchange, time in lasts if is_exchange)
        if spans:  # one computation runs at a time
            within = max(span.end for span in spans) - min(span.start for span in spans)
            exposed += max(0.0, within - sum(time for is_exchange, time in lasts if not is_exchange))
    return Exchanges(total, exposed)


def _divide_gap(
    free: float, start: float, produced: float, is_known: bool, message: float, measured: bool
) -> tuple[float, float]:
    """When the waiting of a gap from `free` to `start` ends, and when its communication; the rest has another cause.

    `produced` is the end of the action that was waited for, if it is known.
    """
    if not is_known:
        # a simulated rank that has its inputs is idle only while its own blocking send is in flight
        return free, free if measured else start
    ready = min(start, max(free, produced))
    if measured and produced <= free:
        return ready, min(start, max(free, produced + message))
    return ready, start


def _find_gather_wait(free: float, start: float, produced: float, gather_start: float) -> float:
    """When the wait for weights begins in a gap from `free` to `start`; `start` if there is none.

    `produced` is the end of the action that was waited for.
    """
    return min(start, max(free, produced, gather_start)) if gather_start < start else start


def idle_kernel(
    offsets: Ints, start: Floats, end: Floats, reasons: Reasons, measured: bool, begin: float, finish: float, totals:
    Floats,
) -> None:  # fmt: skip
    """Add up the idle time of each rank by cause."""
    waited, gather_start, reduced, message = reasons.waited, reasons.gather_start, reasons.reduced, reasons.message
    for rank in range(len(offsets) - 1):
        base = _NUM_CAUSES * rank
        if offsets[rank] == offsets[rank + 1]:
            totals[base + _WARM_UP] = finish - begin
            continue
        free = begin
        for at in range(offsets[rank], offsets[rank + 1]):
            if start[at] > free:
                source = waited[at]
                produced = end[source] if source >= 0 else free
                until = _find_gather_wait(free, start[at], produced, gather_start[at])
                cause = _SHARDING
                if reasons.copied[at]:
                    until = min(start[at], max(free, produced))
                    cause = _OFFLOAD
                totals[base + cause] += start[at] - until
                if at == offsets[rank]:
                    totals[base + _WARM_UP] += until - free
                else:
                    ready, arrived = _divide_gap(free, until, produced, source >= 0, message, measured)
                    totals[base + _WAITING] += ready - free
                    totals[base + _COMMUNICATION] += arrived - ready
                    totals[base + _OTHER] += until - arrived
            free = max(free, end[at])
        ended = max(free, min(finish, reduced[rank]))
        totals[base + _SHARDING] += ended - free
        totals[base + _COOL_DOWN] += finish - ended


def find_gaps(timeline: Timeline) -> list[Gap]:
    """All idle intervals of all ranks with their causes, in order. One pause may have several intervals."""
    reasons = find_reasons(timeline)
    codes = timeline.schedule.packed.view
    start, end = memoryview(timeline.start).cast("d"), memoryview(timeline.end).cast("d")
    begin, finish = timeline.first_start, timeline.first_start + timeline.makespan
    gaps: list[Gap] = []

    def add(rank: int, first: float, last: float, cause: int, at: int = -1, source: int = -1) -> None:
        if last > first:
            action = timeline.schedule.decode(codes[at]) if at >= 0 else None
            needs = timeline.schedule.decode(codes[source]) if source >= 0 else None
            gaps.append(Gap(rank, first, last, CAUSES[cause], action, needs))

    for rank in range(timeline.num_ranks):
        free = begin
        first, stop = timeline.schedule.packed.offsets[rank : rank + 2]
        for at in range(first, stop):
            source = int(reasons.waited[at])
            produced = end[source] if source >= 0 else free
            until = _find_gather_wait(free, start[at], produced, float(reasons.gather_start[at]))
            if is_copied := bool(reasons.copied[at]):
                until = min(start[at], max(free, produced))
            if at == first:
                add(rank, free, until, _WARM_UP, at, source)
            elif start[at] > free:
                ready, arrived = _divide_gap(free, until, produced, source >= 0, reasons.message, timeline.measured)
                add(rank, free, ready, _WAITING, at, source)
                add(rank, ready, arrived, _COMMUNICATION, at, source)
                add(rank, arrived, until, _OTHER, at)
            add(rank, max(free, until), start[at], _OFFLOAD if is_copied else _SHARDING, at)
            free = max(free, end[at])
        ended = max(free, min(finish, float(reasons.reduced[rank]))) if stop > first else free
        add(rank, free, ended, _SHARDING)
        add(rank, ended, finish, _COOL_DOWN if stop > first else _WARM_UP)
    return gaps


def critical_path(timeline: Timeline) -> tuple[Span, ...]:
    """The chain of actions that determines the makespan, first to last."""
    ranks, codes = find_reasons(timeline).ranks, timeline.schedule.packed.view
    start, end = memoryview(timeline.start).cast("d"), memoryview(timeline.end).cast("d")
    decode = timeline.schedule.decode
    spans = [Span(int(ranks[at]), decode(codes[at]), start[at], end[at]) for at in critical_indices(timeline)]
    last = _last_reduction(timeline)
    return (*spans, last) if last is not None else tuple(spans)


def _last_reduction(timeline: Timeline) -> Span | None:
    """The REDUCE_GRAD that ends the timeline; None if a computation ends last."""
    spans = [span for rank in range(timeline.num_ranks) for span in timeline.sharding_spans(rank)]
    last = max(spans, key=lambda span: span.end, default=None)
    if last is None or last.action.kind is not Kind.REDUCE_GRAD:
        return None
    return last if last.end > max(memoryview(timeline.end).cast("d"), default=last.end) else None


def critical_indices(timeline: Timeline) -> list[int]:
    """The critical path as indices into the schedule's codes, first to last."""
    if not timeline.schedule.num_actions:
        return []
    xp, reasons = _find_reasons(timeline)
    path = xp.full_ints(timeline.schedule.num_actions)
    final = -1
    if (last := _last_reduction(timeline)) is not None:  # it follows the last gradient of its stage
        begin, stop = timeline.schedule.packed.offsets[last.rank : last.rank + 2]
        codes = timeline.schedule.packed.view
        indices = (at for at in range(stop - 1, begin - 1, -1) if stage_of(codes[at]) == last.action.stage)
        final = next((at for at in indices if kind_of(codes[at]) in (B, W)), -1)
    count = xp.call(path_kernel, xp.floats(timeline.end), reasons.waited, reasons.previous, final, path)
    return [int(at) for at in path[:count]][::-1]


def path_kernel(end: Floats, waited: Ints, previous: Ints, final: int, path: Ints) -> int:
    """Follow the path back from `final`, or else from the last end; returns its length."""
    at = max(final, 0)
    for other in range(len(end)):
        if final < 0 and end[other] > end[at]:
            at = other
    count = 0
    while at >= 0 and count < len(path):
        path[count] = at
        count += 1
        at = waited[at] if waited[at] >= 0 else previous[at]
    return count
