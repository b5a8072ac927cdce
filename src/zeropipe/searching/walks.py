"""Walks of the local search, to be compiled by core/jit.py: rows, or rules that write them, changed step by step."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

from zeropipe.core.jit import Floats, Ints
from zeropipe.searching.kernels import FAR, dispatch, play

if TYPE_CHECKING:
    from zeropipe.searching.model import Model, Work

LOT = 1 << 20  # random numbers are below this
# of 100 steps: up to DECISIVE a pass that decides when all ends is moved, up to STREAMS passes of some microbatches on
# some ranks, up to FILLS the share is changed, and else any one pass is moved
DECISIVE, STREAMS, FILLS = 30, 65, 75
EVERY = 8  # passes of every so many-th microbatch, at most, are moved together: what repeats can be changed as a whole


def draw(state: Ints) -> Any:
    """The next random number from 0 to LOT - 1."""
    state[0] = state[0] * 6364136223846793005 + 1442695040888963407
    return (state[0] >> 33) & 0xFFFFF


def score(work: Work, spans: bool, near: float) -> tuple[float, float]:
    """What is minimised; and the same with a little for every rank that ends less than `near` before the last one."""
    value = 0.0
    for rank in range(len(work.last)):
        value = max(value, work.last[rank] - (work.first[rank] if spans else 0.0))
    extra = 0.0
    for rank in range(len(work.last)):
        extra += max(0.0, work.last[rank] - (work.first[rank] if spans else 0.0) - value + near)
    return value, value + 0.05 * extra / len(work.last)


def move(rows: Ints, low: int, high: int, at: int, distance: int) -> None:
    """Move the pass at `at` by `distance` places, not beyond its row's ends `low` and `high`."""
    x = rows[at]
    to = min(max(at + distance, low), high - 1)
    while at < to:
        rows[at] = rows[at + 1]
        at += 1
    while at > to:
        rows[at] = rows[at - 1]
        at -= 1
    rows[at] = x


def shift(rows: Ints, low: int, high: int, x: int, from_m: int, to_m: int, every: int, distance: int) -> None:
    """Move pass x of microbatches from from_m to to_m, or of every so many-th of them, by `distance` places."""
    later = distance > 0
    number = -1
    if later:  # from the end, so that nothing is met twice
        for at in range(low, high):
            number += rows[at] == x
    else:
        number = 0
    for place in range(high - low):
        at = high - 1 - place if later else low + place
        if rows[at] == x:
            if from_m <= number < to_m and (number - from_m) % every == 0:
                move(rows, low, high, at, distance)
            number += -1 if later else 1


def decide(model: Model, work: Work, rows: Ints, spans: bool) -> int:
    """Where in the rows the passes stand that decide when all ends, from the last one back; how many there are.

    Each of them began when the one behind it in the list had ended.
    """
    begin, m, path = model.begin, model.num_microbatches, work.path
    rank = 0
    for other in range(1, len(work.last)):
        if work.last[other] - work.first[other] * spans > work.last[rank] - work.first[rank] * spans:
            rank = other
    at = begin[rank + 1] - 1
    count = 0
    while count < len(path):
        path[count] = at
        count += 1
        x = rows[at]
        if work.waited[at]:
            if x == 0:
                break
            at = work.spot[(x - 1) * m + work.number_at[at]]
        elif at == begin[model.home[x]]:
            break
        else:
            at -= 1
    return count


