"""The error of a schedule that is stuck: its waiting ranks, their cycle, and the steps around them."""

from __future__ import annotations

import re

from zeropipe.core.action import Action, Kind
from zeropipe.core.jit import Ints
from zeropipe.core.needs import Dependencies, key_action
from zeropipe.core.packed import PackedRows, count_steps, is_joined, pack, unpack
from zeropipe.core.schedule import Schedule
from zeropipe.errors import DeadlockError, Stuck

MAX_SHOWN_RANKS = 12
STEPS_BEFORE, STEPS_AFTER = 3, 4  # shown around the step that waits


def build_deadlock_error(schedule: Schedule, deps: Dependencies, position: Ints, done: Ints) -> DeadlockError:
    """The error of a schedule whose ranks wait at `position`, when the results `done` exist."""
    stuck = []
    for rank, step, action, missing in _waiting_actions(schedule, deps, position, done):
        needed = key_action(missing, schedule)
        stuck.append(Stuck(rank, step, str(action), producer_text(schedule, needed)))
    total = schedule.num_actions
    ran = sum(int(position[r]) - schedule.packed.offsets[r] for r in range(schedule.num_ranks))
    return format_deadlock_error(f"no rank can go on after {ran} of {total} actions", stuck, schedule, schedule.packed)


def _waiting_actions(
    schedule: Schedule, deps: Dependencies, position: Ints, done: Ints
) -> list[tuple[int, int, Action, int]]:
    """(rank, step, action, missing key) of every rank that has not reached its end."""
    waiting = []
    packed = schedule.packed
    for rank in range(schedule.num_ranks):
        at = int(position[rank])
        if at == packed.offsets[rank + 1]:
            continue
        for half in range(at, at + 1 + is_joined(int(deps.codes[at]))):
            missing = [int(key) for key in (deps.own[half], deps.remote[half]) if key >= 0 and not done[key]]
            if missing:
                waiting.append((rank, packed.locate(at)[1], schedule.decode(int(deps.codes[half])), missing[0]))
                break
    return waiting


def producer_text(schedule: Schedule, needed: Action) -> str:
    """`3I0`, or `3B0` if that backward is a full one in the schedule."""
    if needed.kind is Kind.F:
        return str(needed)
    rank = schedule.placement.rank_of(needed.stage, needed.microbatch)
    full = needed._replace(kind=Kind.B)
    return str(full if pack([full], schedule.num_slices)[0] in schedule.packed.row(rank) else needed)


def format_deadlock_error(head: str, stuck: list[Stuck], schedule: Schedule, packed: PackedRows) -> DeadlockError:
    """The error with one line per waiting rank, their cycle, and a grid of the steps around them."""
    text = [head]
    text += [f"  rank {s.rank} waits at step {s.step}: {s.action} needs {s.needs}" for s in stuck[:MAX_SHOWN_RANKS]]
    if len(stuck) > MAX_SHOWN_RANKS:
        text.append(f"  ... and {len(stuck) - MAX_SHOWN_RANKS} more ranks")
    cycle = _format_cycle(schedule, stuck)
    if cycle:
        text.append(f"  cycle: {cycle}")
    text += _format_grid(packed, stuck[:MAX_SHOWN_RANKS], schedule.num_slices)
    return DeadlockError("\n".join(text), tuple(stuck))


def _format_cycle(schedule: Schedule, stuck: list[Stuck]) -> str:
    """`rank 0 (0B0) -> rank 1 (1F0) -> rank 0`: ranks that wait for each other; empty if they form no cycle."""
    by_rank = {s.rank: s for s in stuck}
    waits_for = {s.rank: rank for s in stuck if (rank := _producer_rank(schedule, s.needs)) in by_rank}
    for first in waits_for:
        path, rank = [], first
        while rank in waits_for and rank not in path:
            path.append(rank)
            rank = waits_for[rank]
        if rank in path:
            cycle = path[path.index(rank) :]
            return " -> ".join(f"rank {r} ({by_rank[r].action})" for r in cycle) + f" -> rank {cycle[0]}"
    return ""


def _producer_rank(schedule: Schedule, needed: str) -> int | None:
    match = re.search(r"(\d+)[A-Z_]+(\d+)", needed)
    return schedule.placement.rank_of(int(match[1]), int(match[2])) if match else None


def _format_grid(packed: PackedRows, stuck: list[Stuck], num_slices: int) -> list[str]:
    """A line per stuck rank with the steps around the one that waits, which is in brackets."""
    codes = packed.view
    cells = []
    for s in stuck:
        begin, end = packed.offsets[s.rank], packed.offsets[s.rank + 1]
        # an Overlap has two codes, so twice the window always has enough steps
        first = max(begin, begin + s.step - 2 * STEPS_BEFORE)
        skipped = count_steps(codes[begin:first])
        while first > begin and is_joined(codes[first - 1]):
            first -= 1
        last = min(end, begin + 2 * (s.step + STEPS_AFTER) + 2)
        row = [str(step) for step in unpack(codes[first:last], num_slices)]
        index = s.step - skipped
        window = row[max(0, index - STEPS_BEFORE) : index + STEPS_AFTER]
        mark = min(STEPS_BEFORE, index)
        window = [f"[{cell}]" if i == mark else cell for i, cell in enumerate(window)]
        cells.append([f"rank {s.rank}", "..." if s.step > STEPS_BEFORE else "", *[""] * (STEPS_BEFORE - mark), *window])
    if not cells:
        return []
    width = max(len(row) for row in cells)
    columns = [c for c in zip(*(row + [""] * (width - len(row)) for row in cells), strict=True) if any(c)]
    widths = [max(map(len, column)) for column in columns]
    rows = zip(*columns, strict=True)
    return ["  " + "  ".join(cell.ljust(w) for cell, w in zip(row, widths, strict=True)).rstrip() for row in rows]
