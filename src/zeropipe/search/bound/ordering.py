"""Kernels, to be compiled by core/jit.py: how soon a few ranks can do all their work, in the best of all orders.

Only these ranks do one thing at a time and have a memory limit. On the others each microbatch is as fast as alone, and
no faster than the one before it. The kernel goes forward in time, pass by pass: the next pass to begin is chosen among
all that can. A state says how often each pass has run, when those under way arrive at their next one, since when each
rank is free, and when it would be done with the W that it owes. W may be interrupted here: they run wherever a rank
waits, and where memory lacks room for an F, some of them end before it. So they need no choice.

Of two states that have come equally far, one that is nowhere earlier is left out. So is a state that cannot end before
`cap`: because of the way that is left to a microbatch, of the work that is left to a rank, or of the microbatches that
have to wait for the room that it takes.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from zeropipe.core.jit import Floats, Ints
from zeropipe.search.kernels import FAR

if TYPE_CHECKING:
    from zeropipe.search.bound.few import Few, Place

COMPARED = 8  # with so many others a state is compared in the time that it takes to look at one
TINY = 1e-9  # relative: so much less than a whole number of W is that number


def order(few: Few, cap: float, near: float, most: int, effort: int, place: Place) -> float:
    """The earliest end of everything, or `cap` if it is not before that.

    What differs by `near` is equal; of the states that have come equally far `most` are kept apart. Where `effort`,
    the number of states that may be looked at, or the place for them does not suffice, it is what all states of some
    layer need at least, and `place.whole` gets 0. `place.looked` gets how many were looked at.
    """
    held, looked, best = 1, 0, 0.0
    for x in range(len(few.rank)):
        place.counts[0, 0, x] = 0
    for at in range(place.states.shape[2]):
        place.states[0, 0, at] = 0.0
    place.first[0, 0], place.after[0, 0] = 0, -1
    place.whole[0], place.merged[0], place.compared[0] = 0, 0, 0
    for layer in range(len(few.rank) * few.num_microbatches):
        side, made = layer % 2, 0
        place.least[0] = FAR
        place.taken[0] = 0
        for at in range(len(place.table)):
            place.table[at] = -1
        for number in range(held):
            counts = place.counts[side, number]
            which = place.first[side, number]
            while which >= 0:
                looked += 1
                state = place.states[side, which]
                until = can_begin(few, counts, state, place.ready)
                for x in range(len(few.rank)):
                    begin = place.ready[x]
                    if begin < FAR and (begin < until - near or begin + few.lasts[x] <= until):
                        run(few, x, begin, counts, state, place)
                        made = add(few, 1 - side, near, cap, most, made, place)
                which = place.after[side, which]
            if made < 0 or looked + place.compared[0] // COMPARED > effort or place.stop[0]:
                place.looked[0] = looked + place.compared[0] // COMPARED
                return best
        held = made
        best = max(best, min(place.least[0], cap))
    place.looked[0], place.whole[0] = looked + place.compared[0] // COMPARED, 1
    return best


def dive(few: Few, place: Place) -> float:
    """The end in one order, by always taking what seems best: no bound by these ranks is above that."""
    counts, state, ends = place.counts[0, 0], place.states[0, 0], 0.0
    for x in range(len(few.rank)):
        counts[x] = 0
    for at in range(len(state)):
        state[at] = 0.0
    for _ in range(len(few.rank) * few.num_microbatches):
        can_begin(few, counts, state, place.ready)
        least, chosen = FAR, -1
        for x in range(len(few.rank)):
            if place.ready[x] < FAR:
                run(few, x, place.ready[x], counts, state, place)
                value = needs(few, place.new_counts, place.new)
                # of equal ones that which comes first, and then the one that has come furthest
                if value < least or (value == least and place.ready[x] <= place.ready[chosen]):
                    least, chosen = value, x
        if chosen < 0:
            return FAR
        ends = max(ends, least)
        run(few, chosen, place.ready[chosen], counts, state, place)
        for x in range(len(few.rank)):
            counts[x] = place.new_counts[x]
        for at in range(len(state)):
            state[at] = place.new[at]
    return ends


def can_begin(few: Few, counts: Ints, state: Floats, ready: Floats) -> float:
    """When each pass can begin next, into `ready`: FAR if it cannot. Returns when another one is done by all means.

    Nothing has to wait as long as that: the other pass would fit before it, and nobody would be later.
    """
    num_passes, m, ranks = len(few.rank), few.num_microbatches, len(few.room)
    window = len(state) - 2 * ranks
    until = FAR
    for x in range(len(few.rank)):
        ready[x] = FAR
        number, rank = counts[x], few.rank[x]
        free = state[window + rank]
        owed = state[window + ranks + rank] - free
        if number >= m or (x > 0 and counts[x - 1] <= number):
            continue
        begin = max(few.begins[number], free) if x == 0 else max(state[number - counts[num_passes - 1]], free)
        if x < num_passes // 2:
            begin = max(begin, free + w_first(few, x, counts, owed))
            if begin >= FAR or (not few.alone[rank] and stuck(few, x, counts)):
                continue
            if few.alone[rank]:
                until = min(until, begin + few.lasts[x])
        elif few.ample[rank]:
            until = min(until, begin + few.lasts[x])
        else:
            until = min(until, begin + few.lasts[x] + owed)
        ready[x] = begin
    return until


def w_first(few: Few, x: int, counts: Ints, owed: float) -> float:
    """How long W have to run before there is room for an F; FAR if they cannot make it."""
    rank, num_passes = few.rank[x], len(few.rank)
    level, kept, behind = few.takes[x], 0.0, 0.0
    for f in range(num_passes // 2):
        if few.rank[f] == rank:
            back = counts[num_passes - 1 - f]
            level += (counts[f] - back) * few.takes[f] + back * few.keeps[f]
            kept += back * few.keeps[f]
            behind += back * few.weight[f]
    over = level - few.room[rank]
    if over <= 0:
        return 0.0
    if over > kept + TINY * few.takes[x]:
        return FAR
    pieces = int(over / few.piece_keeps[rank] + 1 - TINY)
    missing: float = max(pieces * few.piece_lasts[rank], over * few.per_room[rank]) - (behind - owed)
    return max(0.0, missing)


def stuck(few: Few, x: int, counts: Ints) -> bool:
    """Whether an F would take the room that an older microbatch needs for its later stages: all would wait forever.

    No I of a rank runs before the oldest microbatch has all its F there behind it, and what younger ones hold stays.
    """
    rank, half, last = few.rank[x], len(few.rank) // 2, len(few.rank) - 1
    level, oldest = few.takes[x], counts[x]
    for f in range(half):
        if few.rank[f] == rank:
            level += (counts[f] - counts[last - f]) * few.takes[f]
            oldest = min(oldest, counts[last - f])
    for number in range(oldest, counts[x] + 1):
        holds, misses = 0.0, 0.0
        for f in range(half):
            if few.rank[f] == rank:
                if number < counts[f] or (f == x and number == counts[x]):
                    holds += few.takes[f] if number >= counts[last - f] else 0.0
                else:
                    misses += few.takes[f]
        if level + misses > few.room[rank]:
            return True
        level -= holds
    return False


def run(few: Few, x: int, begin: float, counts: Ints, state: Floats, place: Place) -> None:
    """Write what follows if pass `x` runs next and begins at `begin`."""
    num_passes, ranks, rank, new = len(few.rank), len(few.room), few.rank[x], place.new
    window = len(state) - 2 * ranks
    oldest, number = counts[num_passes - 1], counts[x]
    for y in range(len(few.rank)):
        place.new_counts[y] = counts[y]
    place.new_counts[x] = number + 1
    for at in range(len(state)):
        new[at] = state[at]
    end = begin + few.lasts[x]
    new[window + rank] = end
    # nothing begins before this one did: what could have is as good as that
    for one in range(ranks):
        new[window + one] = max(state[window + one], begin)
        new[window + ranks + one] = max(state[window + ranks + one], begin)
    new[window + rank] = end
    new[window + ranks + rank] += few.lasts[x]
    if x >= num_passes // 2:
        new[window + ranks + rank] += few.weight[num_passes - 1 - x]
    if x < num_passes - 1:
        at = number - oldest
        new[at] = end + few.lag[x]
        if at > 0 and counts[x + 1] < number:  # the one before it is on the same way
            new[at] = max(new[at], state[at - 1] + few.every[x])
    else:  # it is back
        for at in range(window - 1):
            new[at] = new[at + 1]
        new[window - 1] = 0.0
    for at in range(place.new_counts[0] - place.new_counts[num_passes - 1]):
        new[at] = max(new[at], begin)


def needs(few: Few, counts: Ints, new: Floats) -> float:
    """When everything can have ended at the earliest."""
    num_passes, ranks, m = len(few.rank), len(few.room), few.num_microbatches
    window = len(new) - 2 * ranks
    most, oldest = 0.0, counts[num_passes - 1]
    for rank in range(ranks):
        left = new[window + ranks + rank] - few.began[rank]
        for x in range(num_passes):
            if few.rank[x] == rank:
                left += (m - counts[x]) * few.work[x]
        if counts[few.last_f[rank]] < m:
            left += few.drain[rank]
        most = max(most, left)
    x = num_passes - 1
    for number in range(oldest, min(counts[0] + 1, m)):
        while x >= 0 and counts[x] <= number:  # those behind it have not come further
            x -= 1
        arrives = new[number - oldest] if x >= 0 else few.begins[number]
        most = max(most, max(arrives, new[window + few.rank[x + 1]]) + few.rest[x + 1, number])
    if oldest == m:
        most = max(most, new[window + few.rank[0]] - few.lasts[num_passes - 1] + few.rest[num_passes - 1, m - 1])
    return most


def add(few: Few, side: int, near: float, cap: float, most: int, made: int, place: Place) -> int:
    """Take in the new state unless it is too late, or one that has come as far is nowhere later; those that are go.

    Where there are `most` already, it and the state that loses least by that become one that is as early as both.
    Returns how many different counts there are, or -1 if there is no more place.
    """
    new = place.new
    if made < 0:
        return made
    least = needs(few, place.new_counts, new)
    if least >= cap:
        return made
    place.least[0] = min(place.least[0], least)
    slot = find(side, place)
    number = place.table[slot]
    if number < 0:
        if place.taken[0] == place.states.shape[1]:
            return -1
        number = made
        made += 1
        place.table[slot] = number
        for x in range(len(few.rank)):
            place.counts[side, number, x] = place.new_counts[x]
        place.first[side, number] = -1
    states, after = place.states[side], place.after[side]
    one, before, kept = place.first[side, number], -1, 0
    nearest, chosen = FAR, -1
    while one >= 0:
        earlier, later, apart = False, False, 0.0
        for at in range(len(new)):
            earlier = earlier or states[one, at] < new[at] - near
            later = later or states[one, at] > new[at] + near
            apart += abs(states[one, at] - new[at])
        place.compared[0] += 1
        if not later:
            return made
        if earlier:
            kept += 1
            before = one
            if apart < nearest:
                nearest, chosen = apart, one
        elif before < 0:
            place.first[side, number] = after[one]
        else:
            after[before] = after[one]
        one = after[one]
    if kept >= most or (place.taken[0] == states.shape[0] and chosen >= 0):
        place.merged[0] = 1
        for at in range(len(new)):
            states[chosen, at] = min(states[chosen, at], new[at])
        return made
    if place.taken[0] == states.shape[0]:
        return -1
    one = place.taken[0]
    place.taken[0] += 1
    for at in range(len(new)):
        states[one, at] = new[at]
    after[one] = place.first[side, number]
    place.first[side, number] = one
    return made


def find(side: int, place: Place) -> int:
    """Where the table has the new counts, or has place for them."""
    mixed = 0
    for x in range(len(place.new_counts)):
        mixed = (mixed * 1000003 + place.new_counts[x]) & 0xFFFFFFFFFFFF
    slot = (mixed ^ (mixed >> 15)) % len(place.table)
    while place.table[slot] >= 0:
        same = True
        for x in range(len(place.new_counts)):
            same = same and place.counts[side, place.table[slot], x] == place.new_counts[x]
        if same:
            break
        slot = (slot + 1) % len(place.table)
    return slot
