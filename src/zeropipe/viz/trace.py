"""Timelines as a trace that Perfetto and chrome://tracing open.

One process per timeline, one track per rank, a flow arrow per message between ranks, a memory counter per rank. Times
are microseconds; a timeline in units of its own counts one unit as a millisecond. A trace of one timeline holds the
timeline's own JSON, too: `zp.from_json` gives it back.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

from zeropipe.core import explain
from zeropipe.core.json import plain
from zeropipe.core.timeline import Timeline
from zeropipe.viz.boxes import UPPER, Boxes, boxes
from zeropipe.viz.colors import NAMES

Event = dict[str, Any]
UNIT = {"s": 1e6, "": 1e3}  # microseconds per unit of time


def write_trace(timelines: Sequence[Timeline], path: Path) -> None:
    """Write the trace, one event per line. A single timeline's trace can be read back with `from_json`."""
    with path.open("w", encoding="utf-8") as out:
        out.write('{"displayTimeUnit":"ms","traceEvents":[\n')
        for n, event in enumerate(trace_events(timelines)):
            out.write((",\n" if n else "") + json.dumps(event, separators=(",", ":")))
        out.write("\n]")
        if len(timelines) == 1:
            out.write("," + json.dumps(plain(timelines[0]), separators=(",", ":"))[1:-1])
        out.write("}\n")


def trace_events(timelines: Iterable[Timeline]) -> Iterator[Event]:
    """All events of a trace."""
    arrows = 0
    for n, timeline in enumerate(timelines):
        model, factor = boxes(timeline), UNIT.get(timeline.unit, 1e3)
        yield from _names(timeline, n + 1)
        yield from _slices(timeline, model, n + 1, factor)
        for arrow in _arrows(timeline, model, n + 1, factor, arrows):
            arrows = arrow["id"]
            yield arrow
        if timeline.memory:
            yield from _memory(timeline, model, n + 1, factor)


def _names(timeline: Timeline, process: int) -> Iterator[Event]:
    yield {"ph": "M", "name": "process_name", "pid": process, "args": {"name": timeline.title}}
    for rank in range(timeline.num_ranks):
        track = {"ph": "M", "pid": process, "tid": rank + 1}
        yield {**track, "name": "thread_name", "args": {"name": f"rank {rank}"}}
        yield {**track, "name": "thread_sort_index", "args": {"sort_index": rank}}


def _slices(timeline: Timeline, model: Boxes, process: int, factor: float) -> Iterator[Event]:
    waited = explain.reasons(timeline).waited
    for rank in range(model.num_ranks):
        for i in range(int(model.offsets[rank]), int(model.offsets[rank + 1])):
            name = _name(model, i)
            args: dict[str, Any] = {"stage": int(model.stage[i]), "microbatch": int(model.microbatch[i])}
            if waited[i] >= 0:
                args["waited_for"] = _name(model, int(waited[i]))
            start, end = _us(model.start[i], factor), _us(model.end[i], factor)
            yield {"ph": "X", "name": name, "cat": NAMES["FBIW"[int(model.kind[i])]], "pid": process, "tid": rank + 1,
                   "ts": start, "dur": round(end - start, 3), "args": args}  # fmt: skip


def _arrows(timeline: Timeline, model: Boxes, process: int, factor: float, last: int) -> Iterator[Event]:
    """A pair of flow events per message; each is tied to the slice that encloses it, so it lies in its middle."""
    why = explain.reasons(timeline)
    for i in range(len(model.start)):
        source = int(why.remote[i])
        if source < 0 or why.ranks[source] == why.ranks[i]:
            continue
        last += 1
        shared = {"name": "message", "cat": "p2p", "id": last, "pid": process}
        for phase, at, more in (("s", source, {}), ("f", i, {"bp": "e"})):
            middle = _us((model.start[at] + model.end[at]) / 2, factor)
            yield {"ph": phase, **shared, "tid": int(why.ranks[at]) + 1, "ts": middle, **more}


def _memory(timeline: Timeline, model: Boxes, process: int, factor: float) -> Iterator[Event]:
    assert timeline.memory is not None
    during, after = (memoryview(column).cast("d") for column in timeline.memory)
    unit = {"B": "bytes"}.get(timeline.memory_unit, timeline.memory_unit or "units")
    for rank in range(model.num_ranks):
        counter = {"ph": "C", "name": f"memory of rank {rank}", "pid": process}
        for i in range(int(model.offsets[rank]), int(model.offsets[rank + 1])):
            if model.half[i] == UPPER:
                continue  # the other half holds the same level
            yield {**counter, "ts": _us(model.start[i], factor), "args": {unit: during[i]}}
            yield {**counter, "ts": _us(model.end[i], factor), "args": {unit: after[i]}}


def _name(model: Boxes, i: int) -> str:
    return f"{model.stage[i]}{'FBIW'[int(model.kind[i])]}{model.microbatch[i]}"


def _us(time: float, factor: float) -> float:
    """Microseconds, to the nanosecond, which is all a trace keeps."""
    return round(float(time) * factor, 3)
