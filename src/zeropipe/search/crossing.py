"""Kernels, to be compiled by core/jit.py: how soon a few microbatches can go round and round through a line of ranks.

Where memory holds k activations of a rank, microbatch j + k starts when microbatch j has come back: k of them take
turns. On its way down every one meets those that come up. On each rank one of the two has to wait, unless they pass
each other between two ranks. This takes some of those k, and finds the best of all ways to let them pass.

It adds one microbatch after the other. A state says when each rank ends the newest F, when I of those that are under
way can begin on each rank, and when the next microbatch can start. The later these are, the later is everything after
them, so a state that is nowhere earlier than another one is left out.
"""

from __future__ import annotations

from zeropipe.core.jit import Floats, Ints

NEVER = -1e300
BACK = 0  # the next one starts some time after I has ended
WEIGHT = 1  # W has to run as well
EITHER = 2  # W has to run as well, or the I of the microbatch behind


def laps(
    f: Floats, i: Floats, down: Floats, up: Floats, w: float, wait: Floats, mode: Ints, numbers: Ints, near: float,
    states: Floats, fresh: Floats, row: Floats, crossed: Ints, todo: Ints, arrives: Floats,
) -> float:  # fmt: skip
    """The earliest begin of the last I on the first rank.

    `f`, `i`: times of each rank; `down`, `up`: of the message that comes from there. `mode` and `wait` have an entry
    for each of those that take turns, `numbers` are those of all microbatches that are followed: the ranks have to run
    the others between them. What differs by `near` is equal. The other arguments are room to work in; where it is too
    small, two states become one that is as early as both of them.
    """
    p, turns, count, width = len(f), len(mode), len(numbers), states.shape[1]
    held = 1
    for at in range(width):
        states[0, at] = NEVER
    for x in range(count):
        under_way = min(x, turns - 1)
        between = numbers[x] - numbers[x - 1] - 1 if x > 0 else 0
        made = 0
        for number in range(held):
            state = states[number]
            top = 1
            todo[0] = 0
            todo[1] = 0
            arrives[0] = max(state[width - 1], numbers[x] * f[0])
            while top > 0:
                top -= 1
                rank = todo[2 * top]
                met = todo[2 * top + 1]  # so many of those under way have passed
                now = arrives[top]
                if met > 0:
                    crossed[met - 1] = rank - 1
                while rank < p:
                    now = max(now, state[rank] + between * f[rank])
                    while met < under_way:
                        other = state[p * (1 + met) + rank]
                        if now + f[rank] <= other + near:
                            break  # it is gone before
                        if now < other + i[rank] - near:  # here the other one waits; and later the new one
                            todo[2 * top] = rank
                            todo[2 * top + 1] = met + 1
                            arrives[top] = other + i[rank]
                            top += 1
                            break
                        crossed[met] = rank - 1
                        met += 1
                    now += f[rank]
                    row[rank] = now
                    now += down[rank]
                    rank += 1
                for late in range(met, under_way):
                    crossed[late] = p - 1
                slot = (x + 1) % turns
                made = follow(
                    p, turns, under_way, i, up, w, wait[slot], mode[slot], numbers[x - under_way : x + 1], state, row,
                    crossed, fresh, made, near,
                )  # fmt: skip
        held = made
        for number in range(held):
            for at in range(width):
                states[number, at] = fresh[number, at]
    best = 1e300
    for number in range(held):
        best = min(best, states[number, p * min(count, turns - 1)])
    return best


def follow(
    p: int, turns: int, under_way: int, i: Floats, up: Floats, w: float, wait: float, mode: int, numbers: Ints,
    state: Floats, row: Floats, crossed: Ints, fresh: Floats, made: int, near: float,
) -> int:  # fmt: skip
    """Take in what follows if a new microbatch runs F as in `row`: one state, or two."""
    width = len(state)
    new, other = fresh[made], fresh[made + 1]
    gone = 1 if under_way + 1 == turns else 0  # the oldest has been met by all: it only comes back
    for at in range(width):
        new[at] = NEVER
    for rank in range(p):
        new[rank] = row[rank]
    back = 0.0
    for number in range(under_way + 1):
        newest = number == under_way
        before = row[p - 1] if newest else NEVER
        for rank in range(p - 1, -1, -1):
            begin = before
            if not newest:
                begin = max(begin, state[p * (1 + number) + rank])
                if rank <= crossed[number]:
                    begin = max(begin, row[rank])
            if number > 0:  # behind the one before it, which `row` has behind the F
                begin = max(begin, row[p + rank] + (numbers[number] - numbers[number - 1]) * i[rank])
            row[p + rank] = begin
            before = begin + i[rank] + up[rank]
            if number >= gone:
                new[p * (1 + number - gone) + rank] = begin
        if number == 0:
            back = row[p] + i[0]
    if gone == 0:
        return add(fresh, made, near)
    behind = new[p] + i[0]  # the end of the next I on the first rank
    if mode == WEIGHT:  # the W before it has run when the newest one started
        back = max(back, state[width - 1])
    if mode == BACK:
        new[width - 1] = back + wait
    elif crossed[0] < 0:  # the newest F came after that I: W may have run before it or after it
        new[width - 1] = back + w if mode == WEIGHT else min(back + w, behind + wait)
    elif new[p] >= back + w:
        new[width - 1] = back + w
    else:
        for at in range(width):
            other[at] = new[at]
        new[width - 1] = behind + (w if mode == WEIGHT else wait)
        now = back + w
        other[width - 1] = now
        for number in range(turns - 1):  # W first: the next I come later
            now = max(now, other[p * (1 + number)])
            other[p * (1 + number)] = now
            now += i[0]
        held = add(fresh, made, near)
        # the second one stands where the first may have gone
        if held != made + 1:
            for at in range(width):
                fresh[held, at] = other[at]
        return add(fresh, held, near)
    return add(fresh, made, near)


def add(fresh: Floats, held: int, near: float) -> int:
    """Take in the state behind the `held` ones, unless one of them is nowhere later; those that are go.

    Where there is no more room it becomes one with the state that loses least by that.
    """
    width, room = fresh.shape[1], fresh.shape[0] - 2
    new = fresh[held]
    for number in range(held):
        later = False
        for at in range(width):
            if fresh[number, at] > new[at] + near:
                later = True
                break
        if not later:
            return held
    kept = 0
    for number in range(held):
        later = True
        for at in range(width):
            if fresh[number, at] < new[at] - near:
                later = False
                break
        if not later:
            if kept < number:
                for at in range(width):
                    fresh[kept, at] = fresh[number, at]
            kept += 1
    for at in range(width):
        fresh[kept, at] = new[at]
    if kept < room:
        return kept + 1
    least, chosen = 1e300, 0
    for number in range(kept):
        loss = 0.0
        for at in range(width):
            loss += abs(fresh[number, at] - new[at])
        if loss < least:
            least, chosen = loss, number
    for at in range(width):
        fresh[chosen, at] = min(fresh[chosen, at], new[at])
    return kept
