"""The loops of the search, to be compiled by core/jit.py.

A microbatch goes through 2 num_stages passes, numbered along its way: pass x < num_stages is F of stage x, the others
are I of stage 2 num_stages - 1 - x. Each pass needs the one before it, and microbatches keep their order in every pass,
so a rank's row is written as pass numbers alone. W is in no row: it runs, oldest first, where its rank would wait or
where memory asks for it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from zeropipe.core.jit import Floats, Ints, entry_point

if TYPE_CHECKING:
    from zeropipe.searching.model import Model, Work

FAR = 1e300  # later than anything


@entry_point
def play(model: Model, work: Work, rows: Ints, share: Floats, out: Ints) -> float:
    """Run the rows; the makespan, or FAR where they cannot end or do not fit.

    `work.first` and `work.last` get every rank's first start and last end. `out` gets all actions where it has room
    for them: a pass number, or 2 num_stages + stage for a part of a W.
    """
    begin, home, lasts, lag = model.begin, model.home, model.lasts, model.lag
    holds, edge, blocks, blocks_ends = model.holds, model.edge, model.blocks, model.blocks_ends
    needs, weight, frees, limit, parts = model.needs, model.weight, model.frees, model.limit, model.parts
    steady = work.steady
    arrived, queue, done, waits = work.arrived, work.queue, work.done, work.waits
    link_free, clock, level = work.link_free, work.clock, work.level
    place, head, tail, stack, pen = work.place, work.head, work.tail, work.stack, work.pen
    first, last = work.first, work.last
    spot, number_at, waited = work.spot, work.number_at, work.waited
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
        if blocks_ends:  # as core/needs.py has it: from the last F before the first I to the first I after the last F
            steady[2 * rank] = begin[rank + 1]
            steady[2 * rank + 1] = begin[rank] - 1
            forward = begin[rank]
            behind = False
            for at in range(begin[rank], begin[rank + 1]):
                if rows[at] < num_stages:
                    forward = at
                    behind = False
                elif not behind:
                    behind = True
                    steady[2 * rank] = min(steady[2 * rank], forward)
                    steady[2 * rank + 1] = at
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
            spot[x * num_microbatches + number] = at
            number_at[at] = number
            waited[at] = 0
            if ready > now:
                now = ready
                waited[at] = 1
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
                ends = blocks_ends and (at < steady[2 * rank] or at > steady[2 * rank + 1])
                if (blocks or ends) and lag[x] > 0:
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


@entry_point
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
