"""Kernels, compiled by core/jit.py, that simulate rows and that write rows by a dispatch rule (see tables.py)."""

from __future__ import annotations

from zeropipe.core.jit import Floats, Ints, entry_point
from zeropipe.searching.tables import DispatchRule, PassTables, RowBuffers
from zeropipe.sim.fill import fits_gap, is_ready

NEVER = 1e300  # later than any time


@entry_point
def simulate_rows(tables: PassTables, buffers: RowBuffers, rows: Ints, min_fit: Floats, out: Ints) -> float:
    """Return the makespan of rows, or NEVER where they deadlock or exceed a memory limit.

    A W runs in a gap if at least `min_fit` of it fits, by rank. `buffers` gets first starts, last ends, and what
    `find_critical_path` needs. `out` is either empty or gets all actions: pass numbers, and num_passes + stage for a
    part of a W.
    """
    num_ranks = len(tables.row_start) - 1
    reset_buffers(tables, buffers)
    for rank in range(num_ranks):
        buffers.stack[rank] = num_ranks - 1 - rank
        if tables.blocking_ends:
            find_steady_state(tables, buffers, rows, rank)
    top = num_ranks
    while top > 0:
        top = simulate_rank(tables, buffers, rows, min_fit, out, top - 1)
    if top < 0:
        return NEVER
    makespan = 0.0
    for rank in range(num_ranks):
        if buffers.cursor[rank] < tables.row_start[rank + 1]:
            return NEVER
        makespan = max(makespan, buffers.last_end[rank])
    return makespan


def reset_buffers(tables: PassTables, buffers: RowBuffers) -> None:
    """Set all ranks to the begin of their rows: only the first pass of the microbatches has its input."""
    for at in range(len(buffers.arrived)):
        buffers.arrived[at] = NEVER
    for at in range(tables.num_microbatches):
        buffers.arrived[at] = 0.0
    for at in range(len(buffers.link_free)):
        buffers.link_free[at] = 0.0
    for x in range(len(tables.rank)):
        buffers.done[x] = 0
        buffers.waiting[x] = -1
    for rank in range(len(tables.row_start) - 1):
        start = tables.row_start[rank]
        buffers.cursor[rank] = start
        buffers.head[rank] = start // 2 * tables.weight_parts
        buffers.tail[rank] = buffers.head[rank]
        buffers.out_cursor[rank] = start + buffers.head[rank]
        buffers.clock[rank] = 0.0
        buffers.level[rank] = 0.0
        buffers.first_start[rank] = -1.0
        buffers.last_end[rank] = 0.0


def find_steady_state(tables: PassTables, buffers: RowBuffers, rows: Ints, rank: int) -> None:
    """Find where a rank's steady state begins and ends.

    As in core/needs.py: from the last F before the first I to the first I after the last F.
    """
    num_stages = len(tables.w_duration)
    first, last, forward = tables.row_start[rank + 1], tables.row_start[rank] - 1, tables.row_start[rank]
    after_forward = True
    for at in range(tables.row_start[rank], tables.row_start[rank + 1]):
        if rows[at] < num_stages:
            forward = at
            after_forward = True
        elif after_forward:
            after_forward = False
            first = min(first, forward)
            last = at
    buffers.steady[2 * rank] = first
    buffers.steady[2 * rank + 1] = last


def simulate_rank(tables: PassTables, buffers: RowBuffers, rows: Ints, min_fit: Floats, out: Ints, top: int) -> int:
    """Run the rank at `stack[top]` until it lacks an input; ranks that wait for its results go on the stack.

    Returns the new size of the stack, or -1 where memory does not suffice.
    """
    rank, m = buffers.stack[top], tables.num_microbatches
    at, stop = buffers.cursor[rank], tables.row_start[rank + 1]
    now, level = buffers.clock[rank], buffers.level[rank]
    while at < stop:
        x = rows[at]
        microbatch = buffers.done[x]
        ready = buffers.arrived[x * m + microbatch]
        if ready >= NEVER:
            buffers.waiting[x] = rank
            break
        now, level = run_pending_w(tables, buffers, rank, now, level, ready, tables.memory[x], min_fit[rank], out)
        if lacks_memory(tables, rank, level, tables.memory[x]):
            return -1
        buffers.row_index[x * m + microbatch] = at
        buffers.microbatch[at] = microbatch
        buffers.has_waited[at] = ready > now
        now = record_pass(tables, buffers, rank, x, max(now, ready))
        level += tables.memory[x]
        if len(out) > 0:
            out[buffers.out_cursor[rank]] = x
            buffers.out_cursor[rank] += 1
        if x + 1 < len(tables.rank):
            arrival = send_result(tables, buffers, x, microbatch, now)
            at_ends = tables.blocking_ends and not buffers.steady[2 * rank] <= at <= buffers.steady[2 * rank + 1]
            if (tables.blocking or at_ends) and tables.lag[x] > 0:
                now = arrival
            if buffers.waiting[x + 1] >= 0:
                buffers.stack[top] = buffers.waiting[x + 1]
                buffers.waiting[x + 1] = -1
                top += 1
        at += 1
    if at == stop:
        now = run_all_w(tables, buffers, rank, now, out)
    buffers.cursor[rank] = at
    buffers.clock[rank] = now
    buffers.level[rank] = level
    return top


