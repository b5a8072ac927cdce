"""Kernel, compiled by core/jit.py: the earliest end of everything if only a few ranks are busy and have memory limits.

On the other ranks each microbatch is as fast as alone. The kernel explores all orders in which these ranks can run
their passes, forward in time and layer by layer: the states of a layer have run equally many passes, and those of a
group the same passes. docs/search-method.md has the mathematics.

W may run in any order. Where the W of a rank are whole, those pending when a pass begins are whole parts that memory
has space for (pending_w.py). A pass then has two choices: it begins as soon as it can, and a W that it would interrupt
stays pending as a whole; or it waits until the next W ends. Elsewhere passes may interrupt W, which run whenever their
rank waits.
"""

from __future__ import annotations

from typing import NamedTuple

from zeropipe.core.jit import Floats, Ints
from zeropipe.searching.bounds.pending_w import PendingW
from zeropipe.searching.row_kernels import NEVER
from zeropipe.searching.tables import Array

COMPARISONS_PER_STATE = 8  # comparing a state with this many others takes as long as expanding it
ROUNDING_PARTS = 1e-9  # relative: a number of parts of W that is this much above an integer is that integer


class SubsetTables(NamedTuple):
    """The passes of the ranks of a subset along a microbatch's path: F of all their stages, then I in reverse order."""

    num_microbatches: int
    tolerance: float  # times that differ by less are equal
    rank: Array  # of each pass: its index in the subset
    duration: Array  # of each pass
    lag: Array  # from its end to the start of the next one, over ranks outside the subset
    arrival: Array  # of each microbatch at the first pass
    work: Array  # of each pass with its W
    to_end: Array  # least time from the start of a pass of a microbatch to the end of everything
    w_duration: Array  # of each stage
    activation: Array  # memory of each stage
    stash: Array  # memory that the W of each stage keeps
    limit: Array  # memory of each rank
    part_memory: Array  # most memory that a part of a W frees, by rank
    part_duration: Array  # of the shortest such part
    w_per_memory: Array  # least time of W per memory that they free
    drain: Array  # least time of each rank beyond its work, after its last F
    last_f: Array  # the pass that is its last F
    span_start: Array  # subtracted from the end of each rank, where spans count
    has_ample_memory: Array  # for all microbatches, by rank
    never_deadlocks: Array  # no F of the rank can take the memory that another needs
    stage_start: Array  # index of each rank's first stage in `stages`
    stages: Array  # of each rank, rank by rank
    hash: Array  # random number of each pass: their sum identifies a group, nearly always
    pending: PendingW


class SubsetBuffers(NamedTuple):
    """Scratch arrays. The first axis of counts, hashes, first, next and states is the layer modulo 2."""

    counts: Array  # of each group: microbatches that each pass has run
    hashes: Array  # of each group
    first: Array  # state of each group ...
    next: Array  # ... and the one behind each state in its group; -1 at the end
    states: Array  # by rank since when it is free, by rank when its pending W would end, arrivals of microbatches
    table: Array  # hash table of groups
    slots: Array  # that are taken in the table
    start: Array  # of each pass, for two choices of its pending W ...
    w_end: Array  # ... with which W would end here if the pass did not run
    delay: Array  # least start of a pass after the end of all pending W, negative; NEVER where it cannot run
    spare_memory: Array  # of each pass: for pending W at its start
    successor: Array  # group that follows by each pass, or -1
    new: Array  # state that is being built
    next_pass: Array  # of each microbatch that is under way
    work_left: Array  # of each rank
    level: Array  # memory of each rank if no W has run
    stashed: Array  # part of `level` that W free
    w_total: Array  # duration of all W whose I have run
    num_groups: Array  # of the next layer
    num_states: Array  # of the next layer; MAX + 1 where they were too many
    num_compared: Array
    num_examined: Array  # states, in all
    is_complete: Array  # whether all layers were explored
    has_merged: Array  # whether states became one
    stop: Array  # set to 1 by another thread


def subset_bound(tables: SubsetTables, buffers: SubsetBuffers, cap: float, max_kept: int, effort: int) -> float:
    """Return the earliest end of everything, or `cap` if it is not earlier than that.

    A group keeps `max_kept` states apart and merges others into these. If `effort`, a number of states, or the buffers
    are used up, the answer is what all states of some layer need at least, and `is_complete` is 0.
    """
    init_layers(tables, buffers)
    best, num_groups = 0.0, 1
    for layer in range(len(tables.rank) * tables.num_microbatches):
        side, lowest = layer % 2, NEVER
        clear_groups(buffers)
        for group in range(num_groups):
            summarize_group(tables, buffers, buffers.counts[side, group])
            index = buffers.first[side, group]
            while index >= 0 and not is_full(buffers):
                buffers.num_examined[0] += 1
                lowest = min(lowest, expand_state(tables, buffers, side, group, index, cap, max_kept))
                index = buffers.next[side, index]
            if is_full(buffers) or buffers.stop[0] or total_effort(buffers) > effort:
                return best
        num_groups = buffers.num_groups[0]
        best = max(best, min(lowest, cap))
    buffers.is_complete[0] = 1
    return best


