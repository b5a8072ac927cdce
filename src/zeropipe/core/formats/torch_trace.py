"""Traces of torch.profiler, one file per rank, as a measured Timeline.

The engine names its actions there (`2F0`), and torch.distributed.pipelining's runtime does too (`PP:2F0`). Times of the
GPU are taken where the trace has them, else the host's.
"""

from __future__ import annotations

import re
from array import array
from collections.abc import Mapping, Sequence
from math import isfinite
from typing import Any, NamedTuple

from zeropipe.core.action import COMM, Action, Kind, Overlap, Step, actions_of, parse_step
from zeropipe.core.complete import check_complete
from zeropipe.core.formats.csv import from_csv
from zeropipe.core.timeline import Timeline
from zeropipe.errors import ScheduleError

PREFIX = "PP:"  # of torch's own runtime
PIPELINE = "zeropipe_pipeline"  # the field in which the engine says how many stages there are
_TO_LATER = re.compile(r"([0-9]{1,9})(SEND_F|RECV_B)[0-9]+")  # to or from the next stage
_HOST, _GPU = "user_annotation", "gpu_user_annotation"


class Ran(NamedTuple):
    """One step of a rank, in seconds."""

    step: Step
    start: float
    end: float


def is_torch_trace(data: Any) -> bool:
    """Whether parsed JSON is a profiler's trace and not a timeline of ours."""
    return isinstance(data, dict) and "traceEvents" in data and "zeropipe" not in data


