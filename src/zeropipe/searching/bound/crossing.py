"""Kernels, to be compiled by core/jit.py: how soon a few microbatches can go round and round through the ranks.

Where memory holds k activations of a rank's first stage, microbatch j + k starts when microbatch j has come back: k of
them take turns. On their ways they meet on ranks, and one of two that meet has to wait. This follows all of those k,
or some of them, through every order in which they can pass each other, and finds the best.

It goes forward in time, action by action. A state says how far each microbatch has come, when it can go on, and when
its last action ended; where W make room on the first rank, also how many it owes and since when it is free. Of two
states that have come equally far, one that is nowhere earlier is left out. So is a state that cannot end before `cap`:
because of the way that is left to a microbatch, or of the work that is left to a rank.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from zeropipe.core.jit import Floats, Ints
from zeropipe.searching.kernels import FAR

if TYPE_CHECKING:
    from zeropipe.searching.bound.laps import Path, Room

TOO_MANY = -1.0  # the answer where there are more states than room or effort for them
BITS = 7  # of a key for how far one microbatch has come


def laps(
    path: Path, numbers: Ints, begins: Floats, turns: int, cap: float, near: float, effort: int, room: Room
) -> float:
    """The earliest end of the last I of the microbatches that are followed, or `cap` if it is not before that.

    `numbers`: of the microbatches that are followed, and how many there are in all; `begins`: when each can begin at
    the earliest; `turns` of them are under way at a time. What differs by `near` is equal. `effort`: how many states
    may be looked at; `room.looked` gets how many were.
    """
    length, count, come, ready = len(path.rank), len(begins), room.come, room.ready
    best = cap
    held, looked = 1, 0
    room.keys[0, 0] = 0
    room.sizes[0, 0] = 1
    for at in range(turns):
        room.states[0, 0, 0, at] = begins[min(at, count - 1)]
        room.states[0, 0, 0, turns + at] = 0.0
    room.states[0, 0, 0, 2 * turns] = 0.0
    for layer in range(count * (length + path.parts)):
        side, made = layer % 2, 0
        for at in range(len(room.table)):
            room.table[at] = -1
        for number in range(held):
            key, total = room.keys[side, number], 0
            for at in range(turns):
                come[at] = key & ((1 << BITS) - 1)
                key >>= BITS
                total += come[at]
            come[turns] = key
            oldest = (layer - total + come[turns]) // (length + path.parts)
            alive = min(turns, count - oldest)
            owes = come[turns] > 0 and (oldest + alive < count or come[alive - 1] == 0)
            for which in range(room.sizes[side, number]):
                looked += 1
                state = room.states[side, number, which]
                # the action that can end first, on its rank, goes next; or one that is there before it would end
                until = can_begin(path, come, alive, turns, count - oldest, state, ready)
                rank = -1
                if owes:
                    ends = state[2 * turns] + path.weight
                    until = min(until, ends)
                    if ends <= until:
                        rank = path.rank[0]
                for one in range(alive):
                    if ready[one] < FAR and ready[one] + path.lasts[come[one]] <= until:
                        rank = path.rank[come[one]]
                for one in range(alive):
                    ends = ready[one] + path.lasts[come[one]] if ready[one] < FAR else FAR
                    if (ready[one] >= until - near and ends > until) or path.rank[come[one]] != rank:
                        continue
                    if come[one] == path.back_at - 1:
                        room.ends[oldest + one] = min(room.ends[oldest + one], ends)
                    if come[one] == path.back_at - 1 and oldest + one == count - 1:
                        best = min(best, ends)
                    elif go_on(path, numbers, begins, turns, alive, oldest, one, ends, cap, state, room):
                        made = add(path, numbers, count, layer + 1, turns, near, cap, made, room)
                if owes and rank == path.rank[0]:
                    ends = state[2 * turns] + path.weight
                    if (state[2 * turns] < until - near or ends <= until) and run_w(
                        path, count, turns, alive, oldest, ends, cap, state, room
                    ):
                        made = add(path, numbers, count, layer + 1, turns, near, cap, made, room)
            if made > room.keys.shape[1] or looked > effort or room.stop[0]:
                room.looked[0] = looked
                return TOO_MANY
        held = made
    room.looked[0] = looked
    return best


def can_begin(path: Path, come: Ints, alive: int, turns: int, left: int, state: Floats, ready: Floats) -> float:
    """When the next action of each microbatch can begin, into `ready`: FAR if it is not its turn. The earliest end.

    The last ones of the `left` microbatches do not have to make room for others.
    """
    until = FAR
    for one in range(alive):
        at = come[one]
        ready[one] = FAR
        if at >= path.back_at and one + turns >= left:
            continue  # done
        if one > 0 and come[one - 1] <= at:
            continue  # behind the one before it
        free = True
        for rule in range(path.back.shape[0]):
            back = one - path.back[rule, at]
            free = free and (back < 0 or come[back] >= path.upto[rule, at])
        if not free:
            continue  # memory
        if at == 0 and one * path.size + come[turns] * path.keeps + path.size > path.room:
            continue  # memory
        ready[one] = state[one]
        until = min(until, state[one] + path.lasts[at])
    return until


def go_on(
    path: Path, numbers: Ints, begins: Floats, turns: int, alive: int, oldest: int, one: int, ends: float, cap: float,
    state: Floats, room: Room,
) -> bool:  # fmt: skip
    """Write what follows if the next action of `one` ends at `ends`; False if it leads to nothing before `cap`."""
    length, count, come, new = len(path.rank), len(begins), room.new_come, room.new
    at = room.come[one]
    rank = path.rank[at]
    for other in range(turns):
        come[other] = room.come[other]
        new[other] = state[other]
        new[turns + other] = state[turns + other]
        if other < alive and path.rank[come[other]] == rank:
            new[other] = max(new[other], ends)
    # the ones that are not followed run this action between `one` and the next one
    if one + 1 < alive and come[one + 1] == at:
        between = numbers[oldest + one + 1] - numbers[oldest + one] - 1
        new[one + 1] = max(new[one + 1], ends + between * path.lasts[at])
    for other in range(one + 1, alive):  # room for another activation, after some time
        for rule in range(path.back.shape[0]):
            if other - path.back[rule, come[other]] == one and path.upto[rule, come[other]] == at + 1:
                new[other] = max(new[other], ends + path.after[rule, come[other]])
    new[turns + one] = ends
    new[2 * turns] = ends if rank == path.rank[0] else state[2 * turns]
    come[turns] = room.come[turns]
    moved = one
    if at + 1 < length:
        come[one] = at + 1
        new[one] = ends + path.lag[at]
        if one > 0 and come[one - 1] == at + 2:
            between = numbers[oldest + one] - numbers[oldest + one - 1] - 1
            new[one] = max(new[one], new[turns + one - 1] + between * path.lasts[at + 1])
    else:  # the oldest is back; another one takes its place
        oldest += 1
        come[turns] += path.parts
        for other in range(turns - 1):
            come[other] = come[other + 1]
            new[other] = new[other + 1]
            new[turns + other] = new[turns + other + 1]
        moved = turns - 1
        come[moved] = 0
        new[moved] = max(ends + path.wait, begins[min(oldest + moved, count - 1)])
        new[turns + moved] = 0.0
    alive = min(turns, count - oldest)
    if moved < alive and come[moved] < length:
        for other in range(alive):  # its next rank may be busy
            if other != moved and come[other] > 0 and path.rank[come[other] - 1] == path.rank[come[moved]]:
                new[moved] = max(new[moved], new[turns + other])
        if path.rank[come[moved]] == path.rank[0]:
            new[moved] = max(new[moved], new[2 * turns])
        for rule in range(path.back.shape[0]):
            back = moved - path.back[rule, come[moved]]
            if back >= 0 and come[back] == path.upto[rule, come[moved]]:
                new[moved] = max(new[moved], new[turns + back] + path.after[rule, come[moved]])
    return can_end(path, count, turns, alive, oldest, cap, room)


def run_w(
    path: Path, count: int, turns: int, alive: int, oldest: int, ends: float, cap: float, state: Floats, room: Room
) -> bool:
    """The same if the first rank runs a part of a W that ends at `ends`."""
    come, new = room.new_come, room.new
    for other in range(turns):
        come[other] = room.come[other]
        new[other] = state[other]
        new[turns + other] = state[turns + other]
        if other < alive and path.rank[come[other]] == path.rank[0]:
            new[other] = max(new[other], ends)
    come[turns] = room.come[turns] - 1
    new[2 * turns] = ends
    return can_end(path, count, turns, alive, oldest, cap, room)


def can_end(path: Path, count: int, turns: int, alive: int, oldest: int, cap: float, room: Room) -> bool:
    """Whether the new state may end before `cap`. What nobody can use any more is taken out of it."""
    come, new = room.new_come, room.new
    can_begin(path, come, alive, turns, count - oldest, new, room.new_ready)
    now = FAR
    for other in range(alive):
        now = min(now, room.new_ready[other])
    owes = come[turns] > 0 and (oldest + alive < count or come[alive - 1] == 0)
    if owes:
        now = min(now, new[2 * turns])
    # nothing happens before `now`: what could have is as good as that, and so is what ended too long ago to matter
    for other in range(turns):
        new[other] = max(new[other], now) if other < alive else 0.0
        new[turns + other] = max(new[turns + other], now - path.reach) if other < alive else 0.0
        if other < alive and new[other] + path.ahead[come[other]] + room.later[oldest + other] >= cap:
            return False
    new[2 * turns] = max(new[2 * turns], now) if path.parts > 0 else 0.0
    room.now[0] = now
    return now < FAR


def work_left(path: Path, numbers: Ints, count: int, turns: int, oldest: int, come: Ints) -> float:
    """The least time that some rank needs for what is left."""
    most = 0.0
    alive = min(turns, count - oldest)
    for rank in range(path.rest.shape[1]):
        left = (numbers[count] - numbers[oldest + alive]) * path.rest[0, rank]
        for other in range(alive):
            left += (numbers[oldest + other + 1] - numbers[oldest + other]) * path.rest[come[other], rank]
        if oldest + alive < count or come[alive - 1] <= path.last_f[rank]:
            left += path.drain[rank]
        most = max(most, left)
    return most - path.behind


def add(
    path: Path, numbers: Ints, count: int, layer: int, turns: int, near: float, cap: float, made: int, room: Room
) -> int:
    """Take in the new state unless one of those that have come as far is nowhere later; those that are go.

    Where there is no more room for it, it and the state that loses least by that become one that is as early as both.
    Returns how many keys there are, or one more than there can be.
    """
    new, width, side = room.new, 2 * turns + 1, layer % 2
    key = mixed = room.new_come[turns]
    total = -key
    if made > room.keys.shape[1]:
        return made
    for at in range(turns - 1, -1, -1):
        key = (key << BITS) | room.new_come[at]
        mixed = (mixed * 1000003 + room.new_come[at]) & 0xFFFFFFFFFFFF
        total += room.new_come[at]
    slot = (mixed ^ (mixed >> 15)) % len(room.table)
    while room.table[slot] >= 0 and room.keys[side, room.table[slot]] != key:
        slot = (slot + 1) % len(room.table)
    number = room.table[slot]
    if number < 0:
        if made == room.keys.shape[1]:
            return made + 1
        number = made
        made += 1
        room.table[slot] = number
        room.keys[side, number] = key
        room.sizes[side, number] = 0
        room.left[side, number] = work_left(
            path, numbers, count, turns, (layer - total) // (len(path.rank) + path.parts), room.new_come
        )
    if room.now[0] + room.left[side, number] >= cap:
        return made
    states, kept = room.states[side, number], 0
    for one in range(room.sizes[side, number]):
        earlier, later = False, False
        for at in range(width):
            earlier = earlier or states[one, at] < new[at] - near
            later = later or states[one, at] > new[at] + near
        if not later:
            return made
        if earlier:
            if kept < one:
                for at in range(width):
                    states[kept, at] = states[one, at]
            kept += 1
    if kept < states.shape[0]:
        for at in range(width):
            states[kept, at] = new[at]
        room.sizes[side, number] = kept + 1
        return made
    least, chosen = FAR, 0
    for one in range(kept):
        loss = 0.0
        for at in range(width):
            loss += abs(states[one, at] - new[at])
        if loss < least:
            least, chosen = loss, one
    for at in range(width):
        states[chosen, at] = min(states[chosen, at], new[at])
    return made
