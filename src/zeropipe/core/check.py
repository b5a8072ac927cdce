"""Proves a schedule: complete, placed, ordered and live, with eager sends and under rendezvous."""

from __future__ import annotations

from zeropipe.core.action import Action, Kind, decode
from zeropipe.core.explain_deadlock import cycle_text, grid_text, step_number
from zeropipe.core.jit import Ints, arrays
from zeropipe.core.needs import Links, flat_tables, key_name, link
from zeropipe.core.schedule import Program, Schedule
from zeropipe.errors import DeadlockError, ScheduleError, Stuck

COMPLETE_WHOLE, COMPLETE_SPLIT = 0b0011, 0b1101  # F and B; F, I and W
SHOWN = 12  # stuck ranks named in a message


def check(what: Schedule | Program) -> None:
    """Raise ScheduleError or DeadlockError unless the schedule is right and can never hang.

    A Schedule is proven with sends that never block, and then, lowered, under rendezvous, where a send ends only when
    its receive is posted. A Program is proven as it stands, with its own SEND and RECV order.
    """
    from zeropipe.core.lower import lower_links

    if isinstance(what, Program):
        check(what.schedule)
        check_program(what)
        return
    check_complete(what)
    links = link(what)
    check_live(what, links)
    check_program(lower_links(what, links))


def check_complete(schedule: Schedule) -> None:
    """Every stage runs F and (B, or I and W) exactly once per microbatch, on the rank its Placement says."""
    _scan(schedule)
    problem = schedule.problem
    xp = arrays(schedule.num_actions)
    seen = _seen(schedule)
    place = xp.call(incomplete_kernel, seen)
    if place >= 0:
        stage, microbatch = divmod(int(place), problem.num_microbatches)
        have = [k.name for k in (Kind.F, Kind.B, Kind.I, Kind.W) if int(seen[place]) >> k & 1]
        rule = "each stage and microbatch needs F and B, or F, I and W"
        found = f"only {' and '.join(have)}" if have else "nothing"
        raise ScheduleError(f"stage {stage}, microbatch {microbatch} has {found}: {rule}")


def check_order(schedule: Schedule) -> None:
    """What `lower` needs: every action in range, placed and there once."""
    _scan(schedule)


def check_live(schedule: Schedule, links: Links) -> None:
    """No rank waits forever when sends do not block."""
    xp = links.arrays
    done, waiter = xp.full_ints(links.num_keys), xp.full_ints(links.num_keys, -1)
    position, stack = xp.list_ints(schedule.lines.offsets[:-1]), xp.full_ints(schedule.num_ranks)
    finished = xp.call(
        walk_kernel, links.codes, links.offsets, links.remote, links.own, links.makes, done, waiter, position, stack
    )
    if not finished:
        raise deadlock(schedule, links, position, done)


