"""Kernel, compiled by core/jit.py: how soon microbatches that take turns in the memory of a rank can all return.

Memory for k activations of a stage is k slots: microbatch j + k starts when microbatch j has returned. On their way
down and up the ranks microbatches meet, and where two meet one waits. The kernel follows the microbatches of some of
the k slots through every order in which they can pass each other. docs/search-method.md has the mathematics.

It goes forward in time, action by action. The states of a layer have run equally many actions, those of a group the
same ones. A state has the time when each active microbatch can go on, and when its last action ended.
"""

from __future__ import annotations

from typing import NamedTuple

from zeropipe.core.jit import Floats, Ints
from zeropipe.searching.bounds.subset_kernel import compare_states, state_distance
from zeropipe.searching.row_kernels import NEVER
from zeropipe.searching.tables import Array

TOO_MANY = -1.0  # the answer where states exceed the buffers or the effort
PROGRESS_BITS = 7  # of a key, for the progress of one microbatch


class TurnTables(NamedTuple):
    """The actions of a microbatch from the F of a stage to its I, or its W where that has to end first."""

    num_slots: int  # that are followed
    tolerance: float  # times that differ by less are equal
    rank: Array  # of each action
    duration: Array
    lag: Array  # from the end of an action to the start of the next one
    num_passes: int  # actions up to the I; a W may follow
    to_return: Array  # least time from the start of an action to the end of the I
    wait: float  # from the last action to the start of the microbatch that takes over the slot
    work_left: Array  # of a microbatch on each rank, by its progress
    drain: Array  # least time of each rank beyond its work, after its last F
    last_f: Array  # the action that is a rank's F; -1 if it has none
    after: float  # subtracted: what comes after the last I counts elsewhere
    max_wait: float  # longest time after its end at which an action matters to others
    numbers: Array  # of the microbatches that are followed, and the number of all
    arrival: Array  # of each that is followed


class TurnBuffers(NamedTuple):
    """Scratch arrays. The first axis of keys, sizes, work and states is the layer modulo 2."""

    keys: Array  # of each group: the progress of each active microbatch
    sizes: Array  # number of states of each group
    work: Array  # least time that some rank needs from a group on
    states: Array
    table: Array  # hash table of groups
    progress: Array  # of each active microbatch
    ready: Array  # when its next action can start
    new_progress: Array
    new_ready: Array
    new: Array  # state that is being built
    num_groups: Array  # of the next layer
    num_examined: Array
    stop: Array  # set to 1 by another thread


def earliest_return(tables: TurnTables, buffers: TurnBuffers, cap: float, effort: int) -> float:
    """Return the earliest end of the last I of the microbatches that are followed, or `cap` if it is not before that.

    TOO_MANY where `effort`, a number of states, or the buffers do not suffice.
    """
    length, count, slots = len(tables.rank), len(tables.arrival), tables.num_slots
    best, num_groups = cap, 1
    buffers.keys[0, 0], buffers.sizes[0, 0], buffers.num_examined[0] = 0, 1, 0
    for slot in range(slots):
        buffers.states[0, 0, 0, slot] = tables.arrival[min(slot, count - 1)]
        buffers.states[0, 0, 0, slots + slot] = 0.0
    for layer in range(count * length):
        side = layer % 2
        buffers.num_groups[0] = 0
        for at in range(len(buffers.table)):
            buffers.table[at] = -1
        for group in range(num_groups):
            oldest = unpack_key(tables, buffers, buffers.keys[side, group], layer)
            for index in range(buffers.sizes[side, group]):
                state = buffers.states[side, group, index]
                best = min(best, expand_turn(tables, buffers, layer, oldest, state, cap))
            buffers.num_examined[0] += buffers.sizes[side, group]
            if buffers.num_groups[0] > buffers.keys.shape[1] or buffers.num_examined[0] > effort or buffers.stop[0]:
                return TOO_MANY
        num_groups = buffers.num_groups[0]
    return best


