"""Flat arrays that the compiled kernels of a search read and write.

A microbatch runs 2 num_stages passes, numbered along its path: pass x < num_stages is F of stage x, and the others are
I of stage 2 num_stages - 1 - x. Each pass needs the one before it. Microbatches keep their order in every pass, so the
row of a rank is an array of pass numbers: the n-th x in it is pass x of microbatch n. W is in no row. It runs oldest
first, where its rank would wait or where memory is short.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

Array = np.ndarray[Any, np.dtype[Any]]


class PassTables(NamedTuple):
    """Costs and memory by pass, by stage and by rank."""

    num_microbatches: int
    weight_parts: int  # of every W
    blocking: bool  # a sender waits for its messages
    blocking_ends: bool  # it does so in its warm-up and cool-down
    row_start: Array  # index of each rank's row in the rows of all ranks, and their length
    rank: Array  # of each pass
    rank_passes: Array  # the passes of each rank, rank by rank
    duration: Array  # of each pass
    lag: Array  # from the end of a pass to the arrival of its result
    link_time: Array  # how long its message occupies a serial link
    link: Array  # index of that link; -1 where links are not serial
    memory: Array  # taken by a pass: an activation; for I, what stays for W less the activation
    w_duration: Array  # of one part of each stage's W
    w_memory: Array  # that this part frees
    limit: Array  # memory for activations on each rank


class DispatchRule(NamedTuple):
    """How a free rank chooses its next action (row_kernels.dispatch_rows)."""

    order: Array  # passes of each rank, rank by rank, the preferred one first
    max_live: Array  # activations of each stage that may be live
    first_lookahead: Array  # by rank, as `lookahead`, until its first I
    lookahead: Array  # in durations of a pass: it is put off if a preferred one arrives before that
    min_fit: Array  # by rank: part of a W that must fit before the next arrival

    def copy(self) -> DispatchRule:
        """Return a rule that can be changed."""
        return DispatchRule(*(column.copy() for column in self))


class RowBuffers(NamedTuple):
    """Scratch arrays of the kernels that simulate and write rows, for one thread."""

    arrived: Array  # when the input of each pass and microbatch arrives
    pending: Array  # stages of the parts of W whose I has run, each rank in its own region ...
    head: Array  # ... where the oldest of a rank is ...
    tail: Array  # ... and where the next one goes
    done: Array  # microbatches that each pass has run
    waiting: Array  # the rank that waits for the input of a pass, or -1; in dispatch_rows: live activations of a stage
    link_free: Array  # when each serial link is free
    clock: Array  # of each rank
    level: Array  # memory in use on each rank
    cursor: Array  # index of each rank's next pass in the rows
    stack: Array  # ranks that can go on; in dispatch_rows: whether a rank is idle
    out_cursor: Array  # index of each rank's next action in the output
    steady: Array  # first and last index of each rank's steady state in the rows
    first_start: Array  # of each rank
    last_end: Array  # of each rank
    row_index: Array  # of each pass and microbatch in the rows
    microbatch: Array  # at each index of the rows
    has_waited: Array  # at each index: whether the pass there waited for its input
    critical: Array  # indices of the passes on the critical path, the last one first


def row_buffers(tables: PassTables) -> RowBuffers:
    """Allocate the scratch arrays of one thread."""
    num_ranks, num_passes, size = len(tables.row_start) - 1, len(tables.rank), int(tables.row_start[-1])
    num_links = int(tables.link.max(initial=-1)) + 1

    def ints(count: int) -> Array:
        return np.zeros(count, np.int64)

    return RowBuffers(
        arrived=np.zeros(size), pending=ints(size // 2 * tables.weight_parts), head=ints(num_ranks),
        tail=ints(num_ranks), done=ints(num_passes), waiting=ints(num_passes), link_free=np.zeros(num_links),
        clock=np.zeros(num_ranks), level=np.zeros(num_ranks), cursor=ints(num_ranks), stack=ints(num_ranks + 1),
        out_cursor=ints(num_ranks), steady=ints(2 * num_ranks), first_start=np.zeros(num_ranks),
        last_end=np.zeros(num_ranks), row_index=ints(size), microbatch=ints(size), has_waited=ints(size),
        critical=ints(size),
    )  # fmt: skip