def walk(
    model: Model, work: Work, spans: bool, near: float, heat: float, enough: float, steps: int, state: Ints, stop: Ints,
    rows: Ints, share: Floats, spare: tuple[Ints, Floats], best: tuple[Ints, Floats],
) -> float:  # fmt: skip
    """Change `rows` and `share` step by step, and keep what is better, or at first not much worse.

    `best` (rows, share) gets the best that was met, whose value is returned. Ends early at `enough` and by `stop`.
    """
    begin, mine, home, m = model.begin, model.mine, model.home, model.num_microbatches
    path = work.path
    count = 0
    num_ranks = len(begin) - 1
    old_rows, old_share = spare
    best_rows, best_share = best
    nothing = rows[:0]
    current, least = FAR, FAR
    for step in range(steps + 1):
        if least <= enough or stop[0]:
            break
        chance = draw(state) % 100
        at = -1
        if chance < DECISIVE and count > 0:
            at = path[draw(state) % count]
            low = home[rows[at]]
            high = low + 1
        else:
            low = draw(state) % num_ranks
            # some ranks in a line, or one
            more = (draw(state) % num_ranks) * (draw(state) % num_ranks) // num_ranks if chance < FILLS else 0
            high = min(num_ranks, low + 1 + more)
        for place in range(begin[low], begin[high]):
            old_rows[place] = rows[place]
        for rank in range(low, high):
            old_share[rank] = share[rank]
        one, other, far = draw(state), draw(state), draw(state)
        sign = 1 if one & 1 else -1
        if step == 0:
            pass  # as it is
        elif at >= 0:  # a pass that decides comes earlier, or the one before it comes later
            if one & 1 or at == begin[low]:
                move(rows, begin[low], begin[high], at, -1 - far % 4)
            else:
                move(rows, begin[low], begin[high], at - 1, 1 + far % 4)
        elif chance < STREAMS:  # passes of some microbatches come earlier, or later
            from_m = other % m
            every = 1 + (far >> 4) % EVERY if one & 4 else 1
            to_m = m if every > 1 else min(m, from_m + 1 + (other >> 3) % m * (far % m) // m)
            which = one >> 3
            for rank in range(low, high):
                first, passes = begin[rank] // m, (begin[rank + 1] - begin[rank]) // m
                for slot in range(passes):
                    if (slot == which % passes) if one & 2 else (which >> slot & 1):
                        x, distance = mine[first + slot], sign * (1 + far % 6)
                        shift(rows, begin[rank], begin[rank + 1], x, from_m, to_m, every, distance)
        elif chance < FILLS:
            for rank in range(low, high):
                share[rank] = one % 5 * 0.25
        else:
            move(rows, begin[low], begin[high], begin[low] + other % (begin[high] - begin[low]), sign * (1 + far % 8))
        kept = False
        if play(model, work, rows, share, nothing) < FAR:
            value, total = score(work, spans, near)
            warmth = heat * (1.0 - step / (steps + 1)) + 1e-300
            if total <= current or draw(state) < math.exp((current - total) / warmth) * LOT:
                kept = True
                current = total
                count = decide(model, work, rows, spans)
                if value < least - 1e-12 * least:
                    least = value
                    for place in range(len(rows)):
                        best_rows[place] = rows[place]
                    for rank in range(len(share)):
                        best_share[rank] = share[rank]
        if not kept:
            for place in range(begin[low], begin[high]):
                rows[place] = old_rows[place]
            for rank in range(low, high):
                share[rank] = old_share[rank]
    return least


def tune(
    model: Model, work: Work, spans: bool, near: float, heat: float, enough: float, steps: int, state: Ints, stop: Ints,
    most: Ints, rule: tuple[Ints, Ints, Floats, Floats, Floats], spare: tuple[Ints, Ints, Floats, Floats, Floats],
    best: tuple[Ints, Ints, Floats, Floats, Floats], rows: Ints,
) -> float:  # fmt: skip
    """As `walk`, over the rules of `dispatch`: orders, caps (1 to `most`), looks and shares of some ranks in a line.

    A `rule` that leads nowhere is changed until it leads somewhere.
    """
    begin, m = model.begin, model.num_microbatches
    num_ranks = len(begin) - 1
    order, cap, look0, look, share = rule
    current, least = FAR, FAR
    for step in range(steps + 1):
        if least <= enough or stop[0]:
            break
        for at in range(len(order)):
            spare[0][at] = order[at]
        for at in range(len(cap)):
            spare[1][at] = cap[at]
        for rank in range(num_ranks):
            spare[2][rank] = look0[rank]
            spare[3][rank] = look[rank]
            spare[4][rank] = share[rank]
        if step > 0:
            low = draw(state) % num_ranks
            high = min(num_ranks, low + 1 + (draw(state) % num_ranks) * (draw(state) % num_ranks) // num_ranks)
            what = draw(state) % 5
            one, other = draw(state) % 1024, draw(state) % 1024
            for rank in range(low, high):
                first, count = begin[rank] // m, (begin[rank + 1] - begin[rank]) // m
                if what == 0:  # two passes change places
                    a, b = first + one % count, first + other % count
                    order[a], order[b] = order[b], order[a]
                elif what == 1:
                    x = model.mine[first + one % (count // 2)]
                    cap[x] = min(max(cap[x] + (1 if other & 1 else -1), 1), most[x])
                elif what == 2:
                    look0[rank] = -0.5 + 0.25 * (one % 7)
                elif what == 3:
                    look[rank] = 0.25 * (one % 5)
                else:
                    share[rank] = 0.25 * (one % 5)
        kept = False
        if dispatch(model, work, order, cap, look0, look, share, rows) < FAR:
            value, total = score(work, spans, near)
            warmth = heat * (1.0 - step / (steps + 1)) + 1e-300
            if total <= current or draw(state) < math.exp((current - total) / warmth) * LOT:
                kept = True
                current = total
                if value < least - 1e-12 * least:
                    least = value
                    for at in range(len(order)):
                        best[0][at] = order[at]
                    for at in range(len(cap)):
                        best[1][at] = cap[at]
                    for rank in range(num_ranks):
                        best[2][rank] = look0[rank]
                        best[3][rank] = look[rank]
                        best[4][rank] = share[rank]
        if not kept and current < FAR:
            for at in range(len(order)):
                order[at] = spare[0][at]
            for at in range(len(cap)):
                cap[at] = spare[1][at]
            for rank in range(num_ranks):
                look0[rank] = spare[2][rank]
                look[rank] = spare[3][rank]
                share[rank] = spare[4][rank]
    return least
