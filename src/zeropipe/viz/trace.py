"""Timelines as a trace that Perfetto and chrome://tracing open.

One process per timeline, one track per rank, a flow arrow per message between ranks, a memory counter per rank; if
stages are sharded, a second track per rank for its gathers and reductions; if its phases are known, one for its
computations and one for its exchanges. Times are microseconds; in a
timeline with another unit, one unit is a millisecond. A trace of one timeline also contains the timeline's own JSON,
which `zp.from_json` reads.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from zeropipe.core import explain
from zeropipe.core.formats.json import to_data
from zeropipe.core.timeline import Timeline
from zeropipe.viz.boxes import Boxes, boxes
from zeropipe.viz.colors import LANE_WORDS, NAMES
from zeropipe.viz.columns import UPPER
from zeropipe.viz.drawable import require_drawable
from zeropipe.viz.lanes import has_lane, lane

Event = dict[str, Any]
UNIT = {"s": 1e6, "": 1e3}  # microseconds per unit of time


def write_trace(timelines: Sequence[Timeline], path: Path) -> None:
    """Write the trace, one event per line. A single timeline's trace can be read back with `from_json`."""
    with path.open("w", encoding="utf-8") as out:
        out.write('{"displayTimeUnit":"ms","traceEvents":[\n')
        for n, event in enumerate(_trace_events(timelines)):
            out.write((",\n" if n else "") + json.dumps(event, separators=(",", ":")))
        out.write("\n]")
        if len(timelines) == 1:
            out.write("," + json.dumps(to_data(timelines[0]), separators=(",", ":"))[1:-1])
        out.write("}\n")


class Slices(NamedTuple):
    """The boxes of a timeline as plain lists, which are faster to read one by one."""

    process: int
    offsets: list[int]
    names: list[str]
    start: list[float]  # microseconds, rounded to nanoseconds as in a trace
    end: list[float]

    def rows(self) -> Iterator[tuple[int, int]]:
        """(rank, index) of every box."""
        for rank in range(len(self.offsets) - 1):
            for i in range(self.offsets[rank], self.offsets[rank + 1]):
                yield rank, i


def _trace_events(timelines: Iterable[Timeline]) -> Iterator[Event]:
    """All events of a trace."""
    arrows = 0
    for n, timeline in enumerate(timelines):
        require_drawable(timeline)
        model, factor = boxes(timeline), UNIT.get(timeline.unit, 1e3)
        start, end = (np.round(times * factor, 3).tolist() for times in (model.start, model.end))
        slices = Slices(n + 1, model.offsets.tolist(), model.names(), start, end)
        yield from _names(timeline, n + 1)
        yield from _slices(timeline, model, slices)
        yield from _moves(timeline, n + 1, factor)
        yield from _phases(timeline, n + 1, factor)
        for arrow in _arrows(timeline, slices, arrows):
            arrows = arrow["id"]
            yield arrow
        if timeline.memory:
            yield from _memory(timeline, model, slices)


def _names(timeline: Timeline, process: int) -> Iterator[Event]:
    yield {"ph": "M", "name": "process_name", "pid": process, "args": {"name": timeline.title}}
    for rank in range(timeline.num_ranks):
        track = {"ph": "M", "pid": process, "tid": rank + 1}
        yield {**track, "name": "thread_name", "args": {"name": f"rank {rank}"}}
        yield {**track, "name": "thread_sort_index", "args": {"sort_index": 2 * rank}}
        if has_lane(timeline):
            track = {**track, "tid": timeline.num_ranks + rank + 1}
            what = "weights and gradients" if timeline.sharding else "copies"
            yield {**track, "name": "thread_name", "args": {"name": f"rank {rank} {what}"}}
            yield {**track, "name": "thread_sort_index", "args": {"sort_index": 2 * rank + 1}}