def lacks_memory(tables: PassTables, rank: int, level: float, needed: float) -> bool:
    """Return whether a pass that takes `needed` exceeds the limit of its rank."""
    return needed > 0 and level + needed > tables.limit[rank]


def run_pending_w(
    tables: PassTables, buffers: RowBuffers, rank: int, now: float, level: float, ready: float, needed: float,
    min_fit: float, out: Ints,
) -> tuple[float, float]:  # fmt: skip
    """Run W before a pass that is `ready` at that time and takes `needed`; return the new time and memory level.

    The oldest W runs while it fits into the gap before the pass, or while memory lacks space for the pass.
    """
    while buffers.head[rank] < buffers.tail[rank]:
        stage = buffers.pending[buffers.head[rank]]
        if not (fits_gap(now, ready, tables.w_duration[stage], min_fit) or lacks_memory(tables, rank, level, needed)):
            break
        now += tables.w_duration[stage]
        level -= tables.w_memory[stage]
        pop_w(tables, buffers, rank, out)
    return now, level


def run_all_w(tables: PassTables, buffers: RowBuffers, rank: int, now: float, out: Ints) -> float:
    """Run all pending W behind the last pass of a rank; return the new time."""
    while buffers.head[rank] < buffers.tail[rank]:
        now += tables.w_duration[buffers.pending[buffers.head[rank]]]
        buffers.last_end[rank] = now
        pop_w(tables, buffers, rank, out)
    return now


def pop_w(tables: PassTables, buffers: RowBuffers, rank: int, out: Ints) -> None:
    """Take the oldest pending W of a rank from its queue, and write it where there is an output."""
    if len(out) > 0:
        out[buffers.out_cursor[rank]] = len(tables.rank) + buffers.pending[buffers.head[rank]]
        buffers.out_cursor[rank] += 1
    buffers.head[rank] += 1


def record_pass(tables: PassTables, buffers: RowBuffers, rank: int, x: int, begin: float) -> float:
    """Record that pass x begins; return its end. An I queues the parts of its W."""
    end = begin + tables.duration[x]
    if buffers.first_start[rank] < 0:
        buffers.first_start[rank] = begin
    buffers.last_end[rank] = end
    buffers.done[x] += 1
    if x >= len(tables.w_duration):
        for _ in range(tables.weight_parts):
            buffers.pending[buffers.tail[rank]] = len(tables.rank) - 1 - x
            buffers.tail[rank] += 1
    return end  # type: ignore[no-any-return]


def send_result(tables: PassTables, buffers: RowBuffers, x: int, microbatch: int, end: float) -> float:
    """Send the result of a pass to the next one; return when it arrives. A serial link takes one message at a time."""
    link, departure = tables.link[x], end
    if link >= 0:
        departure = max(departure, buffers.link_free[link])
        buffers.link_free[link] = departure + tables.link_time[x]
    arrival = departure + tables.lag[x]
    buffers.arrived[(x + 1) * tables.num_microbatches + microbatch] = arrival
    return arrival  # type: ignore[no-any-return]


@entry_point
def dispatch_rows(tables: PassTables, buffers: RowBuffers, rule: DispatchRule, rows: Ints) -> float:
    """Write rows by a dispatch rule; return their makespan, or NEVER where they deadlock.

    Whenever a rank is free it runs the first pass in `rule.order` that is ready and allowed, else a W, else it waits.
    """
    num_ranks, none = len(tables.row_start) - 1, rows[:0]
    reset_buffers(tables, buffers)
    for x in range(len(tables.rank)):
        buffers.waiting[x] = 0
    for rank in range(num_ranks):
        buffers.stack[rank] = 1
    num_left = len(rows)
    while num_left > 0:
        rank = 0
        for other in range(1, num_ranks):
            if buffers.clock[other] < buffers.clock[rank]:
                rank = other
        now = buffers.clock[rank]
        if now >= NEVER:
            return NEVER
        x, next_arrival, is_full = choose_pass(tables, buffers, rule, rank, now)
        buffers.stack[rank] = 0
        if x >= 0:
            dispatch_pass(tables, buffers, rows, rank, x, now)
            num_left -= 1
        elif can_run_w(tables, buffers, rule.min_fit[rank], rank, now, next_arrival, is_full):
            stage = buffers.pending[buffers.head[rank]]
            pop_w(tables, buffers, rank, none)
            buffers.level[rank] -= tables.w_memory[stage]
            buffers.clock[rank] = now + tables.w_duration[stage]
            buffers.last_end[rank] = buffers.clock[rank]
        else:
            buffers.stack[rank] = 1
            buffers.clock[rank] = next_arrival
    makespan = 0.0
    for rank in range(num_ranks):
        now = buffers.clock[rank] if buffers.clock[rank] < NEVER else buffers.last_end[rank]
        run_all_w(tables, buffers, rank, now, none)
        makespan = max(makespan, buffers.last_end[rank])
    return makespan


