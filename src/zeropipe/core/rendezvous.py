"""Proves a Program: every message has its partner, edges are FIFO, and sends that wait for their receive never hang."""

from __future__ import annotations

from zeropipe.core.action import Action, Kind, decode
from zeropipe.core.deadlock import deadlock_error, made_by, step_number
from zeropipe.core.jit import Ints, arrays
from zeropipe.core.needs import Links, flat_tables, key_name, link, number_edges
from zeropipe.core.schedule import Program
from zeropipe.errors import DeadlockError, ScheduleError, Stuck


def check_program(program: Program) -> None:
    """Every message is sent and received once, in the same order on both ends, and rendezvous sends never hang."""
    schedule, lines = program.schedule, program.lines
    links = link(schedule, lines)
    xp = links.arrays
    problem = schedule.problem
    tables = flat_tables(xp, schedule.placement)
    matched = xp.full_ints(links.num_keys)  # 0 nothing, 1 sent or received, 2 both
    numbers, edges = number_edges(schedule.placement)
    orders = xp.full_ints(links.num_keys)
    where, fault = xp.call(
        messages_kernel, links.codes, links.offsets, tables, problem.num_stages, problem.num_microbatches,
        schedule.split, matched, xp.list_ints(numbers), xp.full_ints(len(edges)), xp.full_ints(len(edges)), orders,
    )  # fmt: skip
    if fault:
        _raise_message_fault(program, int(where), int(fault))
    done, posted = xp.full_ints(links.num_keys), xp.full_ints(links.num_keys)
    waiter = xp.full_ints(links.num_keys, -1)
    position, stack = xp.list_ints(lines.offsets[:-1]), xp.full_ints(schedule.num_ranks)
    queued = xp.full_ints(schedule.num_ranks)
    finished = xp.call(
        rendezvous_kernel, links.codes, links.offsets, links.remote, links.own, links.makes, problem.num_microbatches,
        done, posted, matched, waiter, position, stack, queued,
    )  # fmt: skip
    if not finished:
        raise _program_deadlock(program, links, position, done)


def check_same_work(program: Program) -> None:
    """Apart from its messages a Program is its Schedule."""
    wanted, given = program.schedule.lines, program.lines
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
            if (codes[place] >> 1) & 15 > 3:
                continue
            if at == end or codes[place] != wanted[at]:
                return rank
            at += 1
        if at < end:
            return rank
    return -1


def messages_kernel(  # type: ignore[no-untyped-def]
    codes, offsets, tables, num_stages, num_microbatches, split, matched, numbers, sent, received, orders
):
    """(index, fault) of the first message that has no partner, is repeated or overtakes another on its edge.

    The key of a message is the key of the result it carries, so SEND_F of stage s and RECV_F of s + 1 share one.
    """
    num_ranks = len(offsets) - 1
    for sending in (1, 0):
        for rank in range(num_ranks):
            for at in range(offsets[rank], offsets[rank + 1]):
                code = codes[at]
                kind = (code >> 1) & 15
                if kind < 4 or (kind == 4 or kind == 6) != sending:
                    continue
                stage = (code >> 5) & 0xFFFF
                microbatch = code >> 21
                base = 0 if microbatch < split else num_stages
                source = stage if sending else (stage - 1 if kind == 5 else stage + 1)
                target = source + 1 if kind == 4 or kind == 5 else source - 1
                if not (0 <= source < num_stages and 0 <= target < num_stages) or microbatch >= num_microbatches:
                    return at, 1
                edge = numbers[2 * (base + source) + (1 if kind >= 6 else 0)]
                if tables[base + stage] != rank or edge < 0:
                    return at, 2
                message = (source * num_microbatches + microbatch) * 2 + (1 if kind >= 6 else 0)
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
            code = codes[at]
            kind = (code >> 1) & 15
            stage = (code >> 5) & 0xFFFF
            microbatch = code >> 21
            base = 0 if microbatch < split else num_stages
            if kind == 4 or kind == 6:
                message = (stage * num_microbatches + microbatch) * 2 + (1 if kind == 6 else 0)
                if matched[message] != 2:
                    return at, 6
            elif kind < 3:
                backward = 1 if kind else 0
                message = (stage * num_microbatches + microbatch) * 2 + backward
                if numbers[2 * (base + stage) + backward] >= 0 and not matched[message]:
                    return at, 7
    return -1, 0


def _raise_message_fault(program: Program, at: int, fault: int) -> None:
    rank, step = step_number(program.lines, at)
    where = f"rank {rank}, step {step}: {decode(memoryview(program.lines.codes).cast('q')[at])}"
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
    codes, offsets, remote, own, makes, num_microbatches, done, posted, matched, waiter, position, stack, queued
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
            kind = (code >> 1) & 15
            last = at + (code & 1)
            missing = -1
            wakes = -1
            if kind > 3:
                stage = (code >> 5) & 0xFFFF
                source = stage - 1 if kind == 5 else (stage + 1 if kind == 7 else stage)
                message = (source * num_microbatches + (code >> 21)) * 2 + (1 if kind >= 6 else 0)
                if kind == 5 or kind == 7:
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
            if kind <= 3:
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


def _program_deadlock(program: Program, links: Links, position: Ints, done: Ints) -> DeadlockError:
    schedule, lines = program.schedule, program.lines
    stuck = []
    for rank in range(schedule.num_ranks):
        at = int(position[rank])
        if at == lines.offsets[rank + 1]:
            continue
        action = decode(int(links.codes[at]))
        if action.kind in (Kind.SEND_F, Kind.SEND_B):
            ahead = 1 if action.kind is Kind.SEND_F else -1
            receive = Kind.RECV_F if ahead == 1 else Kind.RECV_B
            need = str(Action(action.stage + ahead, receive, action.microbatch))
        else:
            need = "a message or result that does not come"
            for part in range(at, at + 1 + (int(links.codes[at]) & 1)):
                for k in (int(links.own[part]), int(links.remote[part])):
                    if k >= 0 and not done[k]:
                        need = made_by(schedule, key_name(k, schedule.num_microbatches))
                    elif k >= 0 and k == int(links.remote[part]) and int(done[k]) == 1:
                        need = f"the message of {made_by(schedule, key_name(k, schedule.num_microbatches))}"
        stuck.append(Stuck(rank, step_number(lines, at)[1], str(action), need))
    ran = sum(int(position[r]) - lines.offsets[r] for r in range(schedule.num_ranks))
    head = f"under rendezvous sends no rank can go on after {ran} of {lines.offsets[-1]} steps"
    return deadlock_error(head, stuck, schedule, lines)
