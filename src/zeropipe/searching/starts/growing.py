"""Kernels, to be compiled by core/jit.py: many schedules grow side by side, pass by pass, and the best ones are kept.

A schedule that has grown so far says how often each pass has run, when the microbatches under way arrive at their next
pass, and of each rank until when it is busy, how long it has waited and how much of its W it has run. The next pass
to begin is chosen among all that can. All schedules of a layer have as many passes behind them. Of those that have the
same ones, one that is nowhere earlier is left out; of the others the `width` that promise most go on: by the least
time that everything can take, by how long all ranks have waited, and by how long memory is needed for what is left.

What promises most now need not do so later: a microbatch that begins early costs memory at once and helps much later.
So half of the places are shared out evenly among groups of schedules, by how often each of a few passes has run.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from zeropipe.core.jit import Floats, Ints
from zeropipe.searching.bound.ordering import stuck
from zeropipe.searching.kernels import FAR

if TYPE_CHECKING:
    from zeropipe.searching.starts.beams import Bed, Field

SAME = 4  # schedules that have the same passes behind them
SPREAD = 0.5  # of the places are shared out evenly among the groups


def grow(
    field: Field, cap: float, width: int, soft: float, scarce: float, share: Floats, most: Ints, apart: Ints, bed: Bed
) -> int:
    """Let schedules grow to their end; how many have, the best first, or 0 if none ends before `cap`.

    No stage has more than `most` activations alive. `share`: how much of a W must fit into a gap, of each rank. `soft`:
    how much the mean over the ranks counts beside the least time that everything can take, and `scarce`: how much the
    time that memory is needed for counts beside that. Groups are told apart by the passes for which `apart` has a 1.
    `bed.parent` and `bed.chosen` tell the way back: of each layer and schedule, which one it grew from by which pass.
    """
    rank_of, lasts, lag, needs, weight = field.rank, field.lasts, field.lag, field.needs, field.weight
    frees, limit, first, stages = field.frees, field.limit, field.first, field.stages
    total, drain, last_f, rest, near, name = field.total, field.drain, field.last_f, field.rest, field.near, field.name
    m, parts, num_passes, ranks = field.num_microbatches, field.parts, len(rank_of), len(limit)
    half, last, window = num_passes // 2, num_passes - 1, bed.ahead.shape[2]
    # in `times` stand the arrivals, the end and the waits of each rank, the last begin, its memory and what it owes
    busy, wait, latest, memory = window, window + ranks, window + 2 * ranks, window + 2 * ranks + 1
    owes = memory + ranks
    begins, then, runs, spare, table, names = bed.begins, bed.then, bed.runs, bed.spare, bed.table, bed.names
    rating, origin, choice, what, many, heap = bed.rating, bed.origin, bed.choice, bed.what, bed.many, bed.heap
    group, member, taken, groups, put_off = bed.group, bed.member, bed.taken, bed.groups, bed.put_off
    for x in range(num_passes):
        bed.counts[0, 0, x] = 0
    for stage in range(half):
        bed.done[0, 0, stage] = 0
    for spot in range(bed.times.shape[2]):
        bed.times[0, 0, spot] = 0.0
    names[0, 0], group[0, 0] = 0, 0
    held = 1
    for layer in range(num_passes * m):
        side, made = layer % 2, 0
        if bed.stop[0]:
            return 0
        for one in range(held):  # note each pass that it may go on with, and what that promises
            counts, times, done = bed.counts[side, one], bed.times[side, one], bed.done[side, one]
            ahead, oldest, until = bed.ahead[side, one], counts[last], FAR
            for x in range(num_passes):
                begins[x] = FAR
                number, rank, takes = counts[x], rank_of[x], needs[x]
                if number == m or (x > 0 and counts[x - 1] == number):
                    continue
                low, high = first[rank], first[rank + 1]
                if x < half:
                    if number - counts[last - x] >= most[x]:
                        continue
                    if not field.alone[rank] and stuck(x, low, high, limit[rank], counts, needs, stages):
                        continue
                # W run before it as in kernels.play, where there is time for them or memory asks for it
                now, level, owed, ran = times[busy + rank], times[memory + rank], times[owes + rank], 0
                arrives = max(times[latest], times[number - oldest]) if x > 0 else times[latest]
                for at in range(low, high):
                    spare[stages[at]] = done[stages[at]]
                while True:
                    room = takes <= 0 or level + takes <= limit[rank]
                    if room and arrives <= now + 1e-12 * now:
                        break
                    stage = next_w(low, high, parts, counts, spare, stages)
                    if stage < 0 or (room and now + share[rank] * weight[stage] > arrives + 1e-9 * weight[stage]):
                        break
                    now += weight[stage]
                    level -= frees[stage]
                    owed -= weight[stage]
                    spare[stage] += 1
                    ran += 1
                if takes > 0 and level + takes > limit[rank]:
                    continue
                begin = max(now, arrives)
                # nothing has to wait until another pass, which takes nobody's room, is done by all means
                if x >= half:
                    until = min(until, begin + lasts[x] + (0.0 if field.ample[rank] else owed))
                    owed += weight[last - x] * parts
                elif field.alone[rank]:
                    until = min(until, begin + lasts[x])
                begins[x], runs[x] = begin, ran
                then[x, 0], then[x, 1], then[x, 2] = level + takes, times[wait + rank] + begin - now, owed
            for x in range(num_passes):
                begin = begins[x]
                if begin >= FAR or (begin >= until - near and begin + lasts[x] > until) or made == len(rating):
                    continue
                mine, end, least, mean = rank_of[x], begin + lasts[x], 0.0, 0.0
                for rank in range(ranks):
                    left = then[x, 1]
                    if rank != mine:
                        left = times[wait + rank] + max(0.0, begin - times[busy + rank] - times[owes + rank])
                    left += total[rank]
                    if counts[last_f[rank]] + (last_f[rank] == x) < m:
                        left += drain[rank]
                    mean += left
                    least = max(least, left)
                for number in range(oldest, min(counts[0] + 1, m)):
                    y, arrives = 0, 0.0
                    if number == counts[x]:
                        y, arrives = x + 1, end + lag[x]
                    elif number < counts[0]:
                        y, arrives = ahead[number - oldest], times[number - oldest]
                    if y <= last:
                        free = end if rank_of[y] == mine else times[busy + rank_of[y]]
                        least = max(least, max(arrives, free, begin) + rest[y, number])
                if least < cap:
                    rating[made], origin[made], choice[made] = least + soft * mean / ranks, one, x
                    what[made, 0], many[made] = begin, runs[x]
                    what[made, 1], what[made, 2], what[made, 3] = then[x, 0], then[x, 1], then[x, 2]
                    member[made] = group[side, one] + name[x] * apart[x]
                    if scarce > 0:
                        rating[made] += soft * scarce * needed(field, counts, times, ahead, x, begin)
                    made += 1
        number = count_groups(member, made, taken, groups)
        even = max(1, int(SPREAD * width) // number) if number > 1 else width  # places of each group
        for at in range(made):
            heap[at] = at
        for at in range(made // 2 - 1, -1, -1):
            sift(heap, rating, at, made)
        for slot in range(len(table)):
            table[slot] = -1
        other, held, late, again = 1 - side, 0, 0, 0
        while held < width and (made > 0 or again < late):  # the best that are left go on
            first_turn = made > 0
            if first_turn:
                way = heap[0]
                made -= 1
                heap[0] = heap[made]
                sift(heap, rating, 0, made)
                if taken[member[way]] == even:  # its group has its places: it may get one that is left in the end
                    put_off[late] = way
                    late += 1
                    continue
            else:
                way = put_off[again]
                again += 1
            one, x = origin[way], choice[way]
            counts, times, before = bed.counts[side, one], bed.times[other, held], bed.times[side, one]
            rank, number, oldest, begin = rank_of[x], counts[x], counts[last], what[way, 0]
            back = 1 if x == last else 0  # then the oldest is through
            for spot in range(len(times)):
                times[spot] = before[spot]
            for spot in range(window):
                times[spot] = before[spot + back] if spot + back < window else 0.0
            times[busy + rank], times[latest] = begin + lasts[x], begin
            times[memory + rank], times[wait + rank], times[owes + rank] = what[way, 1], what[way, 2], what[way, 3]
            if x < last:
                times[number - oldest] = begin + lasts[x] + lag[x]
            for spot in range(counts[0] - oldest + (1 if x == 0 else 0) - back):
                times[spot] = max(times[spot], begin)
            # what promises more came first: this one is left out if one with the same passes is nowhere later
            new = names[side, one] + name[x]
            slot, same, known = (new ^ (new >> 29)) % len(table), 0, False
            while table[slot] >= 0:
                if names[other, table[slot]] == new:
                    same += 1
                    known = True
                    if same < SAME:
                        for spot in range(memory):
                            if bed.times[other, table[slot], spot] > times[spot] + near:
                                known = False
                                break
                    if known:
                        break
                slot = (slot + 1) % len(table)
            if known:
                continue
            table[slot] = held
            names[other, held], group[other, held] = new, groups[member[way]]
            taken[member[way]] += first_turn
            for y in range(num_passes):
                bed.counts[other, held, y] = counts[y]
            bed.counts[other, held, x] = number + 1
            for stage in range(half):
                bed.done[other, held, stage] = bed.done[side, one, stage]
            for _ in range(many[way]):
                stage = next_w(first[rank], first[rank + 1], parts, counts, bed.done[other, held], stages)
                bed.done[other, held, stage] += 1
            for spot in range(window - back):
                bed.ahead[other, held, spot] = bed.ahead[side, one, spot + back]
            if x < last:
                bed.ahead[other, held, number - oldest] = x + 1
            bed.parent[layer, held], bed.chosen[layer, held] = one, x
            held += 1
        if held == 0:
            break
    return held


def needed(field: Field, counts: Ints, times: Floats, ahead: Ints, x: int, begin: float) -> float:
    """When all is done if memory were always full behind the begin of pass x: on the rank where that is latest."""
    most, oldest, last = 0.0, counts[len(counts) - 1], len(counts) - 1
    begun = counts[0] + (1 if x == 0 else 0)
    for spot in range(field.stays.shape[1]):
        total = (field.num_microbatches - begun) * field.stays[0, spot]
        for number in range(oldest, begun):
            if number == counts[x]:
                y, arrives = x + 1, begin + field.lasts[x] + field.lag[x]
            else:
                y, arrives = ahead[number - oldest], max(begin, times[number - oldest])
            if y <= last:
                total += field.stays[y, spot] + field.holds[y, spot] * (arrives - begin)
        most = max(most, total)
    return begin + most


def count_groups(member: Ints, made: int, taken: Ints, groups: Ints) -> int:
    """Number the groups that ways to go on belong to; how many there are. `groups` gets the name of each."""
    count, size = 0, len(taken)
    for slot in range(size):
        taken[slot] = -1
    for way in range(made):
        name = member[way]
        slot = (name ^ (name >> 29)) % size
        while taken[slot] >= 0 and groups[slot] != name:
            slot = (slot + 1) % size
        if taken[slot] < 0:
            taken[slot], groups[slot] = 0, name
            count += 1
        member[way] = slot
    return count


def next_w(low: int, high: int, parts: int, counts: Ints, done: Ints, stages: Ints) -> int:
    """The stage of a rank whose W is next: the one that is furthest behind, the later of equal ones; -1 if none is."""
    stage, last = -1, len(counts) - 1
    for at in range(low, high):
        f = stages[at]
        if done[f] < counts[last - f] * parts and (stage < 0 or done[f] <= done[stage]):
            stage = f
    return stage


def sift(heap: Ints, rating: Floats, at: int, size: int) -> None:
    """Let what is at a place of a heap sink until nothing below it is better; of equal ones the first is better."""
    one = heap[at]
    while 2 * at + 1 < size:
        below = 2 * at + 1
        if below + 1 < size:
            left, right = heap[below], heap[below + 1]
            if rating[right] < rating[left] or (rating[right] == rating[left] and right < left):
                below += 1
        best = heap[below]
        if rating[one] < rating[best] or (rating[one] == rating[best] and one < best):
            break
        heap[at] = best
        at = below
    heap[at] = one