def choose_pass(
    tables: PassTables, buffers: RowBuffers, rule: DispatchRule, rank: int, now: float
) -> tuple[int, float, bool]:
    """Return the pass that a free rank runs, or -1; the next arrival; and whether a ready pass lacks memory."""
    m = tables.num_microbatches
    has_run_i = buffers.tail[rank] > tables.row_start[rank] // 2 * tables.weight_parts
    lookahead = rule.lookahead[rank] if has_run_i else rule.first_lookahead[rank]
    chosen, next_arrival, is_full = -1, NEVER, False
    for at in range(tables.row_start[rank] // m, tables.row_start[rank + 1] // m):
        x = rule.order[at]
        if buffers.done[x] == m or is_capped(tables, buffers, rule, x):
            continue
        ready = buffers.arrived[x * m + buffers.done[x]]
        if ready >= NEVER:
            continue
        if lacks_memory(tables, rank, buffers.level[rank], memory_to_go_on(tables, buffers, rank, x)):
            is_full = is_full or is_ready(ready, now)
        elif not is_ready(ready, now):
            next_arrival = min(next_arrival, ready)
        elif chosen < 0 and next_arrival >= now + lookahead * tables.duration[x]:
            chosen = x
    return chosen, next_arrival, is_full


def is_capped(tables: PassTables, buffers: RowBuffers, rule: DispatchRule, x: int) -> bool:
    """Return whether pass x is an F whose stage has as many live activations as the rule allows."""
    return x < len(tables.w_duration) and buffers.waiting[x] >= rule.max_live[x]


def memory_to_go_on(tables: PassTables, buffers: RowBuffers, rank: int, x: int) -> float:
    """Return the memory that pass x takes, with that of later stages of its rank that have no live activation.

    Without an activation of every stage no microbatch could reach its I: all ranks would wait forever.
    """
    needed, m = tables.memory[x], tables.num_microbatches
    if x < len(tables.w_duration):
        for at in range(tables.row_start[rank] // m, tables.row_start[rank + 1] // m):
            y = tables.rank_passes[at]
            if x < y < len(tables.w_duration) and buffers.waiting[y] == 0 and buffers.done[y] < m:
                needed += tables.memory[y]
    return needed  # type: ignore[no-any-return]


def dispatch_pass(tables: PassTables, buffers: RowBuffers, rows: Ints, rank: int, x: int, now: float) -> None:
    """Write pass x into the row of its rank, and wake the rank that gets its result."""
    live, microbatch, num_stages = buffers.waiting, buffers.done[x], len(tables.w_duration)
    rows[buffers.cursor[rank]] = x
    buffers.cursor[rank] += 1
    buffers.level[rank] += tables.memory[x]  # an I frees its memory at its start: the next action comes after its end
    if x < num_stages:
        live[x] += 1
    else:
        live[len(tables.rank) - 1 - x] -= 1
    end = record_pass(tables, buffers, rank, x, now)
    if x + 1 < len(tables.rank):
        arrival = send_result(tables, buffers, x, microbatch, end)
        if tables.blocking and tables.lag[x] > 0:
            end = arrival
        other = tables.rank[x + 1]
        if buffers.stack[other] and arrival < buffers.clock[other]:
            buffers.clock[other] = arrival
    buffers.clock[rank] = end


def can_run_w(
    tables: PassTables, buffers: RowBuffers, min_fit: float, rank: int, now: float, next_arrival: float, is_full: bool
) -> bool:
    """Return whether a rank that runs no pass runs its oldest W: it fits before the next arrival, or frees memory."""
    if buffers.head[rank] == buffers.tail[rank]:
        return False
    stage = buffers.pending[buffers.head[rank]]
    return is_full or fits_gap(now, next_arrival, tables.w_duration[stage], min_fit)
