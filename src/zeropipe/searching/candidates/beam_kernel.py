"""Kernel, compiled by core/jit.py: a beam search that extends many partial schedules side by side, pass by pass.

The partial schedules of a layer have run equally many passes. Each can be extended by every pass that can start next.
Of extensions that have run the same passes, one that is nowhere earlier is left out. Of the others the best by rating
go on: by the least time that everything takes, and by how long all ranks have waited.

A microbatch that starts early takes memory at once and helps much later. So in a grouped beam half of the places are
shared evenly among schedules that have started equally many microbatches.
"""

from __future__ import annotations

from typing import NamedTuple

from zeropipe.core.jit import Floats, Ints
from zeropipe.searching.bounds.subset_kernel import SubsetTables, blocks_older
from zeropipe.searching.row_kernels import NEVER, lacks_memory
from zeropipe.searching.tables import Array, PassTables
from zeropipe.sim.fill import fits_gap

MAX_ALIKE = 4  # partial schedules of a layer that have run the same passes
GROUPED_PART = 0.5  # of the places are shared among the groups


class BeamSetting(NamedTuple):
    """How partial schedules are extended and rated."""

    mean_weight: float  # of the mean over all ranks, beside the least time that everything takes
    min_fit: Array  # by rank: part of a W that must fit into a gap
    max_live: Array  # activations of each stage that may be live
    is_grouped: bool


class BeamTables(NamedTuple):
    """What the kernel reads of a task."""

    passes: PassTables
    ranks: SubsetTables  # of all ranks
    rank_work: Array  # of all microbatches, less the start of the rank's span
    tolerance: float  # times that differ by less are equal


class BeamBuffers(NamedTuple):
    """Scratch arrays. Those of partial schedules begin with an axis of two layers and one of the beam's width."""

    counts: Array  # microbatches that each pass has run
    next_pass: Array  # of each microbatch under way ...
    arrival: Array  # ... and when its input is there
    w_done: Array  # parts of W of each stage
    free: Array  # when each rank is free
    waited: Array  # how long each rank has waited
    level: Array  # memory of each rank
    pending: Array  # duration of each rank's pending W
    latest: Array  # start of a pass
    hashes: Array  # of the passes that have run
    table: Array  # hash table of partial schedules
    spare_done: Array  # by stage
    begin: Array  # of each pass that may come next: its start, NEVER if it cannot come ...
    num_w: Array  # ... parts of W that run before it ...
    then_level: Array  # ... and level, waited and pending of its rank then
    then_waited: Array
    then_pending: Array
    rating: Array  # of each extension ...
    origin: Array  # ... the partial schedule ...
    choice: Array  # ... the pass ...
    ext_begin: Array  # ... and begin, num_w, level, waited and pending as above
    ext_num_w: Array
    ext_level: Array
    ext_waited: Array
    ext_pending: Array
    heap: Array  # of extensions by rating
    postponed: Array  # extensions whose group has its places
    group_size: Array  # by number of microbatches started: -1 where no extension has it
    parent: Array  # of each layer and partial schedule: the one it extends ...
    chosen: Array  # ... and by which pass
    stop: Array  # set to 1 by another thread


def grow_beam(tables: BeamTables, buffers: BeamBuffers, setting: BeamSetting, cap: float, width: int) -> int:
    """Extend partial schedules to their end; return how many there are, the best first, or 0 if none ends before `cap`.

    `buffers.parent` and `buffers.chosen` give the passes of each.
    """
    clear_first(buffers)
    num_kept = 1
    for layer in range(len(tables.passes.rank) * tables.passes.num_microbatches):
        if buffers.stop[0]:
            return 0
        num_extensions = 0
        for index in range(num_kept):
            horizon = find_extensions(tables, buffers, setting, layer % 2, index)
            num_extensions = rate_extensions(tables, buffers, setting, layer % 2, index, horizon, cap, num_extensions)
        num_kept = select_extensions(tables, buffers, setting, layer, width, num_extensions)
        if num_kept == 0:
            break
    return num_kept


def clear_first(buffers: BeamBuffers) -> None:
    """Begin with one partial schedule in which nothing has run."""
    for x in range(buffers.counts.shape[2]):
        buffers.counts[0, 0, x] = 0
    for stage in range(buffers.w_done.shape[2]):
        buffers.w_done[0, 0, stage] = 0
    for at in range(buffers.arrival.shape[2]):
        buffers.arrival[0, 0, at] = 0.0
    for rank in range(buffers.free.shape[2]):
        buffers.free[0, 0, rank], buffers.waited[0, 0, rank] = 0.0, 0.0
        buffers.level[0, 0, rank], buffers.pending[0, 0, rank] = 0.0, 0.0
    buffers.latest[0, 0], buffers.hashes[0, 0] = 0.0, 0


