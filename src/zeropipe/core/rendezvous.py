"""Check a Program: every message has its peer, edges are FIFO, and sends that wait for their receive never hang."""

from __future__ import annotations

from zeropipe.core.action import RECV_B, RECV_F, SEND_B, SEND_F, UNSHARD, W, peer_message, peer_stage
from zeropipe.core.deadlock import format_deadlock_error, producer_text
from zeropipe.core.jit import Ints, arrays
from zeropipe.core.needs import (
    Dependencies,
    build_dependencies,
    copy_offset,
    flat_tables,
    key_action,
    message_index,
    number_edges,
)
from zeropipe.core.packed import is_joined, kind_of, microbatch_of, stage_of
from zeropipe.core.schedule import Program
from zeropipe.errors import DeadlockError, ScheduleError, Stuck

# faults of a message
_OUT_OF_RANGE, _WRONG_RANK, _REPEATED, _NOT_SENT, _OUT_OF_ORDER, _NOT_RECEIVED, _NO_MESSAGE = range(1, 8)
_REASONS = {
    _OUT_OF_RANGE: "has a stage or microbatch out of range",
    _WRONG_RANK: "is on the wrong rank, or its two stages are on one rank and need no message",
    _REPEATED: "is repeated: every message is sent and received once",
    _NOT_SENT: "is never sent",
    _OUT_OF_ORDER: "is received out of order: messages of an edge arrive in the order in which they were sent",
    _NOT_RECEIVED: "is never received",
    _NO_MESSAGE: "has a result for another rank, and no message carries it",
}


def check_program(program: Program) -> None:
    """Raise unless every message is sent and received once, in the same order at both ends, and none waits forever."""
    schedule, packed = program.schedule, program.packed
    xp = arrays(packed.num_codes)
    deps = build_dependencies(xp, schedule, packed)
    matched = xp.full_ints(deps.num_keys)  # 1 for a result that is sent, 2 if it is received, too
    numbers, edges = number_edges(schedule.placement)
    index, fault = xp.call(
        messages_kernel, deps, flat_tables(xp, schedule.placement), schedule.num_stages, schedule.problem.total_slices,
        schedule.second_slice_from, matched, xp.list_ints(numbers), xp.full_ints(len(edges)), xp.full_ints(len(edges)),
        xp.full_ints(deps.num_keys),
    )  # fmt: skip
    if fault:
        rank, step = packed.locate(int(index))
        message = schedule.decode(packed.view[int(index)])
        raise ScheduleError(f"rank {rank}, step {step}: {message} {_REASONS[int(fault)]}")
    done, posted, waiter = (xp.full_ints(deps.num_keys, value) for value in (0, 0, -1))
    position = xp.list_ints(packed.offsets[:-1])
    stack, queued = (xp.full_ints(schedule.num_ranks) for _ in range(2))
    if not xp.call(rendezvous_kernel, deps, done, posted, matched, waiter, position, stack, queued):
        raise _build_deadlock_error(program, deps, position, done)


def check_same_computations(program: Program) -> None:
    """ScheduleError unless the computations of a Program are those of its Schedule, in their order."""
    expected, actual = program.schedule.packed, program.packed
    if len(expected.offsets) != len(actual.offsets):
        raise ScheduleError(f"the program has {len(actual.offsets) - 1} rows, its schedule {len(expected.offsets) - 1}")
    xp = arrays(actual.num_codes)
    rows = [(xp.ints(packed.codes), xp.list_ints(packed.offsets)) for packed in (actual, expected)]
    rank = int(xp.call(same_computations_kernel, *rows[0], *rows[1]))
    if rank >= 0:
        raise ScheduleError(f"rank {rank}: the program's computations are not those of its schedule in their order")


def same_computations_kernel(codes: Ints, offsets: Ints, expected: Ints, expected_offsets: Ints) -> int:
    """The first rank whose computations differ, or -1."""
    for rank in range(len(offsets) - 1):
        at, end = expected_offsets[rank], expected_offsets[rank + 1]
        for index in range(offsets[rank], offsets[rank + 1]):
            if kind_of(codes[index]) > W:
                continue
            if at == end or codes[index] != expected[at]:
                return rank
            at += 1
        if at < end:
            return rank
    return -1


