"""Kernels of the local search, compiled by core/jit.py: simulated annealing over rows, and over dispatch rules."""

from __future__ import annotations

import math
from typing import Any, NamedTuple

from zeropipe.core.jit import Floats, Ints
from zeropipe.searching.row_kernels import NEVER, dispatch_rows, simulate_rows
from zeropipe.searching.tables import DispatchRule, PassTables, RowBuffers

RANDOM_LIMIT = 1 << 20  # random numbers are below this
# of 100 steps: those below the first number move a pass of the critical path, below the second passes of some
# microbatches on some ranks, below the third change `min_fit`, and the others move any one pass
CRITICAL, STREAM, FIT = 30, 65, 75
MAX_STRIDE = 8  # passes of every n-th microbatch are moved together, n up to this: a repeating order changes as a whole
OTHER_RANKS = 0.05  # weight of ranks that end near the last one


class Annealing(NamedTuple):
    """How a walk accepts steps, and when it ends."""

    minimizes_span: bool
    near_end: float  # ranks that end less than this before the last one count a little
    temperature: float  # at its start
    target: float  # value at which it ends
    steps: int


def draw_random(state: Ints) -> Any:
    """Return the next random number from 0 to RANDOM_LIMIT - 1."""
    state[0] = state[0] * 6364136223846793005 + 1442695040888963407
    return (state[0] >> 33) & 0xFFFFF


def copy_range(source: Any, target: Any, low: int, high: int) -> None:
    """Copy a part of an array."""
    for at in range(low, high):
        target[at] = source[at]


def rank_value(buffers: RowBuffers, rank: int, minimizes_span: bool) -> float:
    """Return the end of a rank, or its span."""
    start = buffers.first_start[rank] if minimizes_span else 0.0
    return buffers.last_end[rank] - start  # type: ignore[no-any-return]


def score_ranks(buffers: RowBuffers, annealing: Annealing) -> tuple[float, float]:
    """Return what is minimized, and the same with a little for every rank that ends near the last one."""
    value, near, num_ranks = 0.0, 0.0, len(buffers.last_end)
    for rank in range(num_ranks):
        value = max(value, rank_value(buffers, rank, annealing.minimizes_span))
    for rank in range(num_ranks):
        near += max(0.0, rank_value(buffers, rank, annealing.minimizes_span) - value + annealing.near_end)
    return value, value + OTHER_RANKS * near / num_ranks


def accepts(annealing: Annealing, step: int, score: float, current: float, random: Ints) -> bool:
    """Return whether a walk goes on from a score: if it is no worse, or by chance if it is not much worse."""
    temperature = annealing.temperature * (1.0 - step / (annealing.steps + 1)) + 1e-300
    return score <= current or draw_random(random) < math.exp((current - score) / temperature) * RANDOM_LIMIT


def find_critical_path(tables: PassTables, buffers: RowBuffers, rows: Ints, minimizes_span: bool) -> int:
    """Write the indices in the rows of the passes that determine the value, the last one first; return their number.

    Each of them began when the next one in the list had ended.
    """
    rank, count = 0, 0
    for other in range(1, len(buffers.last_end)):
        if rank_value(buffers, other, minimizes_span) > rank_value(buffers, rank, minimizes_span):
            rank = other
    at = tables.row_start[rank + 1] - 1
    while count < len(buffers.critical):
        buffers.critical[count] = at
        count += 1
        x = rows[at]
        if buffers.has_waited[at]:
            if x == 0:
                break
            at = buffers.row_index[(x - 1) * tables.num_microbatches + buffers.microbatch[at]]
        elif at == tables.row_start[tables.rank[x]]:
            break
        else:
            at -= 1
    return count


def move_pass(rows: Ints, low: int, high: int, at: int, distance: int) -> None:
    """Move the pass at index `at` by `distance`, not beyond the ends `low` and `high` of its row."""
    x = rows[at]
    to = min(max(at + distance, low), high - 1)
    while at < to:
        rows[at] = rows[at + 1]
        at += 1
    while at > to:
        rows[at] = rows[at - 1]
        at -= 1
    rows[at] = x


