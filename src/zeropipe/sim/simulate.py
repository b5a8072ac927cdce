"""The simulator: every action starts as soon as its rank is free and its inputs have arrived."""

from __future__ import annotations

from zeropipe.core.action import B, F, I, W
from zeropipe.core.complete import check_complete
from zeropipe.core.deadlock import deadlock
from zeropipe.core.needs import copy_base, dependencies, message_place
from zeropipe.core.packed import is_joined, kind_of, microbatch_of, stage_of
from zeropipe.core.phases import free_sends
from zeropipe.core.schedule import Schedule
from zeropipe.core.timeline import Memory, Timeline
from zeropipe.sim.costs import Costs
from zeropipe.sim.tables import tables_of


def simulate(schedule: Schedule, costs: Costs | None = None) -> Timeline:
    """The timeline of `schedule` under `costs` (default: F = I = W = 1, messages free).

    Raises ScheduleError for a schedule that is not complete and DeadlockError for one that cannot end.
    """
    costs = costs or Costs()
    check_complete(schedule)
    deps = dependencies(schedule)
    xp = deps.arrays
    size, num_stages = schedule.num_actions, schedule.num_stages
    tables = tables_of(xp, schedule, costs)
    start, end, during, after = (xp.full_floats(size) for _ in range(4))
    ended, arrived = xp.full_floats(deps.num_keys, -1.0), xp.full_floats(deps.num_keys, -1.0)
    waiter = xp.full_ints(deps.num_keys, -1)
    position, stack = xp.list_ints(schedule.packed.offsets[:-1]), xp.full_ints(schedule.num_ranks)
    finished = xp.call(
        simulate_kernel, deps.codes, deps.offsets, deps.remote, deps.own, deps.makes, deps.to, num_stages,
        tables.second_from, tables.durations, tables.saving,
        tables.travel, tables.occupies, tables.edge, xp.full_floats(tables.num_edges), costs.serial_links,
        *free_sends(deps, costs.blocking, costs.blocking_ends),
        tables.activation, tables.stash, tables.num_weight_parts, tables.constant, xp.full_floats(schedule.num_ranks),
        ended, arrived, waiter, position, stack, start, end, during, after,
    )  # fmt: skip
    if not finished:
        raise deadlock(schedule, deps, position, xp.list_ints([int(t >= 0) for t in ended]))
    return Timeline(
        schedule,
        xp.float_bytes(start),
        xp.float_bytes(end),
        Memory(xp.float_bytes(during), xp.float_bytes(after)),
        costs.memory_limit,
        costs.unit,
        costs.memory_unit,
        blocking=costs.blocking,
        blocking_ends=costs.blocking_ends,
    )


def simulate_kernel(  # type: ignore[no-untyped-def]
    codes, offsets, remote, own, makes, to, num_stages, second_from, durations, saving,
    travel, occupies, edge, link_free, serial_links, free_first, free_last,
    activation, stash, num_weight_parts, level, clock,
    ended, arrived, waiter, position, stack, start, end, during, after,
):  # fmt: skip
    """Run every rank as far as it goes, in its own order; True if all reach their end.

    A rank that lacks a result leaves its number in `waiter` and is put back on the stack by whoever makes it, so each
    action is looked at no more than twice. Times do not depend on the order in which ranks are taken from the stack:
    a direction's messages are all sent by one rank, in its own order.
    """
    num_ranks = len(offsets) - 1
    for rank in range(num_ranks):
        stack[rank] = num_ranks - 1 - rank
    top = num_ranks
    left = len(codes)
    while top > 0:
        top -= 1
        rank = stack[top]
        at = position[rank]
        now = clock[rank]
        memory = level[rank]
        while at < offsets[rank + 1]:
            last = at + is_joined(codes[at])
            missing = -1
            begin = now
            for step in range(at, last + 1):
                needed = own[step]
                if needed >= 0:
                    if ended[needed] < 0:
                        missing = needed
                    elif ended[needed] > begin:
                        begin = ended[needed]
                needed = remote[step]
                if needed >= 0:
                    if arrived[needed] < 0:
                        missing = needed
                    elif arrived[needed] > begin:
                        begin = arrived[needed]
            if missing >= 0:
                waiter[missing] = rank
                break
            lasts = 0.0
            for step in range(at, last + 1):
                stage = stage_of(codes[step])
                kind = kind_of(codes[step])
                lasts += durations[kind * num_stages + stage]
                if last > at:
                    # an Overlap of two stages saves the mean of what each stage's own pair would save
                    lasts -= saving[stage] / 2
                if kind == F:
                    memory += activation[stage]
            finish = begin + max(lasts, 0.0)
            now = finish
            for step in range(at, last + 1):
                start[step] = begin
                end[step] = finish
                during[step] = memory
            for step in range(at, last + 1):
                code = codes[step]
                if last > at:  # else they are known from above
                    stage = stage_of(code)
                    kind = kind_of(code)
                if kind == B:
                    memory -= activation[stage]
                elif kind == I:
                    memory -= activation[stage] - stash[stage]
                elif kind == W:
                    memory -= stash[stage] / num_weight_parts
                made = makes[step]
                if made < 0:
                    continue
                ended[made] = finish
                arrived[made] = finish
                if to[step] >= 0:
                    base = copy_base(microbatch_of(code), second_from, num_stages)
                    message = message_place(base, stage, 0 if kind == F else 1)
                    blocks = step < free_first[rank] or step > free_last[rank]
                    leaves = now if blocks else finish
                    if serial_links and link_free[edge[message]] > leaves:
                        leaves = link_free[edge[message]]
                    arrived[made] = leaves + travel[message]
                    link_free[edge[message]] = leaves + occupies[message]
                    if blocks:
                        now = arrived[made]
                if waiter[made] >= 0:
                    stack[top] = waiter[made]
                    waiter[made] = -1
                    top += 1
            for step in range(at, last + 1):
                after[step] = memory
            left -= last + 1 - at
            at = last + 1
        position[rank] = at
        clock[rank] = now
        level[rank] = memory
    return left == 0