def total_effort(buffers: SubsetBuffers) -> int:
    """Return the effort so far, in states."""
    return buffers.num_examined[0] + buffers.num_compared[0] // COMPARISONS_PER_STATE  # type: ignore[no-any-return]


def is_full(buffers: SubsetBuffers) -> bool:
    """Return whether the next layer has more states than the buffers hold."""
    return buffers.num_states[0] > buffers.states.shape[1]  # type: ignore[no-any-return]


def init_layers(tables: SubsetTables, buffers: SubsetBuffers) -> None:
    """Begin with one group of one state in which nothing has run."""
    for x in range(len(tables.rank)):
        buffers.counts[0, 0, x] = 0
    for at in range(2 * len(tables.limit)):
        buffers.states[0, 0, at] = 0.0
    buffers.first[0, 0], buffers.next[0, 0], buffers.hashes[0, 0] = 0, -1, 0
    buffers.num_groups[0], buffers.num_examined[0], buffers.num_compared[0] = 0, 0, 0
    buffers.is_complete[0], buffers.has_merged[0] = 0, 0
    for at in range(len(buffers.table)):
        buffers.table[at] = -1


def clear_groups(buffers: SubsetBuffers) -> None:
    """Begin the next layer without groups and states."""
    for group in range(buffers.num_groups[0]):
        buffers.table[buffers.slots[group]] = -1
    buffers.num_groups[0], buffers.num_states[0] = 0, 0


def summarize_group(tables: SubsetTables, buffers: SubsetBuffers, counts: Ints) -> None:
    """Compute what all states of a group have in common: work and memory of each rank, and which passes can run."""
    last, m = len(tables.rank) - 1, tables.num_microbatches
    for rank in range(len(tables.limit)):
        has_f_left = counts[tables.last_f[rank]] < m
        buffers.work_left[rank] = -tables.span_start[rank] + (tables.drain[rank] if has_f_left else 0.0)
        buffers.level[rank], buffers.stashed[rank], buffers.w_total[rank] = 0.0, 0.0, 0.0
    for x in range(last + 1):
        buffers.work_left[tables.rank[x]] += (m - counts[x]) * tables.work[x]
    for stage in range(len(tables.w_duration)):
        rank, num_back = tables.rank[stage], counts[last - stage]
        stashed = num_back * tables.stash[stage]
        buffers.level[rank] += (counts[stage] - num_back) * tables.activation[stage] + stashed
        buffers.stashed[rank] += stashed
        buffers.w_total[rank] += num_back * tables.w_duration[stage]
    for x in range(last + 1):
        buffers.successor[x] = -1
        has_input = counts[x] < m and (x == 0 or counts[x - 1] > counts[x])
        buffers.delay[x] = pass_delay(tables, buffers, counts, x) if has_input else NEVER
    x = last
    for microbatch in range(counts[last], counts[0]):
        while counts[x] <= microbatch:  # younger microbatches have not run more passes
            x -= 1
        buffers.next_pass[microbatch - counts[last]] = x + 1


def pass_delay(tables: SubsetTables, buffers: SubsetBuffers, counts: Ints, x: int) -> float:
    """Return how long before the end of all pending W a pass may start at the earliest, negative; NEVER if it cannot.

    -NEVER where memory does not matter. Where W are whole, `spare_memory` gets what pending W may keep.
    """
    rank, is_f = tables.rank[x], x < len(tables.w_duration)
    if is_f and not tables.never_deadlocks[rank] and deadlocks(tables, counts, x):
        return NEVER
    if has_whole_w(tables, rank):
        live = buffers.level[rank] - buffers.stashed[rank] + (tables.activation[x] if is_f else 0.0)
        rounding = ROUNDING_PARTS * tables.activation[min(x, len(tables.rank) - 1 - x)]
        buffers.spare_memory[x] = tables.limit[rank] + rounding - live
        return NEVER if is_f and buffers.spare_memory[x] < 0 else -NEVER
    if not is_f:
        return -NEVER
    excess = buffers.level[rank] + tables.activation[x] - tables.limit[rank]
    if excess <= 0:
        return -NEVER
    if excess > buffers.stashed[rank] + ROUNDING_PARTS * tables.activation[x]:
        return NEVER
    num_parts = int(excess / tables.part_memory[rank] + 1 - ROUNDING_PARTS)
    w_run = max(num_parts * tables.part_duration[rank], excess * tables.w_per_memory[rank])
    return w_run - buffers.w_total[rank]  # type: ignore[no-any-return]


