"""Proves a Program: every message has its partner, edges are FIFO, and sends that wait for their receive never hang."""

from __future__ import annotations

from zeropipe.core.action import RECV_B, RECV_F, SEND_B, SEND_F, UNSHARD, W, far_stage, partner
from zeropipe.core.deadlock import deadlock_error, made_by, step_number
from zeropipe.core.jit import Ints, arrays
from zeropipe.core.needs import (
    Dependencies,
    copy_base,
    dependencies,
    flat_tables,
    key_name,
    message_place,
    number_edges,
)
from zeropipe.core.packed import decode, is_joined, kind_of, microbatch_of, stage_of
from zeropipe.core.schedule import Program
from zeropipe.errors import DeadlockError, ScheduleError, Stuck


def check_program(program: Program) -> None:
    """Every message is sent and received once, in the same order on both ends, and rendezvous sends never hang."""
    schedule, packed = program.schedule, program.packed
    deps = dependencies(schedule, packed)
    xp = deps.arrays
    problem = schedule.problem
    tables = flat_tables(xp, schedule.placement)
    matched = xp.full_ints(deps.num_keys)  # 0 nothing, 1 sent or received, 2 both
    numbers, edges = number_edges(schedule.placement)
    orders = xp.full_ints(deps.num_keys)
    where, fault = xp.call(
        messages_kernel, deps.codes, deps.offsets, deps.own, deps.makes, deps.to,
        tables, problem.num_stages, problem.num_microbatches, schedule.second_from,
        matched, xp.list_ints(numbers), xp.full_ints(len(edges)), xp.full_ints(len(edges)), orders,
    )  # fmt: skip
    if fault:
        _raise_message_fault(program, int(where), int(fault))
    done, posted = xp.full_ints(deps.num_keys), xp.full_ints(deps.num_keys)
    waiter = xp.full_ints(deps.num_keys, -1)
    position, stack = xp.list_ints(packed.offsets[:-1]), xp.full_ints(schedule.num_ranks)
    queued = xp.full_ints(schedule.num_ranks)
    finished = xp.call(
        rendezvous_kernel, deps.codes, deps.offsets, deps.remote, deps.own, deps.makes,
        done, posted, matched, waiter, position, stack, queued,
    )  # fmt: skip
    if not finished:
        raise _program_deadlock(program, deps, position, done)


def check_same_work(program: Program) -> None:
    """Apart from its messages and what moves shards a Program is its Schedule."""
    wanted, given = program.schedule.packed, program.packed
    if len(wanted.offsets) != len(given.offsets):
        raise ScheduleError(f"the program has {len(given.offsets) - 1} rows, its schedule {len(wanted.offsets) - 1}")
    xp = arrays(given.offsets[-1])
    columns = (xp.ints(given.codes), xp.list_ints(given.offsets), xp.ints(wanted.codes), xp.list_ints(wanted.offsets))
    rank = int(xp.call(same_work_kernel, *columns))
    if rank >= 0:
        raise ScheduleError(f"rank {rank}: the program's computations are not those of its schedule in their order")


def same_work_kernel(codes, offsets, wanted, wanted_offsets):  # type: ignore[no-untyped-def]
    """The first rank whose computations differ, or -1."""
    for rank in range(len(offsets) - 1):
        at, end = wanted_offsets[rank], wanted_offsets[rank + 1]
        for place in range(offsets[rank], offsets[rank + 1]):
            if kind_of(codes[place]) > W:
                continue
            if at == end or codes[place] != wanted[at]:
                return rank
            at += 1
        if at < end:
            return rank
    return -1


def messages_kernel(  # type: ignore[no-untyped-def]
    codes, offsets, own, makes, to, tables, num_stages, num_microbatches, second_from,
    matched, numbers, sent, received, orders,
):  # fmt: skip
    """(index, fault) of the first message that has no partner, is repeated or overtakes another on its edge.

    The key of a message is the key of the result it carries, so SEND_F of stage s and RECV_F of s + 1 share one.
    """
    num_ranks = len(offsets) - 1
    for sending in (1, 0):
        for rank in range(num_ranks):
            for at in range(offsets[rank], offsets[rank + 1]):
                code = codes[at]
                kind = kind_of(code)
                if kind <= W or kind >= UNSHARD or (kind in (SEND_F, SEND_B)) != sending:
                    continue
                stage = stage_of(code)
                other = far_stage(stage, kind)
                microbatch = microbatch_of(code)
                if not (stage < num_stages and 0 <= other < num_stages) or microbatch >= num_microbatches:
                    return at, 1
                base = copy_base(microbatch, second_from, num_stages)
                edge = numbers[message_place(base, stage if sending else other, 1 if kind >= SEND_B else 0)]
                if tables[base + stage] != rank or edge < 0:
                    return at, 2
                message = own[at]
                if sending:
                    if matched[message]:
                        return at, 3
                    matched[message] = 1
                    orders[message] = sent[edge]
                    sent[edge] += 1
                else:
                    if matched[message] != 1:
                        return at, 3 if matched[message] else 4
                    if orders[message] != received[edge]:
                        return at, 5
                    matched[message] = 2
                    received[edge] += 1
    for rank in range(num_ranks):
        for at in range(offsets[rank], offsets[rank + 1]):
            if to[at] >= 0:
                if not matched[makes[at]]:
                    return at, 7
            elif makes[at] < 0 and kind_of(codes[at]) in (SEND_F, SEND_B) and matched[own[at]] != 2:
                return at, 6
    return -1, 0


