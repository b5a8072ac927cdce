"""The data that the viewer draws: timelines as plain data (for JSON), with their columns as one compressed string.

Columns are small integers that repeat, which deflate compresses well: times in ticks, as the gap to the previous box
and the duration; microbatches and dependencies as differences. `viewer/data.js` decodes them.
"""

from __future__ import annotations

import base64
import zlib
from collections.abc import Sequence
from math import ceil, log10
from typing import Any

import numpy as np
from numpy.typing import NDArray

from zeropipe.core import explain
from zeropipe.core.action import Kind
from zeropipe.core.packed import kind_of, stage_of
from zeropipe.core.ranking import rank_timelines
from zeropipe.core.timeline import Timeline
from zeropipe.viz.boxes import boxes, shade_table
from zeropipe.viz.colors import SHARDING, palette
from zeropipe.viz.drawable import drawable
from zeropipe.viz.lanes import lane
from zeropipe.viz.words import one_line

TICKS = 2**31 - 1  # times are whole ticks below this
MAX_PHASED_STEPS = 512  # different steps whose phases are shown


def payload(timelines: Timeline | Sequence[Timeline]) -> dict[str, Any]:
    """The data `mountViewer(element, data)` takes: plain dicts, lists, numbers and text."""
    listed = [drawable(t) for t in ([timelines] if isinstance(timelines, Timeline) else timelines)]
    shades = max((int(shade_table(t.schedule.placement).max(initial=0)) + 1 for t in listed), default=1)
    return {
        "version": 1,
        "causes": list(explain.CAUSES),
        "palette": {theme: palette(theme, shades) for theme in ("light", "dark")},
        "sharding": SHARDING,
        "timelines": [
            {**_timeline(t), "standing": {"fits": s.fits, "best": s.best_time, "ofBest": s.of_best}}
            for t, s in zip(listed, rank_timelines(listed).standings, strict=True)
        ],
    }


def _timeline(timeline: Timeline) -> dict[str, Any]:
    schedule = timeline.schedule
    tick = _tick_of(timeline.makespan)
    columns = _columns(timeline, tick)
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
        "secondFrom": schedule.placement.second_from,
        "shades": shade_table(schedule.placement).tolist(),
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
        **({"phases": _phases(timeline)} if timeline.phases else {}),
        "laneOffsets": list(timeline.sharding.packed.offsets) if timeline.sharding else None,
        "columns": {name: column.dtype.str[1:] for name, column in columns.items()},
        "lengths": [len(column) for column in columns.values()],
        "data": _pack(columns.values()),
    }


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


def _columns(timeline: Timeline, tick: float) -> dict[str, NDArray[Any]]:
    box, why = boxes(timeline), explain.find_reasons(timeline)
    start = np.rint(box.start / tick).astype(np.int64)
    end = np.rint(box.end / tick).astype(np.int64)
    here = np.arange(len(start))
    columns = {
        "gap": _steps(start, end).astype("<i4"),
        "duration": (end - start).astype("<i4"),
        "microbatch": _steps(box.microbatch, box.microbatch).astype("<i4"),
        "remote": _back(here, why.remote).astype("<i4"),
        "own": _back(here, why.own).astype("<i4"),
        "waited": _back(here, why.waited).astype("<i4"),
        "path": np.array(explain.critical_indices(timeline), "<i4"),
    }
    if timeline.sharding:
        moves = [move for rank in range(timeline.num_ranks) for move in lane(timeline, rank)]
        times = np.array([(move.start, move.end) for move in moves], np.float64).reshape(-1, 2) / tick
        columns["laneStart"], columns["laneEnd"] = np.rint(times).astype("<i4").T.copy()
    if timeline.memory:
        columns["during"], columns["after"] = (_small_floats(column) for column in timeline.memory)
    columns["stage"] = box.stage.astype("<u2")
    if timeline.sharding:
        codes = np.frombuffer(timeline.sharding.packed.codes, np.int64)
        columns["laneStage"] = stage_of(codes).astype("<u2")
        columns["laneReduces"] = (kind_of(codes) == Kind.REDUCE_GRAD).astype("|u1")
    columns["head"] = (box.kind | box.half << 4).astype("|u1")
    return columns


def _small_floats(column: bytes) -> NDArray[np.float32]:
    """Four bytes each: precise enough for a curve; larger values become the largest float32."""
    most = float(np.finfo(np.float32).max)
    return np.clip(np.frombuffer(column, np.float64), -most, most).astype("<f4")


def _steps(values: NDArray[np.int64], before: NDArray[np.int64]) -> NDArray[np.int64]:
    """Each value minus the entry of `before` of the previous box."""
    out = values.copy()
    out[1:] -= before[:-1]
    return out


def _back(here: NDArray[np.int64], places: Any) -> NDArray[np.int64]:
    """Indices as distances; 0 for none, since no box depends on itself."""
    where = np.asarray(places, np.int64)
    return np.where(where < 0, 0, here - where)


def _pack(columns: Any) -> str:
    return base64.b64encode(zlib.compress(b"".join(c.tobytes() for c in columns), 6)).decode("ascii")