def from_torch_traces(traces: Sequence[Mapping[str, Any]], names: Sequence[str] | None = None) -> Timeline:
    """The Timeline of one pipeline from the parsed traces of all its ranks: its step of median length.

    Ranks are in the order of their numbers in the files (`distributedInfo`), or of the files where these have none.
    `names` are how errors call the files.
    """
    names = names or [f"trace {n}" for n in range(len(traces))]
    order = _order(traces, names)
    ranks = [_steps_of(_ran(traces[n], names[n]), names[n]) for n in order]
    number = len(ranks[0])
    for n, steps in zip(order, ranks, strict=True):
        if len(steps) != number:
            raise ScheduleError(
                f"{names[n]} holds {len(steps)} training steps, {names[order[0]]} holds {number}: "
                "profile the same steps on all ranks"
            )
    lengths = [
        max(rank[at][-1].end for rank in ranks) - min(rank[at][0].start for rank in ranks) for at in range(number)
    ]
    middle = sorted(range(number), key=lengths.__getitem__)[number // 2]
    timeline = _timeline([rank[middle] for rank in ranks])
    told = max(map(_num_stages, traces))
    if told > timeline.schedule.num_stages:
        raise ScheduleError(
            f"these traces are of {timeline.schedule.num_stages} of {told} stages: give those of all ranks of it"
        )
    return timeline


def _num_stages(trace: Mapping[str, Any]) -> int:
    """How many stages there are at least: as the engine says, or for torch's messages to have an end."""
    told = trace.get(PIPELINE)
    number = told.get("num_stages") if isinstance(told, Mapping) else None
    texts = (event["name"].removeprefix(PREFIX) for event in trace["traceEvents"] if _is_annotation(event))
    ends = [int(match[1]) + 2 for text in texts if (match := _TO_LATER.fullmatch(text))]
    return max([number if isinstance(number, int) else 0, *ends])


def _order(traces: Sequence[Mapping[str, Any]], names: Sequence[str]) -> list[int]:
    """The places of the files, by the rank that each tells."""
    told = [info.get("rank") if isinstance(info := trace.get("distributedInfo"), Mapping) else None for trace in traces]
    known = [rank for rank in told if isinstance(rank, int)]
    if len(known) < len(traces):
        return list(range(len(traces)))
    if len(set(known)) < len(known):
        twice = next(rank for rank in known if known.count(rank) > 1)
        both = [name for name, rank in zip(names, known, strict=True) if rank == twice]
        raise ScheduleError(f"{both[0]} and {both[1]} are both of rank {twice}: give one trace of each rank")
    return sorted(range(len(traces)), key=known.__getitem__)


def _ran(trace: Mapping[str, Any], name: str) -> list[Ran]:
    """What a trace says of a rank's computation, in order of time."""
    events = trace["traceEvents"]
    if not isinstance(events, list):
        raise ScheduleError(f"{name}: traceEvents is not a list: this is no trace of torch.profiler")
    base = trace.get("baseTimeNanoseconds", 0)
    zero = base / 1e9 if isinstance(base, int) else 0.0
    found: dict[str, list[Ran]] = {_HOST: [], _GPU: []}
    kernels = False
    spans: dict[tuple[str, Any], int] = {}  # of a GPU: one annotation has a piece on every stream it used
    for event in events:
        step = _step(event)
        if step is None:
            kernels = kernels or (isinstance(event, Mapping) and event.get("cat") == "kernel")
            continue
        category, args = event["cat"], event.get("args")
        start, lasts = event.get("ts"), event.get("dur")
        if not all(isinstance(t, (int, float)) and isfinite(t) for t in (start, lasts)) or lasts < 0:
            raise ScheduleError(f"{name}: {event['name']} has no times (ts, dur): the trace is damaged")
        ran = Ran(step, zero + start / 1e6, zero + (start + lasts) / 1e6)
        listed = found[category]
        key = (category, args.get("External id")) if isinstance(args, Mapping) else (category, None)
        if category == _GPU and key[1] is not None and key in spans and listed[spans[key]].step == step:
            before = listed[spans[key]]
            listed[spans[key]] = Ran(step, min(before.start, ran.start), max(before.end, ran.end))
            continue
        spans[key] = len(listed)
        listed.append(ran)
    chosen = found[_GPU] if len(found[_GPU]) >= len(found[_HOST]) else found[_HOST]
    if kernels and chosen is found[_HOST] and chosen:
        missing = next(iter({ran.step for ran in chosen} - {ran.step for ran in found[_GPU]}), chosen[0].step)
        raise ScheduleError(
            f"{name} has kernels of a GPU, but not when {missing} ran there; the host's times only say when it was "
            "launched: record the run with the engine (record=True) instead"
        )
    if not chosen:
        raise ScheduleError(
            f"{name} names no action like 2F0 or PP:2F0: profile a run of the engine, or of torch's pipeline runtime"
        )
    return sorted(chosen, key=lambda ran: ran.start)


def _step(event: Any) -> Step | None:
    """The computation that an event is named after, if it is."""
    if not _is_annotation(event):
        return None
    text = event["name"].removeprefix(PREFIX)
    if not text[:1].isdecimal() and not text.startswith("("):
        return None
    try:
        step = parse_step(text)
    except ScheduleError:
        return None
    return None if isinstance(step, Action) and step.kind in COMM else step


def _is_annotation(event: Any) -> bool:
    if not isinstance(event, Mapping) or event.get("ph") != "X" or event.get("cat") not in (_HOST, _GPU):
        return False
    return isinstance(event.get("name"), str)


def _steps_of(ran: list[Ran], name: str) -> list[list[Ran]]:
    """A rank's training steps: a new one begins with a forward that this one has had."""
    steps: list[list[Ran]] = [[]]
    seen: set[Action] = set()
    for piece in ran:
        forwards = {action for action in actions_of([piece.step]) if action.kind is Kind.F}
        if forwards & seen:
            steps.append([])
            seen = set()
        seen |= forwards
        steps[-1].append(piece)
    row = [piece.step for piece in steps[0]]
    for number, others in enumerate(steps):
        if [piece.step for piece in others] != row:
            raise ScheduleError(
                f"{name}: its training steps 1 and {number + 1} are not alike: profile whole steps of one schedule"
            )
    return steps


def _timeline(rows: Sequence[list[Ran]]) -> Timeline:
    text = "\n".join(",".join(str(piece.step) for piece in row) for row in rows)
    schedule = from_csv(text, "trace")
    try:
        check_complete(schedule)
    except ScheduleError as error:
        raise ScheduleError(
            f"these traces are not of all ranks of one pipeline, or not of whole steps: {error}"
        ) from None
    zero = min(row[0].start for row in rows)
    start, end = array("d"), array("d")
    for row in rows:
        for piece in row:
            for _ in range(2 if isinstance(piece.step, Overlap) else 1):
                start.append(piece.start - zero)
                end.append(piece.end - zero)
    return Timeline(schedule, start.tobytes(), end.tobytes(), unit="s", measured=True)
