"""Recorded actions whose time includes waiting for a message: a runtime may wait inside of what it records."""

from __future__ import annotations

from array import array
from dataclasses import replace

from zeropipe.core.action import Action, Kind
from zeropipe.core.needs import needs
from zeropipe.core.timeline import Timeline
from zeropipe.core.units import time_text
from zeropipe.errors import ScheduleError


def trim_waits(timeline: Timeline) -> tuple[Timeline, int]:
    """The timeline without waiting for inputs: no action begins before they exist. Also the number of shortened steps.

    ScheduleError for an action that ends before its inputs do: clocks of the ranks differ.
    """
    ends = _find_ends(timeline)
    start, num_shortened = array("d"), 0
    for rank in range(timeline.num_ranks):
        for step in timeline.steps(rank):
            ready = min(_ready(span.action, ends, timeline) for span in step)  # of an Overlap, one half may begin
            begin, end = step[0].start, step[0].end
            if ready > end:
                raise ScheduleError(
                    f"{step[0].action} ends {time_text(ready - end, timeline.unit)} before its input is there: the "
                    "clocks of the ranks differ; record them on machines with one time (NTP or PTP)"
                )
            num_shortened += ready > begin
            start.extend([max(begin, ready)] * len(step))
    return replace(timeline, start=start.tobytes()), num_shortened


def _find_ends(timeline: Timeline) -> dict[Action, float]:
    """When each result is there; a full backward has the result of an I."""
    spans = (span for rank in range(timeline.num_ranks) for span in timeline.spans(rank))
    return {_result(span.action): span.end for span in spans}


def _result(action: Action) -> Action:
    return action._replace(kind=Kind.I) if action.kind is Kind.B else action


def _ready(action: Action, ends: dict[Action, float], timeline: Timeline) -> float:
    """When the inputs of an action are there."""
    return max((ends[need] for need in needs(action, timeline.schedule.num_stages)), default=float("-inf"))
