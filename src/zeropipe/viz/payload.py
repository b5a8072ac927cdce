"""The data that the viewer draws: timelines as plain data (for JSON), with their columns as one compressed string.

`columns.py` makes the columns, and `viewer/data.js` decodes them.
"""

from __future__ import annotations

import base64
import zlib
from collections.abc import Iterable, Sequence
from itertools import accumulate, chain
from math import ceil, log10
from typing import Any

from zeropipe.core import explain
from zeropipe.core.ranking import rank_timelines
from zeropipe.core.timeline import Timeline
from zeropipe.viz.colors import LANE_WORDS, palette, shade_table
from zeropipe.viz.columns import build_columns
from zeropipe.viz.drawable import drawable
from zeropipe.viz.lanes import LOOKS, Move, has_lane, looks_of, tracks
from zeropipe.viz.words import one_line

TICKS = 2**31 - 1  # times are whole ticks below this
MAX_PHASED_STEPS = 512  # different steps whose phases are shown


def payload(timelines: Timeline | Sequence[Timeline]) -> dict[str, Any]:
    """The data `mountViewer(element, data)` takes: plain dicts, lists, numbers and text."""
    listed = [drawable(t) for t in ([timelines] if isinstance(timelines, Timeline) else timelines)]
    tables = [shade_table(t.schedule.placement) for t in listed]
    shades = max((shade + 1 for table in tables for row in table for shade in row), default=1)
    return {
        "version": 1,
        "causes": list(explain.CAUSES),
        "palette": {theme: palette(theme, shades) for theme in ("light", "dark")},
        "lane": {look: LANE_WORDS[look] for look in LOOKS},
        "timelines": [
            {**_timeline(t, table), "standing": {"fits": s.fits, "best": s.best_time, "ofBest": s.of_best}}
            for t, table, s in zip(listed, tables, rank_timelines(listed).standings, strict=True)
        ],
    }


def _timeline(timeline: Timeline, shades: list[list[int]]) -> dict[str, Any]:
    schedule = timeline.schedule
    tick = _tick_of(timeline.makespan)
    listed = [track for rank in range(schedule.num_ranks) for track in tracks(timeline, rank)]
    columns = build_columns(timeline, tick, list(chain.from_iterable(listed)))
    return {
        "title": timeline.title,
        "schedule": one_line(schedule.name),
        "placement": schedule.placement.name,
        "measured": timeline.measured,
        "unit": timeline.unit,
        "memoryUnit": timeline.memory_unit,
        "ranks": schedule.num_ranks,
        "stages": schedule.num_stages,
        "microbatches": schedule.num_microbatches,
        **({"slices": schedule.num_slices} if schedule.num_slices > 1 else {}),
        "secondFrom": schedule.placement.second_from,
        "shades": shades,
        "offsets": list(schedule.packed.offsets),
        "tick": tick,
        "makespan": timeline.makespan,
        "idleFraction": timeline.idle_fraction,
        "bubble": timeline.bubble,
        "busy": list(timeline.busy),
        "idle": [list(rank) for rank in explain.idle_times(timeline)],
        "peakMemory": list(timeline.peak_memory) if timeline.memory else None,
        "memoryLimit": timeline.memory_limit,
        "overLimit": list(timeline.over_limit),
        "message": explain.find_reasons(timeline).message,
        **({"phases": _phases(timeline)} if timeline.phases and not timeline.measured else {}),
        **(_lane(timeline, listed) if has_lane(timeline) else {}),
        "columns": {name: column.type for name, column in columns.items()},
        "lengths": [column.length for column in columns.values()],
        "data": _pack(column.data for column in columns.values()),
    }


def _lane(timeline: Timeline, listed: Sequence[Sequence[Move]]) -> dict[str, Any]:
    """Where the tracks of each rank begin in the columns of the lane, and what there may be in them."""
    return {"laneOffsets": [0, *accumulate(map(len, listed))], "laneLooks": looks_of([timeline])}


def _phases(timeline: Timeline) -> dict[str, list[list[Any]]]:
    """The phases of each kind of step by its stages and kinds, like `0F 3B`: kind, name, is an exchange, start, end."""
    found: dict[str, list[list[Any]]] = {}
    for step in (step for rank in range(timeline.num_ranks) for step in timeline.steps(rank)):
        key = " ".join(f"{span.action.stage}{span.action.kind.name}" for span in step)
        if key not in found and len(found) < MAX_PHASED_STEPS:
            found[key] = [
                [one.kind.name, one.phase, one.is_exchange, one.start - step[0].start, one.end - step[0].start]
                for one in timeline.phase_spans(step) if one.end > one.start
            ]  # fmt: skip
    return found


def _tick_of(makespan: float) -> float:
    """The power of ten that keeps `makespan` below the largest tick, so that decimal times stay exact."""
    return float(f"1e{ceil(log10(makespan / TICKS))}") if makespan > 0 else 1.0


def _pack(columns: Iterable[bytes]) -> str:
    return base64.b64encode(zlib.compress(b"".join(columns), 6)).decode("ascii")
