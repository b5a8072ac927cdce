"""The loops of the search, to be compiled by core/jit.py.

A microbatch goes through 2 num_stages passes, numbered along its way: pass x < num_stages is F of stage x, the others
are I of stage 2 num_stages - 1 - x. Each pass needs the one before it, and microbatches keep their order in every pass,
so a rank's row is written as pass numbers alone. W is in no row: it runs, oldest first, where its rank would wait or
where memory asks for it.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

from zeropipe.core.jit import Floats, Ints

if TYPE_CHECKING:
    from zeropipe.search.model import Model, Work

FAR = 1e300  # later than anything


def play(model: Model, work: Work, rows: Ints, share: Floats, out: Ints) -> float:
    """Run the rows; the makespan, or FAR where they cannot end or do not fit.

    `work.first` and `work.last` get every rank's first start and last end. `out` gets all actions where it has room
    for them: a pass number, or 2 num_stages + stage for a part of a W.
    """
    begin, home, lasts, lag = model.begin, model.home, model.lasts, model.lag
    holds, edge, blocks = model.holds, model.edge, model.blocks
    needs, weight, frees, limit, parts = model.needs, model.weight, model.frees, model.limit, model.parts
    arrived, queue, done, waits = work.arrived, work.queue, work.done, work.waits
    link_free, clock, level = work.link_free, work.clock, work.level
    place, head, tail, stack, pen = work.place, work.head, work.tail, work.stack, work.pen
    first, last = work.first, work.last
    num_microbatches = model.num_microbatches
    num_ranks = len(begin) - 1
    num_passes = len(home)
    num_stages = num_passes // 2
    writes = len(out) > 0
    for at in range(num_microbatches):
        arrived[at] = 0.0
    for at in range(num_microbatches, len(arrived)):
        arrived[at] = -1.0
    for at in range(len(link_free)):
        link_free[at] = 0.0
    for x in range(num_passes):
        done[x] = 0
        waits[x] = -1
    for rank in range(num_ranks):
        clock[rank] = 0.0
        level[rank] = 0.0
        place[rank] = begin[rank]
        head[rank] = begin[rank] // 2 * parts
        tail[rank] = head[rank]
        pen[rank] = begin[rank] + head[rank]
        first[rank] = -1.0
        last[rank] = 0.0
        stack[rank] = num_ranks - 1 - rank
    top = num_ranks
    left = len(rows)
    while top > 0:
        top -= 1
        rank = stack[top]
        at = place[rank]
        now = clock[rank]
        memory = level[rank]
        room = limit[rank]
        fills = share[rank]
        while at < begin[rank + 1]:
            x = rows[at]
            number = done[x]
            ready = arrived[x * num_microbatches + number]
            if ready < 0:
                waits[x] = rank
                break
            takes = needs[x]
            while head[rank] < tail[rank]:
                stage = queue[head[rank]]
                waits_long = ready > now + 1e-12 * now and now + fills * weight[stage] <= ready + 1e-9 * weight[stage]
                if not waits_long and (takes <= 0 or memory + takes <= room):
                    break
                now += weight[stage]
                memory -= frees[stage]
                head[rank] += 1
                if writes:
                    out[pen[rank]] = num_passes + stage
                    pen[rank] += 1
            if takes > 0 and memory + takes > room:
                return FAR
            if ready > now:
                now = ready
            if first[rank] < 0:
                first[rank] = now
            now += lasts[x]
            last[rank] = now
            memory += takes
            if writes:
                out[pen[rank]] = x
                pen[rank] += 1
            done[x] = number + 1
            if x >= num_stages:
                for _ in range(parts):
                    queue[tail[rank]] = num_passes - 1 - x
                    tail[rank] += 1
            if x + 1 < num_passes:
                leaves = now
                if edge[x] >= 0:
                    if link_free[edge[x]] > leaves:
                        leaves = link_free[edge[x]]
                    link_free[edge[x]] = leaves + holds[x]
                arrived[(x + 1) * num_microbatches + number] = leaves + lag[x]
                if blocks and lag[x] > 0:
                    now = leaves + lag[x]
                if waits[x + 1] >= 0:
                    stack[top] = waits[x + 1]
                    waits[x + 1] = -1
                    top += 1
            at += 1
            left -= 1
        if at == begin[rank + 1]:
            while head[rank] < tail[rank]:
                stage = queue[head[rank]]
                now += weight[stage]
                head[rank] += 1
                last[rank] = now
                if writes:
                    out[pen[rank]] = num_passes + stage
                    pen[rank] += 1
        place[rank] = at
        clock[rank] = now
        level[rank] = memory
    if left > 0:
        return FAR
    makespan = 0.0
    for rank in range(num_ranks):
        makespan = max(makespan, last[rank])
    return makespan


def dispatch(
    model: Model, work: Work, order: Ints, cap: Ints, look0: Floats, look: Floats, share: Floats, rows: Ints
) -> float:
    """Write rows: whenever a rank is free it takes the first pass in `order` that is there and allowed.

    An F is allowed while fewer than `cap[stage]` of its activations are alive and memory suffices. A pass is put off
    where one before it in `order` is known to arrive within `look` of its own time (`look0` until the rank's first I).
    W runs where `share` of it fits before the next arrival, or where memory is short. Returns the makespan, or FAR.
    """
    begin, home, lasts, lag = model.begin, model.home, model.lasts, model.lag
    holds, edge, blocks = model.holds, model.edge, model.blocks
    needs, weight, frees, limit, parts = model.needs, model.weight, model.frees, model.limit, model.parts
    arrived, queue, done, alive = work.arrived, work.queue, work.done, work.waits
    link_free, wake, level = work.link_free, work.clock, work.level
    place, head, tail, idle = work.place, work.head, work.tail, work.stack
    first, last = work.first, work.last
    num_microbatches = model.num_microbatches
    num_ranks = len(begin) - 1
    num_passes = len(home)
    num_stages = num_passes // 2
    for at in range(num_microbatches):
        arrived[at] = 0.0
    for at in range(num_microbatches, len(arrived)):
        arrived[at] = FAR
    for at in range(len(link_free)):
        link_free[at] = 0.0
    for x in range(num_passes):
        done[x] = 0
        alive[x] = 0
    for rank in range(num_ranks):
        wake[rank] = 0.0
        level[rank] = 0.0
        place[rank] = begin[rank]
        head[rank] = begin[rank] // 2 * parts
        tail[rank] = head[rank]
        first[rank] = -1.0
        last[rank] = 0.0
        idle[rank] = 1
    left = len(rows)
    while left > 0:
        rank = 0
        now = wake[0]
        for other in range(1, num_ranks):
            if wake[other] < now:
                now = wake[other]
                rank = other
        if now >= FAR:
            return FAR
        slot = begin[rank] // num_microbatches
        stop = begin[rank + 1] // num_microbatches
        begun = head[rank] > begin[rank] // 2 * parts or tail[rank] > begin[rank] // 2 * parts
        ahead = look[rank] if begun else look0[rank]
        chosen = -1
        soon = FAR  # the next arrival of a pass that would be taken
        full = False
        for at in range(slot, stop):
            x = order[at]
            if done[x] == num_microbatches:
                continue
            ready = arrived[x * num_microbatches + done[x]]
            if ready >= FAR:
                continue
            takes = needs[x]
            if x < num_stages:
                if alive[x] >= cap[x]:
                    continue
                for later in range(slot, stop):  # a later stage needs room to go on, or nothing would ever end
                    y = order[later]
                    if x < y < num_stages and alive[y] == 0 and done[y] < num_microbatches:
                        takes += needs[y]
            if takes > 0 and level[rank] + takes > limit[rank]:
                if ready <= now + 1e-12 * now:
                    full = True
                continue
            if ready > now + 1e-12 * now:
                soon = min(soon, ready)
            elif chosen < 0 and soon >= now + ahead * lasts[x]:
                chosen = x
        if chosen >= 0:
            x = chosen
            number = done[x]
            idle[rank] = 0
            if first[rank] < 0:
                first[rank] = now
            rows[place[rank]] = x
            place[rank] += 1
            left -= 1
            done[x] = number + 1
            level[rank] += needs[x]  # what an I frees is counted free from its start: the next action comes after it
            end = now + lasts[x]
            last[rank] = end
            if x < num_stages:
                alive[x] += 1
            else:
                alive[num_passes - 1 - x] -= 1
                for _ in range(parts):
                    queue[tail[rank]] = num_passes - 1 - x
                    tail[rank] += 1
            if x + 1 < num_passes:
                leaves = end
                if edge[x] >= 0:
                    if link_free[edge[x]] > leaves:
                        leaves = link_free[edge[x]]
                    link_free[edge[x]] = leaves + holds[x]
                arrival = leaves + lag[x]
                arrived[(x + 1) * num_microbatches + number] = arrival
                if blocks and lag[x] > 0:
                    end = arrival
                other = home[x + 1]
                if idle[other] and arrival < wake[other]:
                    wake[other] = arrival
            wake[rank] = end
        elif head[rank] < tail[rank] and (full or soon >= now + share[rank] * weight[queue[head[rank]]]):
            stage = queue[head[rank]]
            head[rank] += 1
            level[rank] -= frees[stage]
            idle[rank] = 0
            wake[rank] = now + weight[stage]
            last[rank] = wake[rank]
        else:
            idle[rank] = 1
            wake[rank] = soon
    makespan = 0.0
    for rank in range(num_ranks):
        while head[rank] < tail[rank]:
            last[rank] = max(last[rank], wake[rank] if wake[rank] < FAR else last[rank]) + weight[queue[head[rank]]]
            wake[rank] = last[rank]
            head[rank] += 1
        makespan = max(makespan, last[rank])
    return makespan


def draw(state: Ints, below: Any) -> Any:
    """The next random number from 0 to below - 1."""
    state[0] = state[0] * 6364136223846793005 + 1442695040888963407
    return ((state[0] >> 33) & 0x3FFFFFFF) % below


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


def shift(rows: Ints, low: int, high: int, x: int, from_m: int, to_m: int, distance: int) -> None:
    """Move pass x of microbatches from_m to to_m by `distance` places in a row."""
    number = 0
    if distance < 0:
        for at in range(low, high):
            if rows[at] == x:
                if from_m <= number < to_m:
                    move(rows, low, high, at, distance)
                number += 1
    else:
        for at in range(low, high):
            number += rows[at] == x
        for place in range(high - low):
            at = high - 1 - place
            if rows[at] == x:
                number -= 1
                if from_m <= number < to_m:
                    move(rows, low, high, at, distance)


def walk(
    model: Model, work: Work, spans: bool, near: float, heat: float, enough: float, steps: int, state: Ints, stop: Ints,
    rows: Ints, share: Floats, spare: tuple[Ints, Floats], best: tuple[Ints, Floats],
) -> float:  # fmt: skip
    """Change `rows` and `share` step by step, and keep what is better, or at first not much worse.

    `best` (rows, share) gets the best that was met, whose value is returned. Ends early at `enough` and by `stop`.
    """
    begin, mine, m = model.begin, model.mine, model.num_microbatches
    num_ranks = len(begin) - 1
    old_rows, old_share = spare
    best_rows, best_share = best
    nothing = rows[:0]
    play(model, work, rows, share, nothing)
    least, current = score(work, spans, near)
    best_rows[:] = rows
    best_share[:] = share
    for step in range(steps):
        if least <= enough or stop[0]:
            break
        chance = draw(state, 100)
        low = draw(state, num_ranks)
        high = low + 1
        if chance < 70:  # some ranks in a line
            high = min(num_ranks, high + draw(state, num_ranks) * draw(state, num_ranks) // num_ranks)
        for at in range(begin[low], begin[high]):
            old_rows[at] = rows[at]
        for rank in range(low, high):
            old_share[rank] = share[rank]
        if chance < 55:  # passes of some microbatches come earlier, or later
            from_m = draw(state, m)
            to_m = min(m, from_m + 1 + draw(state, m) * draw(state, m) // m)
            which = draw(state, 1024)
            one = draw(state, 2) == 1
            distance = (1 + draw(state, 6)) * (1 - 2 * draw(state, 2))
            for rank in range(low, high):
                first, count = begin[rank] // m, (begin[rank + 1] - begin[rank]) // m
                for slot in range(count):
                    if (one and slot == which % count) or (not one and which >> slot & 1):
                        shift(rows, begin[rank], begin[rank + 1], mine[first + slot], from_m, to_m, distance)
        elif chance < 70:
            wish = draw(state, 5) * 0.25
            for rank in range(low, high):
                share[rank] = wish
        else:
            at = begin[low] + draw(state, begin[high] - begin[low])
            move(rows, begin[low], begin[high], at, (1 + draw(state, 8)) * (1 - 2 * draw(state, 2)))
        kept = False
        if play(model, work, rows, share, nothing) < FAR:
            value, total = score(work, spans, near)
            warmth = heat * (1.0 - step / steps) + 1e-300
            if total <= current or draw(state, 1 << 20) < math.exp((current - total) / warmth) * (1 << 20):
                kept = True
                current = total
                if value < least - 1e-12 * least:
                    least = value
                    best_rows[:] = rows
                    best_share[:] = share
        if not kept:
            for at in range(begin[low], begin[high]):
                rows[at] = old_rows[at]
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
            low = draw(state, num_ranks)
            high = min(num_ranks, low + 1 + draw(state, num_ranks) * draw(state, num_ranks) // num_ranks)
            what = draw(state, 5)
            one, other = draw(state, 1024), draw(state, 1024)
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
            if total <= current or draw(state, 1 << 20) < math.exp((current - total) / warmth) * (1 << 20):
                kept = True
                current = total
                if value < least - 1e-12 * least:
                    least = value
                    best[0][:] = order
                    best[1][:] = cap
                    best[2][:] = look0
                    best[3][:] = look
                    best[4][:] = share
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