def has_whole_w(tables: SubsetTables, rank: int) -> bool:
    """Return whether no pass of this rank interrupts a W."""
    return tables.pending.start[rank] < tables.pending.start[rank + 1]  # type: ignore[no-any-return]


def deadlocks(tables: SubsetTables, counts: Ints, x: int) -> bool:
    """Return whether F x would take memory that an older microbatch needs for its later stages."""
    rank = tables.rank[x]
    return blocks_older(
        x, tables.stage_start[rank], tables.stage_start[rank + 1], tables.limit[rank], counts, tables.activation,
        tables.stages,
    )  # fmt: skip


def blocks_older(x: int, low: int, high: int, limit: float, counts: Ints, activation: Floats, stages: Ints) -> bool:
    """Return whether F x would take memory that an older microbatch needs for its later stages on this rank.

    Then all ranks would wait forever: no I of the rank runs before the oldest microbatch has run all its F there, and
    the activations of younger ones stay. The stages of the rank are `stages[low:high]`.
    """
    last, level, oldest = len(counts) - 1, activation[x], counts[x]
    for at in range(low, high):
        stage = stages[at]
        level += (counts[stage] - counts[last - stage]) * activation[stage]
        oldest = min(oldest, counts[last - stage])
    for microbatch in range(oldest, counts[x] + 1):
        held, missing = 0.0, 0.0
        for at in range(low, high):
            stage = stages[at]
            if microbatch < counts[stage] or (stage == x and microbatch == counts[x]):
                held += activation[stage] if microbatch >= counts[last - stage] else 0.0
            else:
                missing += activation[stage]
        if level + missing > limit:
            return True
        level -= held
    return False


def expand_state(
    tables: SubsetTables, buffers: SubsetBuffers, side: int, group: int, index: int, cap: float, max_kept: int
) -> float:
    """Add the successors of a state to the next layer; return what they need at least, or NEVER if there are none."""
    counts, state, lowest = buffers.counts[side, group], buffers.states[side, index], NEVER
    least_end = least_end_of(tables, buffers, counts, state)
    horizon = find_starts(tables, buffers, counts, state)
    for choice in range(2 * len(tables.rank)):
        x, begin = choice // 2, buffers.start[choice]
        is_later = begin >= horizon - tables.tolerance and begin + tables.duration[x] > horizon + tables.tolerance
        if begin >= NEVER or is_later:
            continue
        end = max(least_end, least_end_after(tables, buffers, counts, state, choice, cap))
        if end >= cap:
            continue
        lowest = min(lowest, end)
        size = write_successor(tables, buffers, counts, state, choice)
        if buffers.successor[x] < 0:
            buffers.successor[x] = find_group(tables, buffers, side, group, x)
        if is_full(buffers):
            break
        insert_state(buffers, 1 - side, buffers.successor[x], size, tables.tolerance, max_kept)
        if is_full(buffers):
            break
    return lowest


def least_end_of(tables: SubsetTables, buffers: SubsetBuffers, counts: Ints, state: Floats) -> float:
    """Return the earliest end of everything from a state on."""
    ranks, oldest, youngest, end = len(tables.limit), counts[len(counts) - 1], counts[0], 0.0
    if youngest < tables.num_microbatches:
        end = max(tables.arrival[youngest], state[tables.rank[0]]) + tables.to_end[0, youngest]
    for rank in range(ranks):
        end = max(end, state[ranks + rank] + buffers.work_left[rank])
    for at in range(youngest - oldest):
        x = buffers.next_pass[at]
        end = max(end, max(state[2 * ranks + at], state[tables.rank[x]]) + tables.to_end[x, oldest + at])
    return end