def move_stream(rows: Ints, low: int, high: int, x: int, first: int, stop: int, stride: int, distance: int) -> None:
    """Move pass x of every `stride`-th microbatch from `first` to `stop` by `distance`."""
    is_later, microbatch = distance > 0, 0
    if is_later:  # from the end, so that no pass is moved twice
        for at in range(low, high):
            microbatch += rows[at] == x
        microbatch -= 1
    for number in range(high - low):
        at = high - 1 - number if is_later else low + number
        if rows[at] == x:
            if first <= microbatch < stop and (microbatch - first) % stride == 0:
                move_pass(rows, low, high, at, distance)
            microbatch += -1 if is_later else 1


def choose_ranks(random: Ints, num_ranks: int, is_range: bool) -> tuple[int, int]:
    """Return a range of ranks, or a single rank."""
    low = draw_random(random) % num_ranks
    more = (draw_random(random) % num_ranks) * (draw_random(random) % num_ranks) // num_ranks if is_range else 0
    return low, min(num_ranks, low + 1 + more)


def move_critical(tables: PassTables, rows: Ints, rank: int, at: int, one: int, far: int) -> None:
    """Move a pass of the critical path to an earlier place, or the pass before it to a later one."""
    low, high = tables.row_start[rank], tables.row_start[rank + 1]
    if one & 1 or at == low:
        move_pass(rows, low, high, at, -1 - far % 4)
    else:
        move_pass(rows, low, high, at - 1, 1 + far % 4)


