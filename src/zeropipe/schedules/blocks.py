"""Building blocks on a V: one microbatch's way down the ranks and back, repeated every six half-stage units.

A rank has six passes per microbatch, of one unit each, so a block whose passes fall on six different units modulo six
has no bubble in steady state. How far neighbouring passes lie apart decides how long activations live.
"""

from __future__ import annotations

from typing import NamedTuple

from zeropipe.core.action import Kind
from zeropipe.core.placement import Problem
from zeropipe.schedules.lane import Beat, Lane

PERIOD = 6


class Block(NamedTuple):
    """Units from one pass of a microbatch to the next one."""

    down: int  # to the next rank on the way down: F of the first stages, I of the last ones
    up: int  # to the next rank on the way up: F of the last stages, I of the first ones
    turn: int  # on the last rank, from F down to F up
    loss: int  # on the first rank, from F to I
    back: int  # on the last rank, from I down to I up


def write(lane: Lane, rank: int, p: Problem, block: Block) -> None:
    """One rank's row of a repeated block."""
    last = p.num_ranks - 1
    near, far = rank, p.num_stages - 1 - rank
    f_up_at_last = block.down * last + block.turn
    i_down_at_first = f_up_at_last + block.up * last + block.loss
    i_up_at_last = i_down_at_first + block.down * last + block.back
    passes = {
        (near, Kind.F): block.down * rank,
        (far, Kind.F): f_up_at_last + block.up * (last - rank),
        (far, Kind.I): i_down_at_first + block.down * rank,
        (near, Kind.I): i_up_at_last + block.up * (last - rank),
    }
    free = [unit for unit in range(PERIOD) if unit not in {at % PERIOD for at in passes.values()}]
    for stage in (far, near):
        # each W takes the first unit after its I that is free in every repetition
        begin = passes[stage, Kind.I] + 1
        wait, unit = min(((unit - begin) % PERIOD, unit) for unit in free)
        passes[stage, Kind.W] = begin + wait
        free.remove(unit)
    every = range(p.num_microbatches)
    lane.repeat((Beat(at, stage, kind, every) for (stage, kind), at in passes.items()), PERIOD)