def _raise_message_fault(program: Program, at: int, fault: int) -> None:
    rank, step = step_number(program.packed, at)
    where = f"rank {rank}, step {step}: {decode(program.packed.view[at])}"
    reason = {
        1: "names a stage or microbatch that does not exist",
        2: "is on the wrong rank, or its two stages share a rank and need no message",
        3: "is there twice: every message is sent and received once",
        4: "is never sent",
        5: "is received out of order: messages of one edge arrive in the order they were sent",
        6: "is never received",
        7: "makes a result for another rank, and no message carries it",
    }[fault]
    raise ScheduleError(f"{where} {reason}")


def rendezvous_kernel(  # type: ignore[no-untyped-def]
    codes, offsets, remote, own, makes, done, posted, matched, waiter, position, stack, queued
):
    """As `walk_kernel`, with messages: RECV posts, SEND blocks until posted, a computation waits for its messages.

    `done` is 1 when a result exists and 2 when it has been delivered; a waiter on a key is woken by either.
    """
    num_ranks = len(offsets) - 1
    for rank in range(num_ranks):
        stack[rank] = num_ranks - 1 - rank
        queued[rank] = 1
    top = num_ranks
    left = len(codes)
    while top > 0:
        top -= 1
        rank = stack[top]
        queued[rank] = 0
        at = position[rank]
        while at < offsets[rank + 1]:
            code = codes[at]
            kind = kind_of(code)
            last = at + is_joined(code)
            missing = -1
            wakes = -1
            if kind >= UNSHARD:
                at += 1
                left -= 1
                continue
            if kind > W:
                message = own[at]
                if kind in (RECV_F, RECV_B):
                    posted[message] = 1
                    wakes = message
                elif not done[message] or not posted[message]:
                    missing = message
                else:
                    done[message] = 2
                    wakes = message
            else:
                for step in range(at, last + 1):
                    if own[step] >= 0 and not done[own[step]]:
                        missing = own[step]
                    if remote[step] >= 0:
                        wanted = 2 if matched[remote[step]] else 1
                        if done[remote[step]] < wanted:
                            missing = remote[step]
            if missing >= 0:
                waiter[missing] = rank
                break
            if kind <= W:
                for step in range(at, last + 1):
                    if makes[step] >= 0:
                        done[makes[step]] = 1
            if wakes >= 0 and waiter[wakes] >= 0:
                other = waiter[wakes]
                waiter[wakes] = -1
                if not queued[other]:
                    stack[top] = other
                    queued[other] = 1
                    top += 1
            left -= last + 1 - at
            at = last + 1
        position[rank] = at
    return left == 0


def _program_deadlock(program: Program, deps: Dependencies, position: Ints, done: Ints) -> DeadlockError:
    schedule, packed = program.schedule, program.packed
    stuck = []
    for rank in range(schedule.num_ranks):
        at = int(position[rank])
        if at == packed.offsets[rank + 1]:
            continue
        action = decode(int(deps.codes[at]))
        if action.kind in (SEND_F, SEND_B):
            need = str(partner(action))
        else:
            need = "a message or result that does not come"
            for part in range(at, at + 1 + is_joined(int(deps.codes[at]))):
                for k in (int(deps.own[part]), int(deps.remote[part])):
                    if k >= 0 and not done[k]:
                        need = made_by(schedule, key_name(k, schedule.num_microbatches))
                    elif k >= 0 and k == int(deps.remote[part]) and int(done[k]) == 1:
                        need = f"the message of {made_by(schedule, key_name(k, schedule.num_microbatches))}"
        stuck.append(Stuck(rank, step_number(packed, at)[1], str(action), need))
    ran = sum(int(position[r]) - packed.offsets[r] for r in range(schedule.num_ranks))
    head = f"under rendezvous sends no rank can go on after {ran} of {packed.num_codes} steps"
    return deadlock_error(head, stuck, schedule, packed)