def find_extensions(tables: BeamTables, buffers: BeamBuffers, setting: BeamSetting, side: int, index: int) -> float:
    """Find when each pass can start that may come next; return when one of them is certainly done.

    No extension has to start later than that, if the other pass takes no memory that anything needs.
    """
    passes, ranks, counts = tables.passes, tables.ranks, buffers.counts[side, index]
    last, half, horizon = len(passes.rank) - 1, len(passes.w_duration), NEVER
    for x in range(last + 1):
        buffers.begin[x], rank = NEVER, passes.rank[x]
        if counts[x] == passes.num_microbatches or (x > 0 and counts[x - 1] == counts[x]):
            continue
        if x < half and (
            counts[x] - counts[last - x] >= setting.max_live[x]
            or (not ranks.never_deadlocks[rank] and takes_memory_of_older(tables, counts, x))
        ):
            continue
        run_w_before(tables, buffers, setting, side, index, x)
        if buffers.begin[x] >= NEVER:
            continue
        end = buffers.begin[x] + passes.duration[x]
        if x >= half:
            horizon = min(horizon, end + (0.0 if ranks.has_ample_memory[rank] else buffers.then_pending[x]))
            buffers.then_pending[x] += passes.w_duration[last - x] * passes.weight_parts
        elif ranks.never_deadlocks[rank]:
            horizon = min(horizon, end)
    return horizon


def takes_memory_of_older(tables: BeamTables, counts: Ints, x: int) -> bool:
    """Return whether F x would lead to a deadlock."""
    rank, start = tables.passes.rank[x], tables.ranks.stage_start
    return blocks_older(
        x, start[rank], start[rank + 1], tables.passes.limit[rank], counts, tables.passes.memory, tables.ranks.stages
    )


def run_w_before(tables: BeamTables, buffers: BeamBuffers, setting: BeamSetting, side: int, index: int, x: int) -> None:
    """Find when pass x starts if W run before it as in row_kernels.simulate_rows, unless it lacks memory."""
    passes, counts, rank = tables.passes, buffers.counts[side, index], tables.passes.rank[x]
    low, high, needed, num_w = tables.ranks.stage_start[rank], tables.ranks.stage_start[rank + 1], passes.memory[x], 0
    now, level, pending = (
        buffers.free[side, index, rank],
        buffers.level[side, index, rank],
        buffers.pending[side, index, rank],
    )
    ready = buffers.latest[side, index]
    if x > 0:
        ready = max(ready, buffers.arrival[side, index, counts[x] - counts[len(counts) - 1]])
    for at in range(low, high):
        stage = tables.ranks.stages[at]
        buffers.spare_done[stage] = buffers.w_done[side, index, stage]
    while True:
        stage = oldest_w(tables, low, high, counts, buffers.spare_done)
        if stage < 0:
            break
        if not (
            lacks_memory(passes, rank, level, needed)
            or fits_gap(now, ready, passes.w_duration[stage], setting.min_fit[rank])
        ):
            break
        now += passes.w_duration[stage]
        level -= passes.w_memory[stage]
        pending -= passes.w_duration[stage]
        buffers.spare_done[stage] += 1
        num_w += 1
    if lacks_memory(passes, rank, level, needed):
        return
    buffers.begin[x], buffers.num_w[x] = max(now, ready), num_w
    buffers.then_level[x], buffers.then_pending[x] = level + needed, pending
    buffers.then_waited[x] = buffers.waited[side, index, rank] + buffers.begin[x] - now


def oldest_w(tables: BeamTables, low: int, high: int, counts: Ints, w_done: Ints) -> int:
    """Return the stage of a rank whose W is next: the one that has run least, the later of equal ones; -1 if none."""
    found, last = -1, len(counts) - 1
    for at in range(low, high):
        stage = tables.ranks.stages[at]
        is_pending = w_done[stage] < counts[last - stage] * tables.passes.weight_parts
        if is_pending and (found < 0 or w_done[stage] <= w_done[found]):
            found = stage
    return found