def find_starts(tables: SubsetTables, buffers: SubsetBuffers, counts: Ints, state: Floats) -> float:
    """Find when each pass can start; return when one of them is certainly done.

    No successor has to start later than that: the other pass would fit before it, and nothing would be later.
    """
    ranks, half, horizon = len(tables.limit), len(tables.w_duration), NEVER
    for x in range(len(tables.rank)):
        buffers.start[2 * x], buffers.start[2 * x + 1] = NEVER, NEVER
        if buffers.delay[x] >= NEVER:
            continue
        rank = tables.rank[x]
        arrival = tables.arrival[counts[0]] if x == 0 else state[2 * ranks + counts[x] - counts[len(counts) - 1]]
        begin, w_end = max(state[rank], arrival), state[ranks + rank]
        if has_whole_w(tables, rank):
            choice = choose_pending(tables, buffers, x, begin, max(w_end, begin))
            if choice < 0:
                continue
            done = buffers.w_end[choice]
            if x >= half:  # W have run by then
                done = max(done, buffers.start[choice] + w_end - state[rank])
            is_certain = x >= half or tables.never_deadlocks[rank]
        else:
            if x < half:
                begin = max(begin, w_end + buffers.delay[x])
            buffers.start[2 * x], buffers.w_end[2 * x] = begin, max(w_end, begin)
            done = begin
            if x >= half and not tables.has_ample_memory[rank]:
                done += w_end - state[rank]
            is_certain = x >= half or tables.never_deadlocks[rank]
        if is_certain:
            horizon = min(horizon, done + tables.duration[x])
    return horizon


def choose_pending(tables: SubsetTables, buffers: SubsetBuffers, x: int, begin: float, w_end: float) -> int:
    """Find the two starts of a pass whose rank has whole W pending until `w_end`; return the first choice, or -1."""
    rank = tables.rank[x]
    above, below = nearest_pending(
        tables.pending, tables.pending.start[rank], tables.pending.start[rank + 1], w_end - begin,
        buffers.spare_memory[x], tables.tolerance,
    )  # fmt: skip
    if below > -NEVER:
        buffers.start[2 * x + 1], buffers.w_end[2 * x + 1] = w_end - below, w_end
    if above < NEVER:
        buffers.start[2 * x], buffers.w_end[2 * x] = begin, begin + above
        return 2 * x
    return 2 * x + 1 if below > -NEVER else -1


def nearest_pending(
    pending: PendingW, low: int, high: int, time: float, memory: float, tolerance: float
) -> tuple[float, float]:
    """Return how long pending W can last: the least duration that is not below `time`, and the largest below.

    The durations of the rank are in `pending` from `low` to `high`, in ascending order; those that keep more than
    `memory` are left out. NEVER, or -NEVER, where there is none; if `time` itself is one, there is no second answer.
    """
    at, stop = low, high
    while at < stop:
        middle = (at + stop) // 2
        if pending.duration[middle] < time - tolerance:
            at = middle + 1
        else:
            stop = middle
    above, below = NEVER, -NEVER
    for one in range(at, high):
        if pending.memory[one] <= memory:
            above = pending.duration[one]
            break
    if above <= time + tolerance:
        return time, -NEVER
    for one in range(at - 1, low - 1, -1):
        if pending.memory[one] <= memory:
            below = pending.duration[one]
            break
    return above, below


def least_end_after(
    tables: SubsetTables, buffers: SubsetBuffers, counts: Ints, state: Floats, choice: int, cap: float
) -> float:
    """Return the earliest end of everything if a choice is made; anything from `cap` on if it is not below `cap`."""
    ranks, x, begin = len(tables.limit), choice // 2, buffers.start[choice]
    rank, microbatch, oldest, done = tables.rank[x], counts[x], counts[len(counts) - 1], begin + tables.duration[x]
    end = max(begin + tables.to_end[x, microbatch], buffers.w_end[choice] + buffers.work_left[rank])
    for other in range(ranks):
        end = max(end, max(state[ranks + other], begin) + buffers.work_left[other])
    if end >= cap:
        return end  # type: ignore[no-any-return]
    if x + 1 < len(counts):
        free = done if tables.rank[x + 1] == rank else max(begin, state[tables.rank[x + 1]])
        end = max(end, max(done + tables.lag[x], free) + tables.to_end[x + 1, microbatch])
    youngest = counts[0] + 1 if x == 0 else counts[0]
    if youngest < tables.num_microbatches:
        free = done if rank == tables.rank[0] else begin
        end = max(end, max(tables.arrival[youngest], free) + tables.to_end[0, youngest])
    for at in range(counts[0] - oldest):
        if at != microbatch - oldest:
            y = buffers.next_pass[at]
            end = max(end, (done if tables.rank[y] == rank else begin) + tables.to_end[y, oldest + at])
    return end  # type: ignore[no-any-return]


