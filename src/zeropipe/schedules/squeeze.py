"""Shortens the two ends of a schedule that repeats a block ("squeezing" in the paper).

All ranks together hold one copy of the block per microbatch, so some of their slots are empty while the pipeline fills
and while it drains. There, passes move into earlier empty slots; the steady state between the two stays. A slot takes
one unit of time and holds one pass. A rank keeps no more activations than in the steady state, plus what the caller
adds: each F takes one, each W gives one back.
"""

from __future__ import annotations

from collections import deque
from itertools import accumulate

# the passes of a microbatch on a rank, in order; W_DOWN belongs to I_DOWN, W_UP to I_UP
F_DOWN, F_UP, I_DOWN, I_UP, W_DOWN, W_UP = range(6)
PERIOD = 6
FREE = -1  # no pass

Pass = tuple[int, int]  # kind, microbatch
Row = dict[int, Pass]  # slot -> pass, of one rank
Slots = dict[tuple[int, int, int], int]  # rank, kind, microbatch -> slot


def squeeze(rows: list[Row], extra: int = 0) -> list[Row]:
    """The squeezed rows, with W, of rows that have only F and I, in the slots of the repeated block.

    The fill is squeezed with every W in its slot of the block, since each W frees memory for an F. Then the W are
    removed for the drain, and put into the slots that are left.
    """
    rows = [with_w(row) for row in rows]
    limit = max(_WithW(row).most for row in rows) + extra
    _advance(rows, limit, fill=True)
    rows = [{slot: done for slot, done in row.items() if done[0] < W_DOWN} for row in _without_gaps(rows)]
    _advance(rows, limit, fill=False)
    return [with_w(row) for row in rows]


def with_w(row: Row) -> Row:
    """The row with every W in the first free slot after its I, oldest first."""
    full = dict(row)
    pending: deque[Pass] = deque()
    slot, end = 0, max(row)
    while slot <= end or pending:
        kind, microbatch = row.get(slot, (F_DOWN, 0))
        if kind >= I_DOWN:
            pending.append((kind + 2, microbatch))
        elif slot not in row and pending:
            full[slot] = pending.popleft()
        slot += 1
    return full


def _advance(rows: list[Row], limit: int, fill: bool) -> None:
    """Move passes to their earliest free slots: those of the drain and, with `fill`, those of the fill.

    The steady state between the two stays: it begins with the first rank's first I up and ends with its last F down.
    """
    slots = {(rank, *done): slot for rank, row in enumerate(rows) for slot, done in row.items()}
    levels: list[_Level] = [_WithW(row, limit) if fill else _WithoutW(row, limit) for row in rows]
    last = max(microbatch for _, microbatch in rows[0].values())
    moving, drains = fill, False
    for slot, rank, done in sorted((slot, rank, done) for rank, row in enumerate(rows) for slot, done in row.items()):
        if (rank, *done) == (0, I_UP, 0) and not drains:
            moving = False
        if moving:
            ready = _ready(slots, rank, done, len(rows))
            # without W in the row, an I may take the slot that a W would have before the next F
            matters = done[0] <= F_UP or (not fill and ready < slots[rank, F_UP, last])
            slots[rank, *done] = levels[rank].move(slot, ready, matters)
        if (rank, *done) == (0, F_DOWN, last):
            moving = drains = True


def _ready(slots: Slots, rank: int, done: Pass, num_ranks: int) -> int:
    """The first slot in which a pass has all its inputs."""
    kind, microbatch = done
    before = [slots[rank, kind, microbatch - 1]] if microbatch else []
    if kind in (F_DOWN, I_DOWN) and rank > 0:
        before.append(slots[rank - 1, kind, microbatch])
    if kind in (F_UP, I_UP) and rank + 1 < num_ranks:
        before.append(slots[rank + 1, kind, microbatch])
    if kind != F_DOWN:
        before.append(slots[rank, kind - 2 if kind >= W_DOWN else kind - 1, microbatch])
    return max(before, default=-1) + 1


def _without_gaps(rows: list[Row]) -> list[Row]:
    """The same orders, each pass as early as possible."""
    slots: Slots = {}
    free = [0] * len(rows)
    out: list[Row] = [{} for _ in rows]
    for _, rank, done in sorted((slot, rank, done) for rank, row in enumerate(rows) for slot, done in row.items()):
        at = max(free[rank], _ready(slots, rank, done, len(rows)))
        free[rank], slots[rank, *done], out[rank][at] = at + 1, at, done
    return out


class _Level:
    """The activations that a rank keeps, slot by slot, while passes of its row move."""

    def __init__(self, row: Row, limit: int = 0) -> None:
        self._row, self._limit = row, limit
        self._kinds = [row[slot][0] if slot in row else FREE for slot in range(max(row) + 1)]
        self._kept = [0] * len(self._kinds)  # after each slot

    def move(self, slot: int, ready: int, matters: bool) -> int:
        """Move a pass to the earliest free slot from `ready` on; if memory `matters`, to one within the limit."""
        kind, kinds = self._kinds[slot], self._kinds
        for earlier in range(ready, slot):
            if kinds[earlier] == FREE and self._put(kind, earlier, slot, matters):
                kinds[slot], kinds[earlier] = FREE, kind
                self._row[earlier] = self._row.pop(slot)
                return earlier
        return slot

    def _put(self, kind: int, start: int, left: int, matters: bool) -> bool:
        """Count a pass at `start` instead of slot `left`; False if memory `matters` and exceeds the limit."""
        raise NotImplementedError


class _WithW(_Level):
    """For a row with W: a move of F or W changes the levels between the two slots."""

    def __init__(self, row: Row, limit: int = 0) -> None:
        super().__init__(row, limit)
        self._kept = list(accumulate(map(_taken, self._kinds)))

    @property
    def most(self) -> int:
        return max(self._kept)

    def _put(self, kind: int, start: int, left: int, matters: bool) -> bool:
        taken, between = _taken(kind), self._kept[start:left]
        if matters and max(between) + taken > self._limit:
            return False
        if taken:
            self._kept[start:left] = [kept + taken for kept in between]
        return True


def _taken(kind: int) -> int:
    return -1 if kind >= W_DOWN else 1 if F_DOWN <= kind <= F_UP else 0


class _WithoutW(_Level):
    """For a row without W, which take its free slots: levels change from the new slot on, until they are as before."""

    def __init__(self, row: Row, limit: int = 0) -> None:
        super().__init__(row, limit)
        self._pending = [-1] * len(self._kinds)  # W after each slot
        self._over = 0  # slots in which an F goes above the limit
        self._put(self._kinds[0], 0, 0, matters=False)

    def _put(self, kind: int, start: int, left: int, matters: bool) -> bool:
        kept_at, pending_at, over = self._kept, self._pending, self._over
        kept, pending = (kept_at[start - 1], pending_at[start - 1]) if start else (0, 0)
        new: list[tuple[int, int]] = []
        for at in range(start, len(kept_at)):
            before = self._kinds[at]
            now = kind if at == start else FREE if at == left else before
            if F_DOWN <= before <= F_UP and kept_at[at] > self._limit:
                over -= 1
            if now >= I_DOWN:
                pending += 1
            elif now >= F_DOWN:
                kept += 1
                over += kept > self._limit
            elif pending:
                kept -= 1
                pending -= 1
            if at >= left and kept == kept_at[at] and pending == pending_at[at]:
                break
            new.append((kept, pending))
        if matters and over:
            return False
        self._over = over
        for at, (kept, pending) in enumerate(new, start):
            kept_at[at], pending_at[at] = kept, pending
        return True