def rate_extensions(
    tables: BeamTables, buffers: BeamBuffers, setting: BeamSetting, side: int, index: int, horizon: float, cap: float,
    num_extensions: int,
) -> int:  # fmt: skip
    """Add the extensions of a partial schedule that may end before `cap`; return the new number of extensions."""
    at = num_extensions
    for x in range(len(tables.passes.rank)):
        begin = buffers.begin[x]
        is_later = begin >= horizon - tables.tolerance and begin + tables.passes.duration[x] > horizon
        if begin >= NEVER or is_later or at == len(buffers.rating):
            continue
        by_rank, total = least_by_ranks(tables, buffers, side, index, x)
        least = max(by_rank, least_by_microbatches(tables, buffers, side, index, x))
        if least < cap:
            buffers.rating[at] = least + setting.mean_weight * total / len(tables.rank_work)
            buffers.origin[at], buffers.choice[at], buffers.ext_begin[at] = index, x, begin
            buffers.ext_num_w[at], buffers.ext_level[at] = buffers.num_w[x], buffers.then_level[x]
            buffers.ext_waited[at], buffers.ext_pending[at] = buffers.then_waited[x], buffers.then_pending[x]
            at += 1
    return at


def least_by_ranks(tables: BeamTables, buffers: BeamBuffers, side: int, index: int, x: int) -> tuple[float, float]:
    """Return the largest least end of all ranks if pass x comes next, by work, waiting and drain; and their sum."""
    least, total = 0.0, 0.0
    for rank in range(len(tables.rank_work)):
        waited, last_f = buffers.then_waited[x], tables.ranks.last_f[rank]
        if rank != tables.passes.rank[x]:
            busy_until = buffers.free[side, index, rank] + buffers.pending[side, index, rank]
            waited = buffers.waited[side, index, rank] + max(0.0, buffers.begin[x] - busy_until)
        end = waited + tables.rank_work[rank]
        if buffers.counts[side, index, last_f] + (last_f == x) < tables.passes.num_microbatches:
            end += tables.ranks.drain[rank]
        total += end
        least = max(least, end)
    return least, total


def least_by_microbatches(tables: BeamTables, buffers: BeamBuffers, side: int, index: int, x: int) -> float:
    """Return the least end by the path that is left to each microbatch if pass x comes next."""
    passes, counts, begin, least = tables.passes, buffers.counts[side, index], buffers.begin[x], 0.0
    last, rank, end = len(counts) - 1, passes.rank[x], begin + passes.duration[x]
    oldest = counts[last]
    for microbatch in range(oldest, min(counts[0] + 1, passes.num_microbatches)):
        y, arrival = 0, 0.0
        if microbatch == counts[x]:
            y, arrival = x + 1, end + passes.lag[x]
        elif microbatch < counts[0]:
            y = buffers.next_pass[side, index, microbatch - oldest]
            arrival = buffers.arrival[side, index, microbatch - oldest]
        if y <= last:
            free = end if passes.rank[y] == rank else buffers.free[side, index, passes.rank[y]]
            least = max(least, max(arrival, free, begin) + tables.ranks.to_end[y, microbatch])
    return least