def messages_kernel(
    deps: Dependencies, tables: Ints, num_stages: int, num_microbatches: int, second_from: int, matched: Ints, edges:
    Ints, num_sent: Ints, num_received: Ints, order: Ints,
) -> tuple[int, int]:  # fmt: skip
    """(index, fault) of the first message that lacks its peer, is repeated or overtakes another one of its edge.

    The key of a message is that of the result it carries, so SEND_F of stage s and RECV_F of s + 1 have the same key.
    """
    codes, offsets, own, makes, to = deps.codes, deps.offsets, deps.own, deps.makes, deps.to
    num_ranks = len(offsets) - 1
    for sending in (1, 0):
        for rank in range(num_ranks):
            for at in range(offsets[rank], offsets[rank + 1]):
                code = codes[at]
                kind = kind_of(code)
                if kind <= W or kind >= UNSHARD or (kind in (SEND_F, SEND_B)) != sending:
                    continue
                stage = stage_of(code)
                other = peer_stage(stage, kind)
                microbatch = microbatch_of(code)
                if not (stage < num_stages and 0 <= other < num_stages) or microbatch >= num_microbatches:
                    return at, _OUT_OF_RANGE
                offset = copy_offset(microbatch, second_from, num_stages)
                edge = edges[message_index(offset, stage if sending else other, 1 if kind >= SEND_B else 0)]
                if tables[offset + stage] != rank or edge < 0:
                    return at, _WRONG_RANK
                key = own[at]
                if sending:
                    if matched[key]:
                        return at, _REPEATED
                    matched[key] = 1
                    order[key] = num_sent[edge]
                    num_sent[edge] += 1
                else:
                    if matched[key] != 1:
                        return at, _REPEATED if matched[key] else _NOT_SENT
                    if order[key] != num_received[edge]:
                        return at, _OUT_OF_ORDER
                    matched[key] = 2
                    num_received[edge] += 1
    for rank in range(num_ranks):
        for at in range(offsets[rank], offsets[rank + 1]):
            if to[at] >= 0:
                if not matched[makes[at]]:
                    return at, _NO_MESSAGE
            elif makes[at] < 0 and kind_of(codes[at]) in (SEND_F, SEND_B) and matched[own[at]] != 2:
                return at, _NOT_RECEIVED
    return -1, 0


def rendezvous_kernel(
    deps: Dependencies, done: Ints, posted: Ints, matched: Ints, waiter: Ints, position: Ints, stack: Ints, queued: Ints
) -> bool:
    """As `live_kernel`, with messages: RECV posts, SEND waits until posted, a computation waits for its messages.

    `done` is 1 when a result exists and 2 when it has been delivered; either wakes the rank that waits for its key.
    """
    codes, offsets, remote, own, makes = deps.codes, deps.offsets, deps.remote, deps.own, deps.makes
    num_ranks = len(offsets) - 1
    for rank in range(num_ranks):
        stack[rank] = num_ranks - 1 - rank
        queued[rank] = 1
    top = num_ranks
    remaining = len(codes)
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
            changed = -1  # the key of a message that is posted or delivered
            if kind >= UNSHARD:
                at += 1
                remaining -= 1
                continue
            if kind > W:
                key = own[at]
                if kind in (RECV_F, RECV_B):
                    posted[key] = 1
                    changed = key
                elif not done[key] or not posted[key]:
                    missing = key
                else:
                    done[key] = 2
                    changed = key
            else:
                for half in range(at, last + 1):
                    if own[half] >= 0 and not done[own[half]]:
                        missing = own[half]
                    if remote[half] >= 0:
                        required = 2 if matched[remote[half]] else 1
                        if done[remote[half]] < required:
                            missing = remote[half]
            if missing >= 0:
                waiter[missing] = rank
                break
            if kind <= W:
                for half in range(at, last + 1):
                    if makes[half] >= 0:
                        done[makes[half]] = 1
            if changed >= 0 and waiter[changed] >= 0:
                woken = waiter[changed]
                waiter[changed] = -1
                if not queued[woken]:
                    stack[top] = woken
                    queued[woken] = 1
                    top += 1
            remaining -= last + 1 - at
            at = last + 1
        position[rank] = at
    return remaining == 0


def _build_deadlock_error(program: Program, deps: Dependencies, position: Ints, done: Ints) -> DeadlockError:
    schedule, packed = program.schedule, program.packed
    stuck = []
    for rank in range(schedule.num_ranks):
        at = int(position[rank])
        if at == packed.offsets[rank + 1]:
            continue
        action = schedule.decode(int(deps.codes[at]))
        if action.kind in (SEND_F, SEND_B):
            need = str(peer_message(action))
        else:
            need = "a message or result that does not come"
            for half in range(at, at + 1 + is_joined(int(deps.codes[at]))):
                for key in (int(deps.own[half]), int(deps.remote[half])):
                    if key >= 0 and not done[key]:
                        need = producer_text(schedule, key_action(key, schedule))
                    elif key >= 0 and key == int(deps.remote[half]) and int(done[key]) == 1:
                        producer = producer_text(schedule, key_action(key, schedule))
                        need = f"the message of {producer}"
        stuck.append(Stuck(rank, packed.locate(at)[1], str(action), need))
    ran = sum(int(position[r]) - packed.offsets[r] for r in range(schedule.num_ranks))
    head = f"with rendezvous sends no rank can go on after {ran} of {packed.num_codes} steps"
    return format_deadlock_error(head, stuck, schedule, packed)
