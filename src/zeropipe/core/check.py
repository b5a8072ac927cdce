"""Proves a schedule: complete, placed, ordered and live, with eager sends and under rendezvous."""

from __future__ import annotations

from zeropipe.core.action import SHARDING
from zeropipe.core.complete import check_complete
from zeropipe.core.deadlock import deadlock
from zeropipe.core.formats.csv import has_messages, program_from_csv
from zeropipe.core.lower import lower_with
from zeropipe.core.needs import Dependencies, dependencies
from zeropipe.core.packed import is_joined
from zeropipe.core.rendezvous import check_program, check_same_work
from zeropipe.core.schedule import Program, Schedule, require_schedule
from zeropipe.core.shards import check_shards


def check(what: Schedule | Program) -> None:
    """Raise ScheduleError or DeadlockError unless the schedule is right and can never hang.

    A Schedule is proven with sends that never block, and then, lowered, under rendezvous, where a send ends only when
    its receive is posted. A Program is proven as it stands, with its own order of messages, and of gathering and
    reducing where its stages are sharded.
    """
    if isinstance(what, Program):
        check(what.schedule)
        check_same_work(what)
        check_program(what)
        check_shards(what)
        return
    require_schedule(what)
    check_complete(what)
    deps = dependencies(what)
    check_live(what, deps)
    check_program(lower_with(what, deps, what.packed))


def check_csv(text: str, schedule: Schedule) -> Program | None:
    """Prove the messages, gathering and reducing of a CSV as they stand there; gives them if messages are there."""
    if not has_messages(text) and not any(kind.name in text for kind in SHARDING):
        return None
    program = program_from_csv(text, schedule.name)
    if has_messages(text):
        check(program)
        return program
    check_shards(program)
    return None


def check_live(schedule: Schedule, deps: Dependencies) -> None:
    """No rank waits forever when sends do not block."""
    xp = deps.arrays
    done, waiter = xp.full_ints(deps.num_keys), xp.full_ints(deps.num_keys, -1)
    position, stack = xp.list_ints(schedule.packed.offsets[:-1]), xp.full_ints(schedule.num_ranks)
    finished = xp.call(
        walk_kernel, deps.codes, deps.offsets, deps.remote, deps.own, deps.makes, done, waiter, position, stack
    )
    if not finished:
        raise deadlock(schedule, deps, position, done)


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
            last = at + is_joined(codes[at])
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