def _phases(timeline: Timeline, process: int, factor: float) -> Iterator[Event]:
    """The phases of layers, on two more tracks of each rank: computations, and exchanges."""
    for rank in range(timeline.num_ranks) if timeline.phases and not timeline.measured else ():
        tracks = [(2 + n) * timeline.num_ranks + rank + 1 for n in range(2)]
        for track, name in zip(tracks, ("phases", "exchanges"), strict=True):
            named = {"ph": "M", "pid": process, "tid": track}
            yield {**named, "name": "thread_name", "args": {"name": f"rank {rank} {name}"}}
            yield {**named, "name": "thread_sort_index", "args": {"sort_index": 2 * rank + 1}}
        for step in timeline.steps(rank):
            for span in timeline.phase_spans(step):
                start, end = (round(time * factor, 3) for time in (span.start, span.end))
                if end > start:
                    yield {"ph": "X", "name": str(span), "cat": "exchange" if span.is_exchange else "phase",
                           "pid": process, "tid": tracks[span.is_exchange], "ts": start,
                           "dur": round(end - start, 3), "args": {"layer": span.layer}}  # fmt: skip


def _moves(timeline: Timeline, process: int, factor: float) -> Iterator[Event]:
    """UNSHARD, REDUCE_GRAD, OFFLOAD and RELOAD, on a second track."""
    for rank in range(timeline.num_ranks):
        for move in lane(timeline, rank):
            start, end = (round(time * factor, 3) for time in (move.start, move.end))
            yield {"ph": "X", "name": move.name, "cat": LANE_WORDS[move.look], "pid": process,
                   "tid": timeline.num_ranks + rank + 1, "ts": start, "dur": round(end - start, 3)}  # fmt: skip


def _slices(timeline: Timeline, model: Boxes, slices: Slices) -> Iterator[Event]:
    waited = list(map(int, explain.find_reasons(timeline).waited))
    stages, kinds, microbatches = model.stage.tolist(), model.kind.tolist(), model.microbatch.tolist()
    for rank, i in slices.rows():
        args: dict[str, Any] = {"stage": stages[i], "microbatch": microbatches[i]}
        if model.slice is not None:
            args["slice"] = int(model.slice[i])
        if waited[i] >= 0:
            args["waited_for"] = slices.names[waited[i]]
        lasts = round(slices.end[i] - slices.start[i], 3)
        yield {"ph": "X", "name": slices.names[i], "cat": NAMES["FBIW"[kinds[i]]], "pid": slices.process,
               "tid": rank + 1, "ts": slices.start[i], "dur": lasts, "args": args}  # fmt: skip


def _arrows(timeline: Timeline, slices: Slices, last: int) -> Iterator[Event]:
    """A pair of flow events per message, in the middle of the slices that they belong to."""
    why = explain.find_reasons(timeline)
    sources, ranks = list(map(int, why.remote)), list(map(int, why.ranks))
    for i, source in enumerate(sources):
        if source < 0 or ranks[source] == ranks[i]:
            continue
        last += 1
        shared = {"name": "message", "cat": "p2p", "id": last, "pid": slices.process}
        for phase, at, more in (("s", source, {}), ("f", i, {"bp": "e"})):
            middle = round((slices.start[at] + slices.end[at]) / 2, 3)
            yield {"ph": phase, **shared, "tid": ranks[at] + 1, "ts": middle, **more}


def _memory(timeline: Timeline, model: Boxes, slices: Slices) -> Iterator[Event]:
    """The level whenever it changes."""
    assert timeline.memory is not None
    during, after = (memoryview(column).cast("d") for column in timeline.memory)
    unit = {"B": "bytes"}.get(timeline.memory_unit, timeline.memory_unit or "units")
    halves = model.half.tolist()
    before: tuple[int, float | None] = (-1, None)
    for rank, i in slices.rows():
        if halves[i] == UPPER:
            continue  # the other half has the same level
        for time, level in ((slices.start[i], during[i]), (slices.end[i], after[i])):
            if before != (rank, level):
                yield {"ph": "C", "name": f"memory of rank {rank}", "pid": slices.process, "ts": time,
                       "args": {unit: level}}  # fmt: skip
            before = (rank, level)
