"""Lowering: a Schedule becomes a Program by adding SEND and RECV, and UNSHARD, RESHARD and REDUCE_GRAD if wished.

All ranks advance together, one step each a turn. When a step ends, its SEND is written behind it and, in the same
turn, the RECV into the receiver's row. So both sides agree on the order of every edge, and the Program cannot hang
even if a send finishes only when its receive is posted: replaying the turns is a proof.
"""

from __future__ import annotations

from zeropipe.core.action import RECV_B, RECV_F, SEND_B, SEND_F, F, W, far_stage
from zeropipe.core.complete import check_order
from zeropipe.core.deadlock import deadlock
from zeropipe.core.needs import Dependencies, dependencies
from zeropipe.core.packed import PackedRows, encode, is_joined, kind_of, microbatch_of, stage_of
from zeropipe.core.schedule import Program, Schedule, require_schedule
from zeropipe.core.shards import with_shards


def lower(schedule: Schedule, shards: str | None = None) -> Program:
    """The schedule with its messages; hand-over on the same rank is no message. Raises DeadlockError if stuck.

    `shards` is for stages whose weights are sharded: "keep" gathers a stage's weights once, shortly before their first
    use; "regather" for every microbatch; "ends" gathers all before the first action and reduces all after the last.
    """
    require_schedule(schedule)
    check_order(schedule)
    rows = schedule.packed if shards is None else with_shards(schedule, shards)
    return lower_with(schedule, dependencies(schedule, rows), rows)


def lower_with(schedule: Schedule, deps: Dependencies, rows: PackedRows) -> Program:
    """`lower` for a schedule whose actions are complete and placed. `rows`: they, or with what moves their shards."""
    xp, num_ranks = deps.arrays, schedule.num_ranks
    sizes = xp.full_ints(num_ranks)
    xp.call(count_kernel, deps.offsets, deps.to, sizes)
    offsets = [0]
    for size in sizes:
        offsets.append(offsets[-1] + int(size))
    out = xp.full_ints(offsets[-1])
    write = xp.list_ints(offsets[:-1])
    position = xp.list_ints(rows.offsets[:-1])
    done = xp.full_ints(deps.num_keys)
    finished = xp.call(
        lower_kernel, deps.codes, deps.offsets, deps.remote, deps.own, deps.makes, deps.to, done,
        xp.full_ints(deps.num_keys, -1), xp.full_ints(num_ranks + 1), xp.full_ints(num_ranks + 1), position, write,
        out,
    )  # fmt: skip
    if not finished:
        raise deadlock(schedule, deps, position, done)
    return Program(schedule, PackedRows(xp.int_bytes(out), tuple(offsets)))


def count_kernel(offsets, to, sizes):  # type: ignore[no-untyped-def]
    """Steps per rank once every message adds a SEND to one row and a RECV to another."""
    for rank in range(len(offsets) - 1):
        for at in range(offsets[rank], offsets[rank + 1]):
            sizes[rank] += 1
            if to[at] >= 0:
                sizes[rank] += 1
                sizes[to[at]] += 1


def lower_kernel(  # type: ignore[no-untyped-def]
    codes, offsets, remote, own, makes, to, done, waiter, before, after, position, write, out
):
    """Advance all ranks in turns; True if every row was written to its end.

    A turn goes over the ranks that are not known to wait, in order: a linked list, closed by a head that is no rank.
    A rank that lacks a result leaves it, and is put back in its place by whoever makes that result. What moves shards
    needs nothing and takes no turn.
    """
    head = len(offsets) - 1
    for rank in range(head + 1):
        before[rank] = rank - 1 if rank else head
        after[rank] = rank + 1 if rank < head else 0
    left = len(codes)
    while after[head] != head:
        rank = after[head]
        while rank != head:
            at = position[rank]
            while at < offsets[rank + 1] and kind_of(codes[at]) > W:
                out[write[rank]] = codes[at]
                write[rank] += 1
                left -= 1
                at += 1
            position[rank] = at
            ended = at == offsets[rank + 1]
            last = at if ended else at + is_joined(codes[at])
            missing = -1
            if not ended:
                for step in range(at, last + 1):
                    if remote[step] >= 0 and not done[remote[step]]:
                        missing = remote[step]
                    if own[step] >= 0 and not done[own[step]]:
                        missing = own[step]
            if ended or missing >= 0:
                if missing >= 0:
                    waiter[missing] = rank
                after[before[rank]] = after[rank]
                before[after[rank]] = before[rank]
                rank = after[rank]
                continue
            left -= last + 1 - at
            position[rank] = last + 1
            for step in range(at, last + 1):
                out[write[rank]] = codes[step]
                write[rank] += 1
                made = makes[step]
                if made < 0:
                    continue
                done[made] = 1
                other = waiter[made]
                if other >= 0:
                    waiter[made] = -1
                    place = rank
                    while place != head and place > other:
                        place = before[place]
                    while after[place] < other:
                        place = after[place]
                    before[other], after[other] = place, after[place]
                    before[after[place]] = other
                    after[place] = other
            for step in range(at, last + 1):
                peer = to[step]
                if peer < 0:
                    continue
                send, receive = (SEND_F, RECV_F) if kind_of(codes[step]) == F else (SEND_B, RECV_B)
                stage, microbatch = stage_of(codes[step]), microbatch_of(codes[step])
                out[write[rank]] = encode(stage, send, microbatch)
                write[rank] += 1
                out[write[peer]] = encode(far_stage(stage, send), receive, microbatch)
                write[peer] += 1
            rank = after[rank]
    return left == 0