def unpack_key(tables: TurnTables, buffers: TurnBuffers, key: int, layer: int) -> int:
    """Write the progress of the active microbatches; return the number of the oldest."""
    total = 0
    for slot in range(tables.num_slots):
        buffers.progress[slot] = key & ((1 << PROGRESS_BITS) - 1)
        key >>= PROGRESS_BITS
        total += buffers.progress[slot]
    return (layer - total) // len(tables.rank)


def expand_turn(tables: TurnTables, buffers: TurnBuffers, layer: int, oldest: int, state: Floats, cap: float) -> float:
    """Add the successors of a state to the next layer; return the end of the last I if it is among them, else NEVER.

    The action that can end first runs next on its rank, or another one there that can start before that end.
    """
    progress, ready, best, rank = buffers.progress, buffers.ready, NEVER, -1
    active = min(tables.num_slots, len(tables.arrival) - oldest)
    horizon = find_ready(tables, progress, oldest, active, state, ready)
    for one in range(active):
        if ready[one] < NEVER and ready[one] + tables.duration[progress[one]] <= horizon:
            rank = tables.rank[progress[one]]
    for one in range(active):
        end = ready[one] + tables.duration[progress[one]] if ready[one] < NEVER else NEVER
        is_later = ready[one] >= horizon - tables.tolerance and end > horizon
        if is_later or tables.rank[progress[one]] != rank:
            continue
        if progress[one] == tables.num_passes - 1 and oldest + one == len(tables.arrival) - 1:
            best = min(best, end)
        elif advance(tables, buffers, oldest, one, end, state, cap):
            insert_turn(tables, buffers, layer + 1, cap)
    return best


def find_ready(tables: TurnTables, progress: Ints, oldest: int, active: int, state: Floats, ready: Floats) -> float:
    """Write when the next action of each active microbatch can start, or NEVER; return the earliest end of one.

    The last microbatches do not have to run the W that frees a slot.
    """
    horizon, num_left = NEVER, len(tables.arrival) - oldest
    for one in range(active):
        ready[one] = NEVER
        is_done = progress[one] >= tables.num_passes and one + tables.num_slots >= num_left
        if is_done or (one > 0 and progress[one - 1] <= progress[one]):  # it stays behind the one before it
            continue
        ready[one] = state[one]
        horizon = min(horizon, state[one] + tables.duration[progress[one]])
    return horizon


def advance(
    tables: TurnTables, buffers: TurnBuffers, oldest: int, one: int, end: float, state: Floats, cap: float
) -> bool:
    """Write the state after the next action of microbatch `one`, which ends at `end`; False if it exceeds `cap`."""
    slots, count, progress, new = tables.num_slots, len(tables.arrival), buffers.new_progress, buffers.new
    active, at = min(slots, count - oldest), buffers.progress[one]
    for other in range(slots):
        progress[other], new[other], new[slots + other] = buffers.progress[other], state[other], state[slots + other]
        if other < active and tables.rank[progress[other]] == tables.rank[at]:
            new[other] = max(new[other], end)
    new[slots + one] = end
    if one + 1 < active and progress[one + 1] == at:
        new[one + 1] = max(new[one + 1], end + skipped(tables, oldest + one) * tables.duration[at])
    if at + 1 < len(tables.rank):
        progress[one] = at + 1
        new[one] = end + tables.lag[at]
        if one > 0 and progress[one - 1] == at + 2:
            behind = skipped(tables, oldest + one - 1) * tables.duration[at + 1]
            new[one] = max(new[one], new[slots + one - 1] + behind)
    else:  # the oldest is done: another one takes over its slot
        oldest, one = oldest + 1, slots - 1
        for other in range(slots - 1):
            progress[other], new[other], new[slots + other] = (
                progress[other + 1], new[other + 1], new[slots + other + 1]
            )  # fmt: skip
        progress[one], new[slots + one] = 0, 0.0
        new[one] = max(end + tables.wait, tables.arrival[min(oldest + one, count - 1)])
    active = min(slots, count - oldest)
    if one < active:
        for other in range(active):  # its next rank may be busy
            if other != one and progress[other] > 0 and tables.rank[progress[other] - 1] == tables.rank[progress[one]]:
                new[one] = max(new[one], new[slots + other])
    return can_end(tables, buffers, oldest, active, cap)


