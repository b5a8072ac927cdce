"""Words and a small grid for a schedule that is stuck."""

from __future__ import annotations

import re
from bisect import bisect_right

from zeropipe.core.action import unpack
from zeropipe.core.schedule import Lines, Schedule
from zeropipe.errors import Stuck

BEFORE, BEHIND = 3, 4  # steps shown around the trouble spot


def step_number(lines: Lines, at: int) -> tuple[int, int]:
    """(rank, step) of the code at index `at`; an Overlap is one step."""
    rank = bisect_right(lines.offsets, at) - 1
    codes = memoryview(lines.codes).cast("q")[lines.offsets[rank] : at]
    return rank, sum(1 for code in codes if not code & 1)


def cycle_text(schedule: Schedule, stuck: list[Stuck]) -> str:
    """`rank 0 (0B0) -> rank 1 (1F0) -> rank 0`: who waits for whom, if that closes a circle."""
    at = {s.rank: s for s in stuck}
    waits = {s.rank: home for s in stuck if (home := _rank_of(schedule, s.needs)) in at}
    for first in waits:
        path, rank = [], first
        while rank in waits and rank not in path:
            path.append(rank)
            rank = waits[rank]
        if rank in path:
            circle = path[path.index(rank) :]
            return " -> ".join(f"rank {r} ({at[r].action})" for r in circle) + f" -> rank {circle[0]}"
    return ""


def _rank_of(schedule: Schedule, needed: str) -> int | None:
    match = re.search(r"(\d+)[A-Z_]+(\d+)", needed)
    return schedule.placement.rank_of(int(match[1]), int(match[2])) if match else None


def grid_text(lines: Lines, stuck: list[Stuck]) -> list[str]:
    """The steps around each stuck rank's place, that place in brackets."""
    codes = memoryview(lines.codes).cast("q")
    cells = []
    for s in stuck:
        begin, end = lines.offsets[s.rank], lines.offsets[s.rank + 1]
        # an Overlap takes two codes, so twice the window always holds enough steps
        first = max(begin, begin + s.step - 2 * BEFORE)
        skipped = sum(1 for code in codes[begin:first] if not code & 1)
        while first > begin and codes[first - 1] & 1:
            first -= 1
        row = [str(step) for step in unpack(codes[first : min(end, begin + 2 * (s.step + BEHIND) + 2)])]
        place = s.step - skipped
        window = row[max(0, place - BEFORE) : place + BEHIND]
        mark = min(BEFORE, place)
        window = [f"[{cell}]" if i == mark else cell for i, cell in enumerate(window)]
        cells.append([f"rank {s.rank}", "..." if s.step > BEFORE else "", *[""] * (BEFORE - mark), *window])
    if not cells:
        return []
    width = max(len(row) for row in cells)
    cells = [row + [""] * (width - len(row)) for row in cells]
    widths = [max(len(row[c]) for row in cells) for c in range(width)]
    return ["  " + "  ".join(cell.ljust(w) for cell, w in zip(row, widths, strict=True)).rstrip() for row in cells]