def select_extensions(
    tables: BeamTables, buffers: BeamBuffers, setting: BeamSetting, layer: int, width: int, num_extensions: int
) -> int:
    """Make the best extensions the partial schedules of the next layer; return how many there are."""
    side, heap, num_left = layer % 2, buffers.heap, num_extensions
    max_group_size = share_places(buffers, side, width, num_extensions) if setting.is_grouped else width
    for at in range(num_left):
        heap[at] = at
    for at in range(num_left // 2 - 1, -1, -1):
        sift_down(heap, buffers.rating, at, num_left)
    for slot in range(len(buffers.table)):
        buffers.table[slot] = -1
    num_kept, num_postponed, next_postponed = 0, 0, 0
    while num_kept < width and (num_left > 0 or next_postponed < num_postponed):
        is_first_try = num_left > 0
        if is_first_try:
            extension = heap[0]
            num_left -= 1
            heap[0] = heap[num_left]
            sift_down(heap, buffers.rating, 0, num_left)
        else:
            extension = buffers.postponed[next_postponed]
            next_postponed += 1
        group = num_started(buffers, side, extension)
        if setting.is_grouped and is_first_try and buffers.group_size[group] == max_group_size:
            buffers.postponed[num_postponed] = extension  # it may get a place that is left in the end
            num_postponed += 1
        elif add_schedule(tables, buffers, layer, extension, num_kept):
            buffers.group_size[group] += is_first_try
            num_kept += 1
    return num_kept


def num_started(buffers: BeamBuffers, side: int, extension: int) -> int:
    """Return how many microbatches an extension has started: its group."""
    return buffers.counts[side, buffers.origin[extension], 0] + (buffers.choice[extension] == 0)  # type: ignore[no-any-return]


def share_places(buffers: BeamBuffers, side: int, width: int, num_extensions: int) -> int:
    """Count the groups of the extensions, and return how many places each gets."""
    num_groups = 0
    for group in range(len(buffers.group_size)):
        buffers.group_size[group] = -1
    for extension in range(num_extensions):
        group = num_started(buffers, side, extension)
        num_groups += buffers.group_size[group] < 0
        buffers.group_size[group] = 0
    return max(1, int(GROUPED_PART * width) // num_groups) if num_groups > 1 else width


def add_schedule(tables: BeamTables, buffers: BeamBuffers, layer: int, extension: int, place: int) -> bool:
    """Write an extension as a partial schedule of the next layer; False if one that is no later is there already."""
    side, other, passes = layer % 2, 1 - layer % 2, tables.passes
    index, x, begin = buffers.origin[extension], buffers.choice[extension], buffers.ext_begin[extension]
    counts, last, rank = buffers.counts[side, index], len(passes.rank) - 1, passes.rank[x]
    num_done, window = 1 if x == last else 0, buffers.arrival.shape[2]  # the oldest microbatch may be done
    number, num_under_way = counts[x] - counts[last], counts[0] - counts[last] + (1 if x == 0 else 0) - num_done
    for at in range(window):
        is_shifted_in = at + num_done < window
        buffers.arrival[other, place, at] = buffers.arrival[side, index, at + num_done] if is_shifted_in else 0.0
    if x < last:
        buffers.arrival[other, place, number] = begin + passes.duration[x] + passes.lag[x]
    for at in range(num_under_way):
        buffers.arrival[other, place, at] = max(buffers.arrival[other, place, at], begin)
    for one in range(len(tables.rank_work)):
        buffers.free[other, place, one] = buffers.free[side, index, one]
        buffers.waited[other, place, one] = buffers.waited[side, index, one]
        buffers.level[other, place, one] = buffers.level[side, index, one]
        buffers.pending[other, place, one] = buffers.pending[side, index, one]
    buffers.free[other, place, rank], buffers.latest[other, place] = begin + passes.duration[x], begin
    buffers.waited[other, place, rank] = buffers.ext_waited[extension]
    buffers.level[other, place, rank] = buffers.ext_level[extension]
    buffers.pending[other, place, rank] = buffers.ext_pending[extension]
    buffers.hashes[other, place] = buffers.hashes[side, index] + tables.ranks.hash[x]
    if not insert_hash(tables, buffers, other, place):
        return False
    for y in range(last + 1):
        buffers.counts[other, place, y] = counts[y] + (y == x)
    for stage in range(len(passes.w_duration)):
        buffers.w_done[other, place, stage] = buffers.w_done[side, index, stage]
    start = tables.ranks.stage_start
    for _ in range(buffers.ext_num_w[extension]):
        stage = oldest_w(tables, start[rank], start[rank + 1], counts, buffers.w_done[other, place])
        buffers.w_done[other, place, stage] += 1
    for at in range(window - num_done):
        buffers.next_pass[other, place, at] = buffers.next_pass[side, index, at + num_done]
    if x < last:
        buffers.next_pass[other, place, number] = x + 1
    buffers.parent[layer, place], buffers.chosen[layer, place] = index, x
    return True


def insert_hash(tables: BeamTables, buffers: BeamBuffers, side: int, place: int) -> bool:
    """Put a partial schedule into the hash table; False if one with the same passes is nowhere later.

    Those in the table have better ratings. No more than MAX_ALIKE - 1 with the same passes are compared.
    """
    key, table, num_alike = buffers.hashes[side, place], buffers.table, 0
    slot = (key ^ (key >> 29)) % len(table)
    while table[slot] >= 0:
        if buffers.hashes[side, table[slot]] == key:
            num_alike += 1
            if num_alike == MAX_ALIKE or not is_later_somewhere(tables, buffers, side, table[slot], place):
                return False
        slot = (slot + 1) % len(table)
    table[slot] = place
    return True


def is_later_somewhere(tables: BeamTables, buffers: BeamBuffers, side: int, one: int, other: int) -> bool:
    """Return whether some time of a partial schedule is later than that of another one."""
    if buffers.latest[side, one] > buffers.latest[side, other] + tables.tolerance:
        return True
    for at in range(buffers.arrival.shape[2]):
        if buffers.arrival[side, one, at] > buffers.arrival[side, other, at] + tables.tolerance:
            return True
    for rank in range(buffers.free.shape[2]):
        if buffers.free[side, one, rank] > buffers.free[side, other, rank] + tables.tolerance:
            return True
        if buffers.waited[side, one, rank] > buffers.waited[side, other, rank] + tables.tolerance:
            return True
    return False


def sift_down(heap: Ints, rating: Floats, at: int, size: int) -> None:
    """Restore the order of a heap below index `at`; of equal ratings the first is better."""
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