def write_successor(tables: SubsetTables, buffers: SubsetBuffers, counts: Ints, state: Floats, choice: int) -> int:
    """Write the state that follows by a choice into `buffers.new`; return its size. Nothing starts before it."""
    ranks, last, x, begin, new = len(tables.limit), len(counts) - 1, choice // 2, buffers.start[choice], buffers.new
    rank, end = tables.rank[x], begin + tables.duration[x]
    for other in range(2 * ranks):
        new[other] = max(state[other], begin)
    new[rank] = end
    new[ranks + rank] = buffers.w_end[choice] + tables.work[x]
    num_done = 1 if x == last else 0  # then the oldest microbatch is done
    size = 2 * ranks + counts[0] + (1 if x == 0 else 0) - counts[last] - num_done
    for at in range(2 * ranks, size):
        new[at] = max(state[at + num_done], begin)
    if x < last:
        new[2 * ranks + counts[x] - counts[last]] = end + tables.lag[x]
    return size  # type: ignore[no-any-return]


def find_group(tables: SubsetTables, buffers: SubsetBuffers, side: int, group: int, x: int) -> int:
    """Return the group of the next layer that follows from a group by pass x; a new one if need be."""
    counts, other, table = buffers.counts[side, group], 1 - side, buffers.table
    key = buffers.hashes[side, group] + tables.hash[x]
    slot = (key ^ (key >> 29)) % len(table)
    while table[slot] >= 0:
        is_same = buffers.hashes[other, table[slot]] == key
        if is_same:
            for y in range(len(counts)):
                is_same = is_same and buffers.counts[other, table[slot], y] == counts[y] + (y == x)
        if is_same:
            return table[slot]  # type: ignore[no-any-return]
        slot = (slot + 1) % len(table)
    new = buffers.num_groups[0]
    if buffers.num_states[0] == buffers.states.shape[1]:
        buffers.num_states[0] += 1
        return -1
    table[slot], buffers.slots[new], buffers.hashes[other, new], buffers.first[other, new] = new, slot, key, -1
    for y in range(len(counts)):
        buffers.counts[other, new, y] = counts[y] + (y == x)
    buffers.num_groups[0] += 1
    return new  # type: ignore[no-any-return]


def insert_state(buffers: SubsetBuffers, side: int, group: int, size: int, tolerance: float, max_kept: int) -> None:
    """Add `buffers.new` to a group, unless a state of it is nowhere later; states that are nowhere earlier go.

    Where the group has `max_kept` states already, the new one is merged into one of them.
    """
    first, next_state, states, new = buffers.first, buffers.next[side], buffers.states[side], buffers.new
    index, previous, freed, num_kept = first[side, group], -1, -1, 0
    while index >= 0:
        buffers.num_compared[0] += 1
        is_earlier, is_later = compare_states(states[index], new, size, tolerance)
        if not is_later:
            return
        if is_earlier:
            num_kept += 1
            previous = index
        else:
            freed = index
            if previous < 0:
                first[side, group] = next_state[index]
            else:
                next_state[previous] = next_state[index]
        index = next_state[index]
    num_states = buffers.num_states[0]
    if freed < 0 and (num_kept >= max_kept or (num_states == len(states) and num_kept > 0)):
        merge_state(buffers, side, group, size)
        return
    if freed < 0:
        buffers.num_states[0] += 1
        if num_states == len(states):
            return
        freed = num_states
    for at in range(size):
        states[freed, at] = new[at]
    next_state[freed] = first[side, group]
    first[side, group] = freed


def compare_states(state: Floats, other: Floats, size: int, tolerance: float) -> tuple[bool, bool]:
    """Return whether some time of a state is earlier than that of another one, and whether some is later."""
    is_earlier, is_later = False, False
    for at in range(size):
        if state[at] < other[at] - tolerance:
            is_earlier = True
        elif state[at] > other[at] + tolerance:
            is_later = True
        if is_earlier and is_later:
            break
    return is_earlier, is_later


def state_distance(state: Floats, other: Floats, size: int) -> float:
    """Return the sum of the differences of two states."""
    distance = 0.0
    for at in range(size):
        distance += abs(state[at] - other[at])
    return distance


def merge_state(buffers: SubsetBuffers, side: int, group: int, size: int) -> None:
    """Merge `buffers.new` into the nearest state of a group: the result is as early as both."""
    states, new = buffers.states[side], buffers.new
    buffers.has_merged[0] = 1
    nearest, chosen, index = NEVER, -1, buffers.first[side, group]
    while index >= 0:
        distance = state_distance(states[index], new, size)
        if distance < nearest:
            nearest, chosen = distance, index
        index = buffers.next[side, index]
    for at in range(size):
        states[chosen, at] = min(states[chosen, at], new[at])
