"""Kernels, to be compiled by core/jit.py: what every rank does again and again, microbatch after microbatch.

Every `period` of time a microbatch sets out, and all of them are treated alike. So a rank runs each of its passes and W
once in a period: they stand on a ring, in the order in which they repeat. Where on the ring an action begins tells when
it can run, up to whole periods; a microbatch takes the first such time after the action that it needs. How long it is
under way, and so how many are alive on each rank, follows.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from zeropipe.core.jit import Floats, Ints
from zeropipe.searching.kernels import FAR
from zeropipe.searching.walks import LOT, draw

if TYPE_CHECKING:
    from zeropipe.searching.starts.patterns import Cycle

NEAR = 1e-9  # of a period: so near is equal
TURNS, MOVES = 5, 8  # of 10 steps: up to TURNS rings are turned, up to MOVES an action is moved, and else two swapped
OVER, USED = 3.0, 0.05  # how much the mean memory counts beside the peak: what of it is above the limit, and all of it


def run(cycle: Cycle, ring: Ints, turn: Floats, spot: Floats, at: Floats) -> None:
    """When each action of the first microbatch begins, into `at`."""
    begin, lasts, lag, before, period = cycle.begin, cycle.lasts, cycle.lag, cycle.before, cycle.period
    for rank in range(len(turn)):
        now = turn[rank]
        for place in range(begin[rank], begin[rank + 1]):
            spot[ring[place]] = now
            now += lasts[ring[place]]
    at[0] = spot[0]
    for x in range(1, len(at)):
        ready = at[before[x]] + lasts[before[x]] + lag[x]
        late = (spot[x] - ready) % period
        at[x] = ready if late > period * (1 - NEAR) else ready + late


def memory(cycle: Cycle, at: Floats) -> tuple[float, float]:
    """What is to be made small; and by how much ranks are over their limits, all together."""
    first, stages, lasts, period = cycle.first, cycle.stages, cycle.lasts, cycle.period
    num_stages = len(stages)
    total, above = 0.0, 0.0
    for rank in range(len(first) - 1):
        limit, over, mean = cycle.limit[rank], 0.0, 0.0
        for one in range(first[rank], first[rank + 1]):
            now = at[stages[one]] + 10 * NEAR * period
            level = 0.0
            for other in range(first[rank], first[rank + 1]):
                f = stages[other]
                i, w = 2 * num_stages - 1 - f, 2 * num_stages + f
                run_i, run_w = at[i] + lasts[i], at[w] + lasts[w]
                # of the microbatches that have begun the F so many are through their I, and their W
                begun = math.floor((now - at[f]) / period)
                through, gone = math.floor((now - run_i) / period), math.floor((now - run_w) / period)
                level += cycle.size[f] * (begun - through) + cycle.keeps[f] * (through - gone)
                if one == first[rank]:
                    mean += (cycle.size[f] * (run_i - at[f]) + cycle.keeps[f] * (run_w - run_i)) / period
            over += max(0.0, level - limit)
        above += over
        total += over / limit + OVER * max(0.0, mean / limit - 1) + USED * mean / limit
    return total, above


def carry(ring: Ints, low: int, high: int, at: int, to: int) -> None:
    """Move what is at `at` on to `to`, over the end of the ring if need be; what it passes moves back by one."""
    x = ring[at]
    while at != to:
        after = at + 1 if at + 1 < high else low
        ring[at] = ring[after]
        at = after
    ring[to] = x


def carry_back(ring: Ints, low: int, high: int, at: int, to: int) -> None:
    """Undo `carry` from `to` to `at`."""
    x = ring[at]
    while at != to:
        after = at - 1 if at > low else high - 1
        ring[at] = ring[after]
        at = after
    ring[to] = x


def anneal(
    cycle: Cycle, steps: int, heat: float, state: Ints, ring: Ints, turn: Floats, spot: Floats, at: Floats,
    kept: Floats, old: Floats, found: Floats,
) -> bool:  # fmt: skip
    """Change the rings so that memory suffices, and then so that less of it is used; whether it does.

    `found` gets the times of the first rings that fit, and of those that use least.
    """
    begin, lasts, lag, before, period = cycle.begin, cycle.lasts, cycle.lag, cycle.before, cycle.period
    num_ranks, num_actions = len(turn), len(at)
    num_passes = num_actions // 3 * 2
    run(cycle, ring, turn, spot, at)
    current, above = memory(cycle, at)
    least = FAR
    for x in range(num_actions):
        kept[x] = at[x]
    for step in range(steps):
        if above <= 0 and current < least:
            for x in range(num_actions):
                found[1, x] = kept[x]
                if least == FAR:
                    found[0, x] = kept[x]
            least = current
        low = draw(state) % num_ranks
        what, one, other = draw(state) % 10, draw(state), draw(state)
        high = low + 1
        if what < TURNS and one & 1:
            high = min(num_ranks, high + (draw(state) % num_ranks) * (draw(state) % num_ranks) // num_ranks)
        size = begin[low + 1] - begin[low]
        here = begin[low] + (one >> 1) % size
        far = 1 + (other >> 1) % (size - 1 if other & 1 else min(3, size - 1))
        there = begin[low] + (here - begin[low] + far) % size
        if what < TURNS:  # so that an action begins as soon as it can, or ends when the next one needs it
            x = ring[here]
            if 0 < x < num_actions and (other & 1 or x + 1 >= num_passes):
                by = kept[before[x]] + lasts[before[x]] + lag[x] - kept[x]
            elif x + 1 < num_passes:
                by = kept[x + 1] - lag[x + 1] - lasts[x] - kept[x]
            else:
                continue
            for rank in range(low, high):
                old[rank] = turn[rank]
                turn[rank] = (turn[rank] + by) % period
        elif what < MOVES:
            carry(ring, begin[low], begin[high], here, there)
        else:
            ring[here], ring[there] = ring[there], ring[here]
        run(cycle, ring, turn, spot, at)
        value, over = memory(cycle, at)
        if value <= current or draw(state) < math.exp((current - value) / (heat * (1.0 - step / steps))) * LOT:
            current, above = value, over
            for x in range(num_actions):
                kept[x] = at[x]
        elif what < TURNS:
            for rank in range(low, high):
                turn[rank] = old[rank]
        elif what < MOVES:
            carry_back(ring, begin[low], begin[high], there, here)
        else:
            ring[here], ring[there] = ring[there], ring[here]
    return least < FAR