def check_program(program: Program) -> None:
    """Every message is sent and received once, in the same order on both ends, and rendezvous sends never hang."""
    schedule, lines = program.schedule, program.lines
    links = link(schedule, lines)
    xp = links.arrays
    problem = schedule.problem
    split = problem.num_microbatches if schedule.placement.split is None else schedule.placement.split
    tables = flat_tables(xp, schedule.placement)
    matched = xp.full_ints(links.num_keys)  # 0 nothing, 1 sent or received, 2 both
    edges = xp.full_ints(schedule.num_ranks * schedule.num_ranks * 2)
    orders = xp.full_ints(links.num_keys)
    where, fault = xp.call(
        messages_kernel, links.codes, links.offsets, tables, problem.num_stages, problem.num_microbatches, split,
        matched, edges, orders,
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
        raise _program_deadlock(program, links, position, done, posted)


def _seen(schedule: Schedule) -> Ints:
    return _scan(schedule)


def _scan(schedule: Schedule) -> Ints:
    """A bit per kind for each (stage, microbatch); raises at the first action out of range, misplaced or repeated."""
    problem, placement = schedule.problem, schedule.placement
    xp = arrays(schedule.num_actions)
    seen = xp.full_ints(problem.num_stages * problem.num_microbatches)
    split = problem.num_microbatches if placement.split is None else placement.split
    at, fault = xp.call(
        scan_kernel, xp.ints(schedule.lines.codes), xp.list_ints(schedule.lines.offsets),
        flat_tables(xp, placement), problem.num_stages, problem.num_microbatches, split, seen,
    )  # fmt: skip
    if fault:
        _raise_scan_fault(schedule, int(at), int(fault))
    return seen


def _raise_scan_fault(schedule: Schedule, at: int, fault: int) -> None:
    rank, step = step_number(schedule.lines, at)
    action = decode(memoryview(schedule.lines.codes).cast("q")[at])
    where = f"rank {rank}, step {step}: {action}"
    p = schedule.problem
    if fault == 1:
        raise ScheduleError(f"{where} is out of range: stages 0 to {p.num_stages - 1}, "
                            f"microbatches 0 to {p.num_microbatches - 1}")  # fmt: skip
    if fault == 2:
        home = schedule.placement.rank_of(action.stage, action.microbatch)
        raise ScheduleError(f"{where} is on the wrong rank: the placement puts stage {action.stage}, "
                            f"microbatch {action.microbatch} on rank {home}")  # fmt: skip
    if fault == 3:
        raise ScheduleError(f"{where} is there twice: every action runs exactly once")
    if fault == 4:
        raise ScheduleError(f"{where} does the backward a second time: a backward is either B, or I and W")
    if fault == 5:
        raise ScheduleError(f"{where} is no computation: a Schedule holds F, B, I and W; lower() adds the messages")
    raise ScheduleError(f"{where} opens an Overlap that is no pair: it joins an F and a B (or I), in that order")


def scan_kernel(codes, offsets, tables, num_stages, num_microbatches, split, seen):  # type: ignore[no-untyped-def]
    """(index, fault) of the first bad action, or (-1, 0)."""
    for rank in range(len(offsets) - 1):
        joined = 0
        for at in range(offsets[rank], offsets[rank + 1]):
            code = codes[at]
            kind = (code >> 1) & 15
            stage = (code >> 5) & 0xFFFF
            microbatch = code >> 21
            if kind > 3:
                return at, 5
            if joined and (code & 1 or not (kind == 1 or kind == 2)):
                return at, 6
            joined = code & 1
            if joined and (kind != 0 or at + 1 == offsets[rank + 1]):
                return at, 6
            if stage >= num_stages or microbatch >= num_microbatches:
                return at, 1
            base = 0 if microbatch < split else num_stages
            if tables[base + stage] != rank:
                return at, 2
            place = stage * num_microbatches + microbatch
            bits = seen[place]
            if bits >> kind & 1:
                return at, 3
            if (kind == 1 and bits & 12) or (kind >= 2 and bits & 2):
                return at, 4
            seen[place] = bits | 1 << kind
    return -1, 0


def incomplete_kernel(seen):  # type: ignore[no-untyped-def]
    """The first (stage, microbatch) that lacks an action, or -1."""
    for place in range(len(seen)):
        if seen[place] != 3 and seen[place] != 13:
            return place
    return -1


def walk_kernel(codes, offsets, remote, own, makes, done, waiter, position, stack):  # type: ignore[no-untyped-def]
    """Run every rank as far as it goes; True if all reach their end. Linear: a rank is woken by what it waits for."""
    num_ranks = len(offsets) - 1
    for rank in range(num_ranks):
        stack[rank] = num_ranks - 1 - rank
    top = num_ranks
    left = len(codes)
    while top > 0:
        top -= 1
        rank = stack[top]
        at = position[rank]
        while at < offsets[rank + 1]:
            last = at + (codes[at] & 1)
            missing = -1
            for step in range(at, last + 1):
                if own[step] >= 0 and not done[own[step]]:
                    missing = own[step]
                if remote[step] >= 0 and not done[remote[step]]:
                    missing = remote[step]
            if missing >= 0:
                waiter[missing] = rank
                break
            for step in range(at, last + 1):
                made = makes[step]
                if made >= 0:
                    done[made] = 1
                    if waiter[made] >= 0:
                        stack[top] = waiter[made]
                        waiter[made] = -1
                        top += 1
            left -= last + 1 - at
            at = last + 1
        position[rank] = at
    return left == 0


def messages_kernel(codes, offsets, tables, num_stages, num_microbatches, split, matched, edges, orders):  # type: ignore[no-untyped-def]
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
                if tables[base + stage] != rank or tables[base + source] == tables[base + target]:
                    return at, 2
                message = (source * num_microbatches + microbatch) * 2 + (1 if kind >= 6 else 0)
                edge = (tables[base + source] * num_ranks + tables[base + target]) * 2
                if sending:
                    if matched[message]:
                        return at, 3
                    matched[message] = 1
                    orders[message] = edges[edge]
                    edges[edge] += 1
                else:
                    if matched[message] != 1:
                        return at, 3 if matched[message] else 4
                    if orders[message] != edges[edge + 1]:
                        return at, 5
                    matched[message] = 2
                    edges[edge + 1] += 1
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
                other = stage + 1 if kind == 0 else stage - 1
                if 0 <= other < num_stages and tables[base + other] != rank:
                    if matched[(stage * num_microbatches + microbatch) * 2 + (1 if kind else 0)] != 2:
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


def deadlock(schedule: Schedule, links: Links, position: Ints, done: Ints) -> DeadlockError:
    """The error for a schedule in which nobody can go on."""
    stuck = []
    for rank, step, action, missing in _waiting(schedule, links, position, done):
        needed = key_name(missing, schedule.num_microbatches)
        stuck.append(Stuck(rank, step, str(action), _made_by(schedule, needed)))
    total = schedule.num_actions
    ran = sum(int(position[r]) - schedule.lines.offsets[r] for r in range(schedule.num_ranks))
    return _deadlock_error(f"no rank can go on after {ran} of {total} actions", stuck, schedule, schedule.lines)


def _waiting(schedule: Schedule, links: Links, position: Ints, done: Ints) -> list[tuple[int, int, Action, int]]:
    """(rank, step, action, missing key) of every rank that has not reached its end."""
    waiting = []
    lines = schedule.lines
    for rank in range(schedule.num_ranks):
        at = int(position[rank])
        if at == lines.offsets[rank + 1]:
            continue
        for part in range(at, at + 1 + (int(links.codes[at]) & 1)):
            missing = [int(k) for k in (links.own[part], links.remote[part]) if k >= 0 and not done[k]]
            if missing:
                waiting.append((rank, step_number(lines, at)[1], decode(int(links.codes[part])), missing[0]))
                break
    return waiting


def _made_by(schedule: Schedule, needed: Action) -> str:
    """`3I0`, or `3B0` where the schedule does that backward whole."""
    if needed.kind is Kind.F:
        return str(needed)
    rank = schedule.placement.rank_of(needed.stage, needed.microbatch)
    whole = needed._replace(kind=Kind.B)
    view = memoryview(schedule.lines.codes).cast("q")
    row = view[schedule.lines.offsets[rank] : schedule.lines.offsets[rank + 1]]
    return str(whole) if any(decode(code) == whole for code in row) else str(needed)


def _program_deadlock(program: Program, links: Links, position: Ints, done: Ints, posted: Ints) -> DeadlockError:
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
                        need = _made_by(schedule, key_name(k, schedule.num_microbatches))
                    elif k >= 0 and k == int(links.remote[part]) and int(done[k]) == 1:
                        need = f"the message of {_made_by(schedule, key_name(k, schedule.num_microbatches))}"
        stuck.append(Stuck(rank, step_number(lines, at)[1], str(action), need))
    ran = sum(int(position[r]) - lines.offsets[r] for r in range(schedule.num_ranks))
    head = f"under rendezvous sends no rank can go on after {ran} of {lines.offsets[-1]} steps"
    return _deadlock_error(head, stuck, schedule, lines)


def _deadlock_error(head: str, stuck: list[Stuck], schedule: Schedule, lines: object) -> DeadlockError:
    from zeropipe.core.schedule import Lines

    assert isinstance(lines, Lines)
    text = [head]
    text += [f"  rank {s.rank} waits at step {s.step}: {s.action} needs {s.needs}" for s in stuck[:SHOWN]]
    if len(stuck) > SHOWN:
        text.append(f"  ... and {len(stuck) - SHOWN} more ranks")
    cycle = cycle_text(schedule, stuck)
    if cycle:
        text.append(f"  cycle: {cycle}")
    text += grid_text(lines, stuck[:SHOWN])
    return DeadlockError("\n".join(text), tuple(stuck))
