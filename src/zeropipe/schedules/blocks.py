"""Building blocks on a V: the passes of one microbatch down the ranks and back, repeated every six units of time.

A rank has six passes per microbatch, of one unit each, so a block whose passes fall on six different units modulo six
has no bubble in steady state. The distances between consecutive passes determine how long activations are kept.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import lru_cache
from typing import NamedTuple

from zeropipe.core.action import Kind
from zeropipe.core.placement import Problem
from zeropipe.schedules.lane import Lane, run
from zeropipe.schedules.squeeze import F_DOWN, F_UP, I_DOWN, I_UP, PERIOD, Row, squeeze

_KINDS = (Kind.F, Kind.F, Kind.I, Kind.I, Kind.W, Kind.W)
_DOWN_STAGE = (True, False, False, True, False, True)  # I goes down the ranks on the stages where F goes up


class Block(NamedTuple):
    """Units from one pass of a microbatch to the next one."""

    down: int  # to the next rank on the way down: F of the first stages, I of the last ones
    up: int  # to the next rank on the way up: F of the last stages, I of the first ones
    turn: int  # on the last rank, from F down to F up
    loss: int  # on the first rank, from F to I
    back: int  # on the last rank, from I down to I up


def write(lanes: list[Lane], p: Problem, block: Block, extra: int = 0) -> None:
    """All rows of a block that is repeated, and squeezed at both ends with `extra` units of memory."""
    # the ends do not depend on the length of the middle: squeeze a short schedule, then stretch it
    size = p.num_ranks + 8
    while True:
        short = min(size, p.num_microbatches)
        rows = _squeezed(block, p.num_ranks, short, extra)
        missing = max(0, p.num_microbatches - size)
        cut = _steady(rows) if missing else 0
        if cut is not None:
            break
        size *= 2
    for rank, (lane, row) in enumerate(zip(lanes, rows, strict=True)):
        stages = tuple(rank if down else p.num_stages - 1 - rank for down in _DOWN_STAGE)
        for slot, (way, microbatch) in sorted(row.items()):
            if missing and slot == cut:
                period = [row[at] for at in range(cut, cut + PERIOD)]
                lane.weave(*((0, run(stages[w], _KINDS[w], range(m, m + missing))) for w, m in period))
            lane.at(stages[way], _KINDS[way], microbatch + (missing if slot >= cut else 0))


@lru_cache(maxsize=4)  # called with the same arguments for all large numbers of microbatches
def _squeezed(block: Block, num_ranks: int, num_microbatches: int, extra: int) -> list[Row]:
    return squeeze([_row(block, rank, num_ranks, num_microbatches) for rank in range(num_ranks)], extra)


def _row(block: Block, rank: int, num_ranks: int, num_microbatches: int) -> Row:
    """One rank's passes without W, in the slots of the repeated block."""
    last = num_ranks - 1
    f_up_at_last = block.down * last + block.turn
    i_down_at_first = f_up_at_last + block.up * last + block.loss
    i_up_at_last = i_down_at_first + block.down * last + block.back
    first = {
        F_DOWN: block.down * rank,
        F_UP: f_up_at_last + block.up * (last - rank),
        I_DOWN: i_down_at_first + block.down * rank,
        I_UP: i_up_at_last + block.up * (last - rank),
    }
    return {at + PERIOD * m: (way, m) for way, at in first.items() for m in range(num_microbatches)}


def _steady(rows: list[Row]) -> int | None:
    """A slot from which all ranks go through two equal periods, if there is one."""
    end = max(map(max, rows)) - 2 * PERIOD
    return next((at for at in range(end) if all(all(_repeats(row, at)) for row in rows)), None)


def _repeats(row: Row, at: int) -> Iterator[bool]:
    for slot in range(at, at + PERIOD):
        now, then = row.get(slot), row.get(slot + PERIOD)
        yield now is not None and then is not None and then == (now[0], now[1] + 1)
