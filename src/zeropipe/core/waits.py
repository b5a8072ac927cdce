"""Recorded actions whose time includes waiting for a message: a runtime may wait inside of what it records."""

from __future__ import annotations

from array import array
from collections.abc import Mapping, Sequence
from dataclasses import replace

from zeropipe.core.action import Action, Kind
from zeropipe.core.needs import needs
from zeropipe.core.timeline import Span, Timeline
from zeropipe.core.units import time_text
from zeropipe.errors import ScheduleError


def trim_waits(timeline: Timeline) -> tuple[Timeline, int]:
    """The timeline without waiting for inputs: no action begins before they exist. Also the number of shortened steps.

    A runtime may record the sending of a result with its action, so a step may end before the record of its input does:
    it is left as it is. ScheduleError if most steps of a rank do: the clocks of the ranks differ.
    """
    ends = find_ends(timeline)
    start, num_shortened = array("d"), 0
    for rank in range(timeline.num_ranks):
        steps = list(timeline.steps(rank))
        ready = [min(ready_time(span.action, ends, timeline) for span in step) for step in steps]  # of either half
        _require_one_clock(timeline, steps, ready)
        for step, earliest in zip(steps, ready):
            is_shortened = step[0].start < earliest <= step[0].end
            num_shortened += is_shortened
            start.extend([earliest if is_shortened else step[0].start] * len(step))
    return replace(timeline, start=start.tobytes()), num_shortened


def _require_one_clock(timeline: Timeline, steps: Sequence[tuple[Span, ...]], ready: Sequence[float]) -> None:
    """ScheduleError if most steps that wait for other ranks end before their inputs are there."""
    early = [(earliest - step[0].end, step[0].action) for step, earliest in zip(steps, ready) if earliest > step[0].end]
    num_waiting = sum(any(_waits_for_others(span.action, timeline) for span in step) for step in steps)
    if 2 * len(early) > num_waiting:
        by, action = max(early)
        raise ScheduleError(
            f"{action} ends {time_text(by, timeline.unit)} before its input is there: the clocks of the ranks differ; "
            "record them on machines with one time (NTP or PTP)"
        )


def _waits_for_others(action: Action, timeline: Timeline) -> bool:
    """Whether another rank computes an input of the action."""
    schedule = timeline.schedule
    needed = needs(action, schedule.num_stages, schedule.num_slices)
    own, *others = (schedule.placement.rank_of(one.stage, one.microbatch) for one in (action, *needed))
    return any(rank != own for rank in others)


def find_ends(timeline: Timeline) -> dict[Action, float]:
    """When each result is there; a full backward has the result of an I."""
    spans = (span for rank in range(timeline.num_ranks) for span in timeline.spans(rank))
    return {_result(span.action): span.end for span in spans}


def _result(action: Action) -> Action:
    """As `needs` names it: with the kind I for a B, without its mark."""
    return action._replace(kind=Kind.I if action.kind is Kind.B else action.kind, checkpointed=False)


def ready_time(action: Action, ends: Mapping[Action, float], timeline: Timeline) -> float:
    """When the inputs of an action are there."""
    schedule = timeline.schedule
    return max((ends[need] for need in needs(action, schedule.num_stages, schedule.num_slices)), default=float("-inf"))