def skipped(tables: TurnTables, index: int) -> int:
    """Return how many microbatches between two that are followed are not: each runs the same actions between them."""
    return tables.numbers[index + 1] - tables.numbers[index] - 1  # type: ignore[no-any-return]


def can_end(tables: TurnTables, buffers: TurnBuffers, oldest: int, active: int, cap: float) -> bool:
    """Return whether the new state may end before `cap`. Times that no action depends on any more are made equal."""
    slots, progress, new, now = tables.num_slots, buffers.new_progress, buffers.new, NEVER
    find_ready(tables, progress, oldest, active, new, buffers.new_ready)
    for one in range(active):
        now = min(now, buffers.new_ready[one])
    for one in range(slots):  # nothing starts before `now`, and what ended long before that does not matter
        new[one] = max(new[one], now) if one < active else 0.0
        new[slots + one] = max(new[slots + one], now - tables.max_wait) if one < active else 0.0
        if one < active and new[one] + tables.to_return[progress[one]] >= cap:
            return False
    new[2 * slots] = now
    return now < NEVER


def insert_turn(tables: TurnTables, buffers: TurnBuffers, layer: int, cap: float) -> None:
    """Add the new state to its group, unless a state of it is nowhere later; states that are nowhere earlier go.

    Where the group is full, the new state is merged into the nearest one, as early as both.
    """
    side, new, width = layer % 2, buffers.new, 2 * tables.num_slots
    group = find_turn_group(tables, buffers, layer)
    if group < 0 or new[width] + buffers.work[side, group] >= cap:
        return
    states, kept = buffers.states[side, group], 0
    for index in range(buffers.sizes[side, group]):
        is_earlier, is_later = compare_states(states[index], new, width, tables.tolerance)
        if not is_later:
            return
        if is_earlier:
            for at in range(width):
                states[kept, at] = states[index, at]
            kept += 1
    buffers.sizes[side, group] = min(kept + 1, len(states))
    if kept < len(states):
        for at in range(width):
            states[kept, at] = new[at]
        return
    chosen = 0
    for index in range(1, kept):
        if state_distance(states[index], new, width) < state_distance(states[chosen], new, width):
            chosen = index
    for at in range(width):
        states[chosen, at] = min(states[chosen, at], new[at])


def find_turn_group(tables: TurnTables, buffers: TurnBuffers, layer: int) -> int:
    """Return the group of the new state, a new one if need be; -1 where there are too many."""
    side, table, key, mixed, total = layer % 2, buffers.table, 0, 0, 0
    for slot in range(tables.num_slots - 1, -1, -1):
        key = (key << PROGRESS_BITS) | buffers.new_progress[slot]
        mixed = (mixed * 1000003 + buffers.new_progress[slot]) & 0xFFFFFFFFFFFF
        total += buffers.new_progress[slot]
    place = (mixed ^ (mixed >> 15)) % len(table)
    while table[place] >= 0 and buffers.keys[side, table[place]] != key:
        place = (place + 1) % len(table)
    if table[place] >= 0:
        return table[place]  # type: ignore[no-any-return]
    group = buffers.num_groups[0]
    if group >= buffers.keys.shape[1]:
        buffers.num_groups[0] = group + 1
        return -1
    buffers.num_groups[0] += 1
    table[place], buffers.keys[side, group], buffers.sizes[side, group] = group, key, 0
    buffers.work[side, group] = least_work_left(tables, buffers.new_progress, (layer - total) // len(tables.rank))
    return group  # type: ignore[no-any-return]


def least_work_left(tables: TurnTables, progress: Ints, oldest: int) -> float:
    """Return the least time that some rank needs from a group on."""
    count, most = len(tables.arrival), 0.0
    active = min(tables.num_slots, count - oldest)
    for rank in range(tables.work_left.shape[1]):
        left = (tables.numbers[count] - tables.numbers[oldest + active]) * tables.work_left[0, rank]
        for one in range(active):
            left += (skipped(tables, oldest + one) + 1) * tables.work_left[progress[one], rank]
        if oldest + active < count or progress[active - 1] <= tables.last_f[rank]:
            left += tables.drain[rank]
        most = max(most, left)
    return most - tables.after
