"""A tiny timeline of each schedule for its card: drawn from the schedule itself, at a size that shows its shape."""

from __future__ import annotations

from collections import defaultdict
from functools import lru_cache
from typing import Any

from zeropipe.app.work import built
from zeropipe.core.timeline import Timeline
from zeropipe.errors import ConfigError, ScheduleError
from zeropipe.schedules.registry import Entry
from zeropipe.sim.costs import Costs
from zeropipe.sim.simulate import simulate
from zeropipe.viz.boxes import LOWER, UPPER, boxes

SIZES = ((4, 8), (4, 4), (2, 4), (1, 1))  # ranks, microbatches: the first that the schedule takes
ROW, GAP = 8, 2  # a rank's height, and the space below it


@lru_cache(maxsize=256)
def picture(entry: Entry) -> dict[str, Any] | None:
    """SVG paths by kind and shade, or None for a schedule that runs at none of the sizes."""
    for ranks, microbatches in SIZES:
        try:
            schedule = built(entry, ranks, microbatches, entry.stages_per_rank[0], ())
            return _paths(simulate(schedule, Costs().regrouped(schedule.problem)))
        except (ConfigError, ScheduleError):
            continue
    return None


def _paths(timeline: Timeline) -> dict[str, Any]:
    box = boxes(timeline)
    paths: defaultdict[str, list[str]] = defaultdict(list)
    for rank in range(box.num_ranks):
        for at in range(box.offsets[rank], box.offsets[rank + 1]):
            half = box.half[at]
            top = rank * (ROW + GAP) + (ROW / 2 if half == LOWER else 0)
            tall = ROW / 2 if half in (UPPER, LOWER) else ROW
            wide = box.end[at] - box.start[at] - 0.08
            key = "FBIW"[box.kind[at]] + str(box.shade[at])
            paths[key].append(f"M{box.start[at]:g} {top:g}h{wide:g}v{tall:g}h-{wide:g}z")
    return {
        "width": box.makespan,
        "height": box.num_ranks * (ROW + GAP) - GAP,
        "paths": {key: "".join(parts) for key, parts in sorted(paths.items())},
    }
