"""Words and a small grid for a schedule that is stuck."""

from __future__ import annotations

import re
from bisect import bisect_right

from zeropipe.core.action import Action, Kind
from zeropipe.core.jit import Ints
from zeropipe.core.needs import Dependencies, key_name
from zeropipe.core.packed import PackedRows, decode, encode, is_joined, num_steps, unpack
from zeropipe.core.schedule import Schedule
from zeropipe.errors import DeadlockError, Stuck

SHOWN = 12  # stuck ranks named in a message
BEFORE, BEHIND = 3, 4  # steps shown around the trouble spot


def step_number(packed: PackedRows, at: int) -> tuple[int, int]:
    """(rank, step) of the code at index `at`; an Overlap is one step."""
    rank = bisect_right(packed.offsets, at) - 1
    return rank, num_steps(packed.view[packed.offsets[rank] : at])


def _cycle(schedule: Schedule, stuck: list[Stuck]) -> str:
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


def _grid(packed: PackedRows, stuck: list[Stuck]) -> list[str]:
    """The steps around each stuck rank's place, that place in brackets."""
    codes = packed.view
    cells = []
    for s in stuck:
        begin, end = packed.offsets[s.rank], packed.offsets[s.rank + 1]
        # an Overlap takes two codes, so twice the window always holds enough steps
        first = max(begin, begin + s.step - 2 * BEFORE)
        skipped = num_steps(codes[begin:first])
        while first > begin and is_joined(codes[first - 1]):
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
    columns = [c for c in zip(*(row + [""] * (width - len(row)) for row in cells), strict=True) if any(c)]
    cells = [list(row) for row in zip(*columns, strict=True)]
    width = len(columns)
    widths = [max(len(row[c]) for row in cells) for c in range(width)]
    return ["  " + "  ".join(cell.ljust(w) for cell, w in zip(row, widths, strict=True)).rstrip() for row in cells]


def deadlock(schedule: Schedule, deps: Dependencies, position: Ints, done: Ints) -> DeadlockError:
    """The error for a schedule in which nobody can go on."""
    stuck = []
    for rank, step, action, missing in _waiting(schedule, deps, position, done):
        needed = key_name(missing, schedule.num_microbatches)
        stuck.append(Stuck(rank, step, str(action), made_by(schedule, needed)))
    total = schedule.num_actions
    ran = sum(int(position[r]) - schedule.packed.offsets[r] for r in range(schedule.num_ranks))
    return deadlock_error(f"no rank can go on after {ran} of {total} actions", stuck, schedule, schedule.packed)


def _waiting(schedule: Schedule, deps: Dependencies, position: Ints, done: Ints) -> list[tuple[int, int, Action, int]]:
    """(rank, step, action, missing key) of every rank that has not reached its end."""
    waiting = []
    packed = schedule.packed
    for rank in range(schedule.num_ranks):
        at = int(position[rank])
        if at == packed.offsets[rank + 1]:
            continue
        for part in range(at, at + 1 + is_joined(int(deps.codes[at]))):
            missing = [int(k) for k in (deps.own[part], deps.remote[part]) if k >= 0 and not done[k]]
            if missing:
                waiting.append((rank, step_number(packed, at)[1], decode(int(deps.codes[part])), missing[0]))
                break
    return waiting


def made_by(schedule: Schedule, needed: Action) -> str:
    """`3I0`, or `3B0` where the schedule does that backward whole."""
    if needed.kind is Kind.F:
        return str(needed)
    rank = schedule.placement.rank_of(needed.stage, needed.microbatch)
    whole = needed._replace(kind=Kind.B)
    return str(whole if encode(*whole) in schedule.packed.row(rank) else needed)


def deadlock_error(head: str, stuck: list[Stuck], schedule: Schedule, packed: PackedRows) -> DeadlockError:
    text = [head]
    text += [f"  rank {s.rank} waits at step {s.step}: {s.action} needs {s.needs}" for s in stuck[:SHOWN]]
    if len(stuck) > SHOWN:
        text.append(f"  ... and {len(stuck) - SHOWN} more ranks")
    cycle = _cycle(schedule, stuck)
    if cycle:
        text.append(f"  cycle: {cycle}")
    text += _grid(packed, stuck[:SHOWN])
    return DeadlockError("\n".join(text), tuple(stuck))
