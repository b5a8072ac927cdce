"""A small timeline of each schedule for its card, simulated at a size that shows its shape."""

from __future__ import annotations

from collections import defaultdict
from functools import lru_cache
from typing import Any

from zeropipe.app.comparison import build_cached
from zeropipe.core.timeline import Timeline
from zeropipe.errors import ConfigError, ScheduleError
from zeropipe.schedules.registry import Entry
from zeropipe.sim.costs import Costs
from zeropipe.sim.simulate import simulate
from zeropipe.viz.boxes import boxes
from zeropipe.viz.columns import LOWER, UPPER

SIZES = ((4, 8), (4, 4), (2, 4), (1, 1))  # ranks, microbatches: the first that the schedule can have
ROW_HEIGHT, ROW_GAP = 8, 2
BOX_GAP = 0.08  # in units of time


@lru_cache(maxsize=256)
def thumbnail(entry: Entry) -> dict[str, Any] | None:
    """SVG paths by kind and shade, or None for a schedule that runs at none of the sizes."""
    for ranks, microbatches in SIZES:
        try:
            schedule = build_cached(entry, ranks, microbatches, entry.stages_per_rank[0], ())
            return _paths(simulate(schedule, Costs().regroup(schedule.problem)))
        except (ConfigError, ScheduleError):
            continue
    return None


def _paths(timeline: Timeline) -> dict[str, Any]:
    box = boxes(timeline)
    paths: defaultdict[str, list[str]] = defaultdict(list)
    for rank in range(box.num_ranks):
        for n in range(box.offsets[rank], box.offsets[rank + 1]):
            half = box.half[n]
            top = rank * (ROW_HEIGHT + ROW_GAP) + (ROW_HEIGHT / 2 if half == LOWER else 0)
            height = ROW_HEIGHT / 2 if half in (UPPER, LOWER) else ROW_HEIGHT
            width = box.end[n] - box.start[n] - BOX_GAP
            key = "FBIW"[box.kind[n]] + str(box.shade[n])
            paths[key].append(f"M{box.start[n]:g} {top:g}h{width:g}v{height:g}h-{width:g}z")
    return {
        "width": box.makespan,
        "height": box.num_ranks * (ROW_HEIGHT + ROW_GAP) - ROW_GAP,
        "paths": {key: "".join(parts) for key, parts in sorted(paths.items())},
    }
