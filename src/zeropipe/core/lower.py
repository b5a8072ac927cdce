"""Lowering: a Schedule becomes a Program by adding SEND and RECV, and optionally UNSHARD, RESHARD and REDUCE_GRAD.

All ranks advance together, one step each per iteration. When a step ends, its SEND is written after it and, in the same
iteration, the RECV into the receiver's row. So both sides agree on the order of every edge. The Program cannot hang
even if a send ends only when its receive is posted: executing the iterations in order is a proof.
"""

from __future__ import annotations

from itertools import accumulate

from zeropipe.core.action import RECV_B, RECV_F, SEND_B, SEND_F, F, W, peer_stage
from zeropipe.core.complete import check_actions
from zeropipe.core.deadlock import build_deadlock_error
from zeropipe.core.jit import Arrays, Ints, arrays
from zeropipe.core.needs import Dependencies, build_dependencies
from zeropipe.core.offload_actions import merge_offloading
from zeropipe.core.packed import PackedRows, encode, is_joined, kind_of, microbatch_of, stage_of
from zeropipe.core.schedule import Program, Schedule, require_schedule
from zeropipe.core.shard_actions import with_shards


def lower(schedule: Schedule, shards: str | None = None, gradients: str = "whole") -> Program:
    """The schedule with its messages; results for the same rank need none. Raises DeadlockError if it is stuck.

    `shards` is for stages whose weights are sharded: "keep" gathers the weights of a stage once, shortly before their
    first use; "regather" for every microbatch; "ends" gathers all of them before the first action and reduces all
    gradients after the last. `gradients` of sharded stages are "whole" until their last microbatch; "rolling" reduces
    those of every microbatch, and "rolling:N" keeps them for as many microbatches as leaves N stages of a rank whole.
    """
    require_schedule(schedule)
    check_actions(schedule)
    rows = merge_offloading(schedule, schedule.packed if shards is None else with_shards(schedule, shards, gradients))
    xp = arrays(rows.num_codes)
    return lower_rows(xp, schedule, build_dependencies(xp, schedule, rows), rows)


def lower_rows(xp: Arrays, schedule: Schedule, deps: Dependencies, rows: PackedRows) -> Program:
    """Lower a schedule that `check_actions` accepts. `rows` may have other actions than computations."""
    num_ranks = schedule.num_ranks
    sizes = xp.full_ints(num_ranks)
    xp.call(count_kernel, deps.offsets, deps.to, sizes)
    offsets = tuple(accumulate(map(int, sizes), initial=0))
    out, cursor = xp.full_ints(offsets[-1]), xp.list_ints(offsets[:-1])
    position, done, waiter = (
        xp.list_ints(rows.offsets[:-1]),
        xp.full_ints(deps.num_keys),
        xp.full_ints(deps.num_keys, -1),
    )
    previous, following = (xp.full_ints(num_ranks + 1) for _ in range(2))
    if not xp.call(lower_kernel, deps, done, waiter, previous, following, position, cursor, out):
        raise build_deadlock_error(schedule, deps, position, done)
    return Program(schedule, PackedRows(xp.int_bytes(out), offsets))


def count_kernel(offsets: Ints, to: Ints, sizes: Ints) -> None:
    """Steps per rank of the Program: every message adds a SEND to one row and a RECV to another."""
    for rank in range(len(offsets) - 1):
        for at in range(offsets[rank], offsets[rank + 1]):
            sizes[rank] += 1
            if to[at] >= 0:
                sizes[rank] += 1
                sizes[to[at]] += 1


def lower_kernel(
    deps: Dependencies, done: Ints, waiter: Ints, previous: Ints, following: Ints, position: Ints, cursor: Ints, out:
    Ints,
) -> bool:  # fmt: skip
    """Advance all ranks, one step per iteration; True if every row was written to its end.

    An iteration visits the ranks that are not known to wait, in order: a doubly linked list (`previous`, `following`)
    with a sentinel. A rank that lacks a result leaves the list, and whoever produces the result inserts it again.
    Sharding actions and copies need nothing here, and are written along with the next step.
    """
    codes, offsets, remote, own, makes, to = deps.codes, deps.offsets, deps.remote, deps.own, deps.makes, deps.to
    sentinel = len(offsets) - 1
    for rank in range(sentinel + 1):
        previous[rank] = rank - 1 if rank else sentinel
        following[rank] = rank + 1 if rank < sentinel else 0
    remaining = len(codes)
    while following[sentinel] != sentinel:
        rank = following[sentinel]
        while rank != sentinel:
            at = position[rank]
            while at < offsets[rank + 1] and kind_of(codes[at]) > W:
                out[cursor[rank]] = codes[at]
                cursor[rank] += 1
                remaining -= 1
                at += 1
            position[rank] = at
            has_ended = at == offsets[rank + 1]
            last = at if has_ended else at + is_joined(codes[at])
            missing = -1
            if not has_ended:
                for half in range(at, last + 1):
                    if remote[half] >= 0 and not done[remote[half]]:
                        missing = remote[half]
                    if own[half] >= 0 and not done[own[half]]:
                        missing = own[half]
            if has_ended or missing >= 0:
                if missing >= 0:
                    waiter[missing] = rank
                following[previous[rank]] = following[rank]
                previous[following[rank]] = previous[rank]
                rank = following[rank]
                continue
            remaining -= last + 1 - at
            position[rank] = last + 1
            for half in range(at, last + 1):
                out[cursor[rank]] = codes[half]
                cursor[rank] += 1
                result = makes[half]
                if result < 0:
                    continue
                done[result] = 1
                woken = waiter[result]
                if woken >= 0:
                    waiter[result] = -1
                    before = rank
                    while before != sentinel and before > woken:
                        before = previous[before]
                    while following[before] < woken:
                        before = following[before]
                    previous[woken], following[woken] = before, following[before]
                    previous[following[before]] = woken
                    following[before] = woken
            for half in range(at, last + 1):
                peer = to[half]
                if peer < 0:
                    continue
                send, receive = (SEND_F, RECV_F) if kind_of(codes[half]) == F else (SEND_B, RECV_B)
                stage, microbatch = stage_of(codes[half]), microbatch_of(codes[half])
                out[cursor[rank]] = encode(stage, send, microbatch)
                cursor[rank] += 1
                out[cursor[peer]] = encode(peer_stage(stage, send), receive, microbatch)
                cursor[peer] += 1
            rank = following[rank]
    return remaining == 0
