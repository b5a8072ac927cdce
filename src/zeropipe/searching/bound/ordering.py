"""A kernel, to be compiled by core/jit.py: how soon a few ranks can do all their work, in the best of all orders.

Only these ranks do one thing at a time and have a memory limit. On the others each microbatch is as fast as alone, and
no faster than the one before it. The kernel goes forward in time, pass by pass: the next pass to begin is chosen among
all that can. A state says how often each pass has run, when those under way arrive at their next one, since when each
rank is free, and when it would be done with the W that it owes.

Where memory is limited, W are whole: those that a rank owes when a pass begins are whole ones, or whole parts, and
memory has room for them (owed.py). A pass has two choices then. It begins as soon as it can, and a W that it would have
interrupted is still owed; or it waits until the next W ends. What else it may do is later, or leaves more W behind.
Which W have run is forgotten: the next pass may choose others. Where there are too many choices, or where B or Overlaps
may be better than F, I and W, W may be interrupted by passes: they run wherever a rank waits, and where memory lacks
room for an F, some of them end before it. So they need no choice.

Of two states that have come equally far, one that is nowhere earlier is left out. So is a state that cannot end before
`cap`: because of the way that is left to a microbatch, of the work that is left to a rank, or of the microbatches that
have to wait for the room that it takes.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from zeropipe.core.jit import Floats, Ints
from zeropipe.searching.kernels import FAR

if TYPE_CHECKING:
    from zeropipe.searching.bound.few import Few, Place

COMPARED = 8  # with so many others a state is compared in the time that it takes to look at one
TINY = 1e-9  # relative: so much less than a whole number of W is that number


def order(few: Few, cap: float, most: int, effort: int, width: int, place: Place) -> float:
    """The earliest end of everything, or `cap` if it is not before that.

    What differs by `few.near` is equal; of the states that have come equally far `most` are kept apart. Where `effort`,
    the number of states that may be looked at, or the place for them does not suffice, it is what all states of some
    layer need at least, and `place.whole` gets 0. `place.looked` gets how many were looked at.

    With a `width` only so many states of a layer go on, those that need least. The answer is no bound then, but the end
    in one order.
    """
    rank_of, lasts, lag, every, work, weight = few.rank, few.lasts, few.lag, few.every, few.work, few.weight
    takes, keeps, rest, begins, first, stages = few.takes, few.keeps, few.rest, few.begins, few.first, few.stages
    room, drain, last_f, ample, alone, name = few.room, few.drain, few.last_f, few.ample, few.alone, few.name
    owed, half, last = few.owed, len(few.rank) // 2, len(few.rank) - 1
    m, num_passes, ranks, near = few.num_microbatches, len(few.rank), len(few.room), few.near
    # in a state stand since when each rank is free, when it would be done with its W, and the arrivals
    done, comes = ranks, 2 * ranks
    table, slots, names, ready, new, kid = place.table, place.slots, place.names, place.ready, place.new, place.kid
    least_begin, left, ahead, levels, kept_by, behind, ends, beside, given = (
        place.least_begin, place.left, place.ahead, place.level, place.kept, place.behind, place.ends, place.beside,
        place.given
    )  # fmt: skip
    held, made, looked, compared, best = 1, 0, 0, 0, 0.0
    for x in range(num_passes):
        place.counts[0, 0, x] = 0
    for at in range(comes):
        place.states[0, 0, at] = 0.0
    place.first[0, 0], place.after[0, 0], names[0, 0] = 0, -1, 0
    place.whole[0], place.merged[0] = 0, 0
    for at in range(len(table)):
        table[at] = -1
    for layer in range(num_passes * m):
        side, other, taken, least_of_all = layer % 2, 1 - layer % 2, 0, FAR
        for number in range(made):
            table[slots[number]] = -1
        made = 0
        states, after = place.states[other], place.after[other]
        gone, enough = 0, FAR
        if width > 0:
            count = 0
            for one in range(held):
                which = place.first[side, one]
                while which >= 0:
                    place.ratings[count] = place.rating[side, which]
                    count += 1
                    which = place.after[side, which]
            if count > width:
                enough = smallest(place.ratings, count, width - 1)
        for one in range(held):
            # what all states with these counts have in common
            counts = place.counts[side, one]
            oldest, next_one = counts[last], counts[0]
            for rank in range(ranks):
                left[rank] = -few.began[rank] + (drain[rank] if counts[last_f[rank]] < m else 0.0)
                levels[rank], kept_by[rank], behind[rank] = 0.0, 0.0, 0.0
            for at in range(len(given)):
                given[at] = 0
            for x in range(num_passes):
                left[rank_of[x]] += (m - counts[x]) * work[x]
            for f in range(half):
                rank, back = rank_of[f], counts[last - f]
                levels[rank] += (counts[f] - back) * takes[f] + back * keeps[f]
                kept_by[rank] += back * keeps[f]
                behind[rank] += back * weight[f]
                given[owed.kind[f]] += back * few.parts
            for x in range(num_passes):
                kid[x], least_begin[x], rank = -1, FAR, rank_of[x]
                if counts[x] == m or (x > 0 and counts[x - 1] == counts[x]):
                    continue
                least_begin[x] = -FAR
                if owed.first[rank] < owed.first[rank + 1]:  # what W that are owed may keep
                    beside[x] = room[rank] + TINY * takes[min(x, last - x)] - (levels[rank] - kept_by[rank])
                    if x < half:
                        beside[x] -= takes[x]
                        if beside[x] < 0 or (
                            not alone[rank]
                            and stuck(x, first[rank], first[rank + 1], room[rank], counts, takes, stages)
                        ):
                            least_begin[x] = FAR
                elif x < half:
                    over = levels[rank] + takes[x] - room[rank]
                    if over > 0:  # how long W have to run before there is room
                        pieces = int(over / few.piece_keeps[rank] + 1 - TINY)
                        runs = max(pieces * few.piece_lasts[rank], over * few.per_room[rank])
                        least_begin[x] = runs - behind[rank]
                    if over > kept_by[rank] + TINY * takes[x] or (
                        not alone[rank] and stuck(x, first[rank], first[rank + 1], room[rank], counts, takes, stages)
                    ):
                        least_begin[x] = FAR
            x = last
            for number in range(oldest, next_one):
                while counts[x] <= number:  # those behind it have not come further
                    x -= 1
                ahead[number - oldest] = x + 1
            which = place.first[side, one]
            while which >= 0:
                if width > 0:
                    if gone == width or place.rating[side, which] > enough:
                        which = place.after[side, which]
                        continue
                    gone += 1
                looked += 1
                state = place.states[side, which]
                # what it needs at least, whatever follows
                needs = 0.0
                if next_one < m:
                    needs = max(begins[next_one], state[rank_of[0]]) + rest[0, next_one]
                for rank in range(ranks):
                    needs = max(needs, state[done + rank] + left[rank])
                for at in range(next_one - oldest):
                    y = ahead[at]
                    needs = max(needs, max(state[comes + at], state[rank_of[y]]) + rest[y, oldest + at])
                # when each pass can begin, and when one of them is done by all means: nothing has to wait until then,
                # as it would fit before, and nobody would be later
                until = FAR
                for x in range(num_passes):
                    ready[2 * x], ready[2 * x + 1] = FAR, FAR
                    if least_begin[x] >= FAR:
                        continue
                    rank = rank_of[x]
                    begin = max(state[rank], begins[next_one] if x == 0 else state[comes + counts[x] - oldest])
                    if owed.first[rank] < owed.first[rank + 1]:
                        ends[2 * x], ends[2 * x + 1] = max(state[done + rank], begin), max(state[done + rank], begin)
                        more, less = around(
                            ends[2 * x] - begin, near, owed.first[rank], owed.first[rank + 1], owed.lasts, owed.keeps,
                            beside[x], owed.parts, owed.kind_first[rank], given,
                        )  # fmt: skip
                        if more < FAR:
                            ready[2 * x], ends[2 * x] = begin, begin + more
                        if less > -FAR:
                            ready[2 * x + 1] = ends[2 * x + 1] - less
                        if more >= FAR and less <= -FAR:
                            continue
                        at = 2 * x if more < FAR else 2 * x + 1
                        if x >= half:
                            by = max(ends[at], ready[at] + state[done + rank] - state[rank])  # W have run by then
                            until = min(until, lasts[x] + by)
                        elif alone[rank]:
                            until = min(until, lasts[x] + ends[at])
                        continue
                    if x < half:
                        begin = max(begin, state[done + rank] + least_begin[x])
                        if alone[rank]:
                            until = min(until, begin + lasts[x])
                    elif ample[rank]:
                        until = min(until, begin + lasts[x])
                    else:
                        until = min(until, begin + lasts[x] + state[done + rank] - state[rank])
                    ready[2 * x], ends[2 * x] = begin, max(state[done + rank], begin)
                for choice in range(2 * num_passes):
                    x, begin = choice // 2, ready[choice]
                    if begin >= FAR or (begin >= until - near and begin + lasts[x] > until + near):
                        continue
                    mine, number, end = rank_of[x], counts[x], begin + lasts[x]
                    least = max(needs, begin + rest[x, number], ends[choice] + left[mine])
                    for rank in range(ranks):
                        least = max(least, max(state[done + rank], begin) + left[rank])
                    if least >= cap:
                        continue
                    if x < last:
                        arrives = end + lag[x]
                        if number > oldest and counts[x + 1] < number:  # the one before it is on the same way
                            arrives = max(arrives, state[comes + number - oldest - 1] + every[x])
                        free = end if rank_of[x + 1] == mine else max(begin, state[rank_of[x + 1]])
                        least = max(least, max(arrives, free) + rest[x + 1, number])
                    then = next_one + 1 if x == 0 else next_one
                    if then < m:
                        least = max(least, max(begins[then], end if mine == rank_of[0] else begin) + rest[0, then])
                    for at in range(next_one - oldest):
                        if at != number - oldest:
                            y = ahead[at]
                            least = max(least, (end if rank_of[y] == mine else begin) + rest[y, oldest + at])
                    if least >= cap:
                        continue
                    least_of_all = min(least_of_all, least)
                    # the new state
                    for rank in range(ranks):
                        new[rank], new[done + rank] = max(state[rank], begin), max(state[done + rank], begin)
                    new[mine] = end
                    new[done + mine] = ends[choice] + work[x]
                    back = 1 if x == last else 0  # then the oldest is through
                    size = comes + then - oldest - back
                    for at in range(comes, size):  # nothing begins before this one did
                        new[at] = max(state[at + back], begin)
                    if x < last:
                        new[comes + number - oldest] = arrives
                    # those that have come as far
                    if kid[x] < 0:
                        key = names[side, one] + name[x]
                        slot = (key ^ (key >> 29)) % len(table)
                        while table[slot] >= 0:
                            same = names[other, table[slot]] == key
                            if same:
                                for y in range(num_passes):
                                    same = same and place.counts[other, table[slot], y] == counts[y] + (y == x)
                            if same:
                                break
                            slot = (slot + 1) % len(table)
                        if table[slot] < 0:
                            if taken == len(states):
                                made = -1
                                break
                            table[slot], slots[made], names[other, made] = made, slot, key
                            for y in range(num_passes):
                                place.counts[other, made, y] = counts[y]
                            place.counts[other, made, x] += 1
                            place.first[other, made] = -1
                            made += 1
                        kid[x] = table[slot]
                    # it is left out if one of them is nowhere later; those that it is nowhere later than go
                    group, before, spare, apart = kid[x], -1, -1, 0
                    that = place.first[other, group]
                    while that >= 0:
                        compared += 1
                        earlier, later = False, False
                        for at in range(size):
                            if states[that, at] < new[at] - near:
                                earlier = True
                                if later:
                                    break
                            elif states[that, at] > new[at] + near:
                                later = True
                                if earlier:
                                    break
                        if not later:
                            break
                        if earlier:
                            apart += 1
                            before = that
                        else:
                            spare = that
                            if before < 0:
                                place.first[other, group] = after[that]
                            else:
                                after[before] = after[that]
                        that = after[that]
                    if that >= 0:
                        continue
                    if spare < 0 and (apart >= most or (taken == len(states) and apart > 0)):
                        if width > 0:
                            continue
                        # it and the state that loses least by that become one that is as early as both
                        place.merged[0] = 1
                        nearest, chosen, that = FAR, -1, place.first[other, group]
                        while that >= 0:
                            loss = 0.0
                            for at in range(size):
                                loss += abs(states[that, at] - new[at])
                            if loss < nearest:
                                nearest, chosen = loss, that
                            that = after[that]
                        for at in range(size):
                            states[chosen, at] = min(states[chosen, at], new[at])
                        continue
                    if spare < 0:
                        if taken == len(states):
                            made = -1
                            break
                        spare = taken
                        taken += 1
                    for at in range(size):
                        states[spare, at] = new[at]
                    after[spare] = place.first[other, group]
                    place.first[other, group] = spare
                    if width > 0:
                        # of equal ones the one that begins first, and then the one that has come furthest
                        place.rating[other, spare] = least + TINY * begin - near * x
                if made < 0:
                    break
                which = place.after[side, which]
            if made < 0 or looked + compared // COMPARED > effort or place.stop[0]:
                place.looked[0] = looked + compared // COMPARED
                return best
        held = made
        best = max(best, min(least_of_all, cap))
    place.looked[0], place.whole[0] = looked + compared // COMPARED, 1
    return best


def smallest(values: Floats, count: int, number: int) -> float:
    """The value that would stand at `number` if the first `count` values were sorted. They change their places.

    np.partition, but compiled by numba in a tenth of the time.
    """
    low, high = 0, count - 1
    while low < high:
        middle, left, right = values[(low + high) // 2], low, high
        while left <= right:
            while values[left] < middle:
                left += 1
            while values[right] > middle:
                right -= 1
            if left <= right:
                values[left], values[right] = values[right], values[left]
                left += 1
                right -= 1
        if number <= right:
            high = right
        elif number >= left:
            low = left
        else:
            break
    return values[number]  # type: ignore[no-any-return]


def stuck(x: int, low: int, high: int, room: float, counts: Ints, takes: Floats, stages: Ints) -> bool:
    """Whether an F would take the room that an older microbatch needs for its later stages: all would wait forever.

    No I of a rank runs before the oldest microbatch has all its F there behind it, and what younger ones hold stays.
    The rank's stages stand in `stages` from `low` to `high`.
    """
    last, level, oldest = len(counts) - 1, takes[x], counts[x]
    for at in range(low, high):
        f = stages[at]
        level += (counts[f] - counts[last - f]) * takes[f]
        oldest = min(oldest, counts[last - f])
    for number in range(oldest, counts[x] + 1):
        holds, misses = 0.0, 0.0
        for at in range(low, high):
            f = stages[at]
            if number < counts[f] or (f == x and number == counts[x]):
                holds += takes[f] if number >= counts[last - f] else 0.0
            else:
                misses += takes[f]
        if level + misses > room:
            return True
        level -= holds
    return False


def around(
    time: float, near: float, low: int, high: int, lasts: Floats, keeps: Floats, room: float, parts: Ints, kind: int,
    given: Ints,
) -> tuple[float, float]:  # fmt: skip
    """How long W can last that a rank owes: the least time that is not below `time`, and the largest below.

    The rank's choices stand from `low` to `high`, the shortest first (owed.py). There is `room` for what they keep, and
    so many parts were `given` of each kind, from `kind` on. FAR, or -FAR, where there is none; `time` itself, and no
    other one, where it is that of a choice.
    """
    at, above = low, high
    while at < above:
        middle = (at + above) // 2
        if lasts[middle] < time - near:
            at = middle + 1
        else:
            above = middle
    more, less = FAR, -FAR
    for one in range(at, high):
        if keeps[one] <= room and were_given(one, kind, given, parts):
            more = lasts[one]
            break
    if more <= time + near:
        return time, -FAR
    for one in range(at - 1, low - 1, -1):
        if keeps[one] <= room and were_given(one, kind, given, parts):
            less = lasts[one]
            break
    return more, less


def were_given(one: int, kind: int, given: Ints, parts: Ints) -> bool:
    """Whether there are so many parts of each kind that they can be owed."""
    enough = True
    for at in range(parts.shape[1]):
        enough = enough and parts[one, at] <= given[kind + at]
    return enough