def move_streams(tables: PassTables, rows: Ints, low: int, high: int, one: int, other: int, far: int) -> None:
    """Move one pass or several of some microbatches on a range of ranks. The bits of three random numbers choose."""
    m, which = tables.num_microbatches, one >> 3
    first, distance = other % m, (1 if one & 1 else -1) * (1 + far % 6)
    stride = 1 + (far >> 4) % MAX_STRIDE if one & 4 else 1
    stop = m if stride > 1 else min(m, first + 1 + (other >> 3) % m * (far % m) // m)
    for rank in range(low, high):
        start, end = tables.row_start[rank], tables.row_start[rank + 1]
        num_passes = (end - start) // m
        for slot in range(num_passes):
            if (slot == which % num_passes) if one & 2 else (which >> slot & 1):
                move_stream(rows, start, end, tables.rank_passes[start // m + slot], first, stop, stride, distance)


def walk_rows(
    tables: PassTables, buffers: RowBuffers, annealing: Annealing, random: Ints, stop: Ints, rows: Ints,
    min_fit: Floats, old_rows: Ints, old_fit: Floats, best_rows: Ints, best_fit: Floats,
) -> float:  # fmt: skip
    """Change `rows` and `min_fit` step by step; return the best value, with its rows in `best_rows`."""
    row_start, num_ranks, num_critical = tables.row_start, len(tables.row_start) - 1, 0
    current, least, none = NEVER, NEVER, rows[:0]
    for step in range(annealing.steps + 1):
        if least <= annealing.target or stop[0]:
            break
        kind, at = draw_random(random) % 100, -1
        if kind < CRITICAL and num_critical > 0:
            at = buffers.critical[draw_random(random) % num_critical]
            low = tables.rank[rows[at]]
            high = low + 1
        else:
            low, high = choose_ranks(random, num_ranks, kind < FIT)
        copy_range(rows, old_rows, row_start[low], row_start[high])
        copy_range(min_fit, old_fit, low, high)
        one, other, far = draw_random(random), draw_random(random), draw_random(random)
        if step == 0:
            pass  # the rows as they are
        elif at >= 0:
            move_critical(tables, rows, low, at, one, far)
        elif kind < STREAM:
            move_streams(tables, rows, low, high, one, other, far)
        elif kind < FIT:
            for rank in range(low, high):
                min_fit[rank] = one % 5 * 0.25
        else:
            at = row_start[low] + other % (row_start[high] - row_start[low])
            move_pass(rows, row_start[low], row_start[high], at, (1 if one & 1 else -1) * (1 + far % 8))
        is_accepted, value, score = False, NEVER, NEVER
        if simulate_rows(tables, buffers, rows, min_fit, none) < NEVER:
            value, score = score_ranks(buffers, annealing)
            is_accepted = accepts(annealing, step, score, current, random)
        if is_accepted:
            current = score
            num_critical = find_critical_path(tables, buffers, rows, annealing.minimizes_span)
            if value < least - 1e-12 * least:
                least = value
                copy_range(rows, best_rows, 0, len(rows))
                copy_range(min_fit, best_fit, 0, num_ranks)
        else:
            copy_range(old_rows, rows, row_start[low], row_start[high])
            copy_range(old_fit, min_fit, low, high)
    return least


def copy_rule(rule: DispatchRule, target: DispatchRule) -> None:
    """Copy a dispatch rule."""
    copy_range(rule.order, target.order, 0, len(rule.order))
    copy_range(rule.max_live, target.max_live, 0, len(rule.max_live))
    copy_range(rule.first_lookahead, target.first_lookahead, 0, len(rule.lookahead))
    copy_range(rule.lookahead, target.lookahead, 0, len(rule.lookahead))
    copy_range(rule.min_fit, target.min_fit, 0, len(rule.min_fit))


def change_rule(tables: PassTables, rule: DispatchRule, max_live: Ints, random: Ints) -> None:
    """Change order, cap, lookahead or min_fit of a range of ranks. No cap exceeds `max_live`."""
    row_start, m = tables.row_start, tables.num_microbatches
    low, high = choose_ranks(random, len(row_start) - 1, True)
    kind = draw_random(random) % 5
    one, other = draw_random(random) % 1024, draw_random(random) % 1024
    for rank in range(low, high):
        first, count = row_start[rank] // m, (row_start[rank + 1] - row_start[rank]) // m
        if kind == 0:
            a, b = first + one % count, first + other % count
            rule.order[a], rule.order[b] = rule.order[b], rule.order[a]
        elif kind == 1:
            stage = tables.rank_passes[first + one % (count // 2)]
            cap = rule.max_live[stage] + (1 if other & 1 else -1)
            rule.max_live[stage] = min(max(cap, 1), max_live[stage])
        elif kind == 2:
            rule.first_lookahead[rank] = -0.5 + 0.25 * (one % 7)
        elif kind == 3:
            rule.lookahead[rank] = 0.25 * (one % 5)
        else:
            rule.min_fit[rank] = 0.25 * (one % 5)


def tune_rule(
    tables: PassTables, buffers: RowBuffers, annealing: Annealing, random: Ints, stop: Ints, max_live: Ints,
    rule: DispatchRule, old: DispatchRule, best: DispatchRule, rows: Ints,
) -> float:  # fmt: skip
    """Change a dispatch rule step by step; return the best value, with its rule in `best`.

    A rule that leads to a deadlock is changed until it does not.
    """
    current, least = NEVER, NEVER
    for step in range(annealing.steps + 1):
        if least <= annealing.target or stop[0]:
            break
        copy_rule(rule, old)
        if step > 0:
            change_rule(tables, rule, max_live, random)
        is_accepted, value, score = False, NEVER, NEVER
        if dispatch_rows(tables, buffers, rule, rows) < NEVER:
            value, score = score_ranks(buffers, annealing)
            is_accepted = accepts(annealing, step, score, current, random)
        if is_accepted:
            current = score
            if value < least - 1e-12 * least:
                least = value
                copy_rule(rule, best)
        elif current < NEVER:
            copy_rule(old, rule)
    return least
