"""Check a schedule: complete, placed, ordered, and free of deadlocks with eager and with rendezvous sends."""

from __future__ import annotations

from zeropipe.core.action import SHARDING
from zeropipe.core.complete import check_complete
from zeropipe.core.deadlock import build_deadlock_error
from zeropipe.core.formats.csv import has_messages, program_from_csv
from zeropipe.core.jit import Arrays, Ints, arrays
from zeropipe.core.lower import lower_rows
from zeropipe.core.needs import Dependencies, build_dependencies
from zeropipe.core.offload_actions import check_offloading
from zeropipe.core.packed import is_joined
from zeropipe.core.rendezvous import check_program, check_same_computations
from zeropipe.core.schedule import Program, Schedule, require_schedule
from zeropipe.core.shard_actions import check_shards


def check(what: Schedule | Program) -> None:
    """Raise ScheduleError or DeadlockError unless the schedule is valid and can never hang.

    A Schedule is checked with sends that never block, and then, lowered, with rendezvous sends, which end only when
    their receive is posted. A Program is checked as it is: with its own order of messages, and of gathers and
    reductions if its stages are sharded.
    """
    if isinstance(what, Program):
        check(what.schedule)
        check_same_computations(what)
        check_program(what)
        check_shards(what)
        check_offloading(what.schedule, what.packed)
        return
    require_schedule(what)
    check_complete(what)
    xp = arrays(what.num_actions)
    deps = build_dependencies(xp, what)
    _check_live(xp, what, deps)
    check_program(lower_rows(xp, what, deps, what.packed))


def check_csv(text: str, schedule: Schedule) -> Program | None:
    """Check the messages, gathers and reductions of a CSV as it has them; returns its Program if it has messages."""
    if not has_messages(text) and not any(kind.name in text for kind in SHARDING):
        return None
    program = program_from_csv(text, schedule.name)
    if has_messages(text):
        check(program)
        return program
    check_shards(program)
    return None


def _check_live(xp: Arrays, schedule: Schedule, deps: Dependencies) -> None:
    """DeadlockError if a rank waits forever although sends never block."""
    done, waiter = xp.full_ints(deps.num_keys), xp.full_ints(deps.num_keys, -1)
    position, stack = xp.list_ints(schedule.packed.offsets[:-1]), xp.full_ints(schedule.num_ranks)
    if not xp.call(live_kernel, deps, done, waiter, position, stack):
        raise build_deadlock_error(schedule, deps, position, done)


def live_kernel(deps: Dependencies, done: Ints, waiter: Ints, position: Ints, stack: Ints) -> bool:
    """Run every rank as far as possible; True if all reach their end. Linear: a result wakes the rank that waits."""
    codes, offsets, remote, own, makes = deps.codes, deps.offsets, deps.remote, deps.own, deps.makes
    num_ranks = len(offsets) - 1
    for rank in range(num_ranks):
        stack[rank] = num_ranks - 1 - rank
    top = num_ranks
    remaining = len(codes)
    while top > 0:
        top -= 1
        rank = stack[top]
        at = position[rank]
        while at < offsets[rank + 1]:
            last = at + is_joined(codes[at])
            missing = -1
            for half in range(at, last + 1):
                if own[half] >= 0 and not done[own[half]]:
                    missing = own[half]
                if remote[half] >= 0 and not done[remote[half]]:
                    missing = remote[half]
            if missing >= 0:
                waiter[missing] = rank
                break
            for half in range(at, last + 1):
                result = makes[half]
                if result >= 0:
                    done[result] = 1
                    if waiter[result] >= 0:
                        stack[top] = waiter[result]
                        waiter[result] = -1
                        top += 1
            remaining -= last + 1 - at
            at = last + 1
        position[rank] = at
    return remaining == 0
