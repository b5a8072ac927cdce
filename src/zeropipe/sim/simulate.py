"""The simulator: every action starts as soon as its rank is free and its inputs have arrived."""

from __future__ import annotations

from zeropipe.core.action import RESHARD, UNSHARD, B, F, I, W
from zeropipe.core.complete import check_complete
from zeropipe.core.deadlock import build_deadlock_error
from zeropipe.core.jit import arrays
from zeropipe.core.needs import build_dependencies, copy_offset, find_nonblocking_actions, message_index
from zeropipe.core.packed import is_joined, kind_of, microbatch_of, stage_of
from zeropipe.core.schedule import Schedule, require_schedule
from zeropipe.core.shard_actions import with_shards
from zeropipe.core.shard_timeline import extract_sharding
from zeropipe.core.timeline import Memory, Timeline
from zeropipe.sim.costs import Costs, given_costs
from zeropipe.sim.tables import shard_tables_of, tables_of


def simulate(schedule: Schedule, costs: Costs | None = None) -> Timeline:
    """The timeline of `schedule` under `costs` (default: F = I = W = 1, messages free).

    Raises ScheduleError for a schedule that is not complete and DeadlockError for one that cannot end.
    """
    require_schedule(schedule)
    costs = given_costs(costs)
    check_complete(schedule)
    rows = schedule.packed if costs.shards is None else with_shards(schedule, costs.shards)
    xp = arrays(rows.num_codes)
    deps = build_dependencies(xp, schedule, rows)
    size, num_stages = rows.num_codes, schedule.num_stages
    tables, shards = tables_of(xp, schedule, costs), shard_tables_of(xp, schedule, costs)
    start, end, during, after = (xp.full_floats(size) for _ in range(4))
    ended, arrived = xp.full_floats(deps.num_keys, -1.0), xp.full_floats(deps.num_keys, -1.0)
    waiter = xp.full_ints(deps.num_keys, -1)
    position, stack = xp.list_ints(rows.offsets[:-1]), xp.full_ints(schedule.num_ranks)
    slots = 2 * num_stages if costs.shards else 0  # of both copies of a stage
    finished = xp.call(
        simulate_kernel, deps.codes, deps.offsets, deps.remote, deps.own, deps.makes, deps.to, num_stages,
        tables.second_from, tables.durations, tables.saving,
        tables.travel, tables.occupies, tables.edge, xp.full_floats(tables.num_edges), costs.serial_links,
        *find_nonblocking_actions(xp, deps, costs.blocking, costs.blocking_ends),
        tables.activation, tables.stash, tables.num_weight_parts, tables.constant, xp.full_floats(schedule.num_ranks),
        slots, *shards, xp.full_floats(schedule.num_ranks),
        *(xp.full_ints(schedule.num_ranks, -1) for _ in range(3)),
        xp.full_floats(slots), xp.full_floats(slots), xp.full_ints(slots), xp.full_floats(slots),
        xp.full_ints(slots, -1),
        ended, arrived, waiter, position, stack, start, end, during, after,
    )  # fmt: skip
    if not finished:
        raise build_deadlock_error(schedule, deps, position, xp.list_ints([int(t >= 0) for t in ended]))
    if costs.shards is not None:
        sizes = [costs.column(name, num_stages) for name in ("whole_weights", "whole_gradients")]
        columns = (start, end, during, after)
        (start, end, during, after), sharding = extract_sharding(
            xp, schedule.num_actions, rows, sizes, costs.units, *columns
        )
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
        sharding=None if costs.shards is None else sharding,
    )


def simulate_kernel(  # type: ignore[no-untyped-def]
    codes, offsets, remote, own, makes, to, num_stages, second_from, durations, saving,
    travel, occupies, edge, link_free, serial_links, free_first, free_last,
    activation, stash, num_weight_parts, level, clock,
    slots, unshard, reduce, gathered, gradients, home, units, shard_link, latest, reducing, newest,
    first_unit, last_unit, owes, freed, behind,
    ended, arrived, waiter, position, stack, start, end, during, after,
):  # fmt: skip
    """Run every rank as far as it goes, in its own order; True if all reach their end.

    A rank that lacks a result leaves its number in `waiter` and is put back on the stack by whoever makes it, so each
    action is looked at no more than twice. Times do not depend on the order in which ranks are taken from the stack:
    a direction's messages are all sent by one rank, in its own order.

    Where stages are sharded, each rank has a `shard_link` that takes UNSHARD and REDUCE_GRAD in their order, beside its
    computations. A slot is a stage, or its second copy: `first_unit` and `last_unit` say when it is gathered, `owes`
    whether it has whole gradients, `freed` when they are reduced. From `reducing` to `newest`, linked by `behind`, are
    the slots of a rank whose gradients are still there.
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
            if slots and kind_of(codes[at]) >= UNSHARD:
                kind = kind_of(codes[at])
                stage = stage_of(codes[at])
                slot = stage if home[stage] == rank else num_stages + stage
                begin = now
                if kind == UNSHARD:
                    begin = max(now, shard_link[rank])
                    first_unit[slot] = begin + unshard[stage] / units
                    last_unit[slot] = begin + unshard[stage]
                    shard_link[rank] = last_unit[slot]
                    memory += gathered[stage]
                elif kind == RESHARD:
                    memory -= gathered[stage]
                else:
                    # a unit is complete when its part of the W right before has run; a W in parts runs its last part
                    before = latest[rank]
                    inside = before >= 0 and kind_of(codes[before]) == W and stage_of(codes[before]) == stage
                    free = shard_link[rank]
                    for unit in range(units):
                        complete = now
                        if inside:
                            share = max(0.0, 1 - num_weight_parts * (1 - (unit + 1) / units))
                            complete = start[before] + share * (end[before] - start[before])
                        if unit == 0:
                            begin = max(free, complete)
                        free = max(free, complete) + reduce[stage] / units
                    shard_link[rank] = free
                    if owes[slot]:
                        freed[slot] = free
                        if reducing[rank] < 0:
                            reducing[rank] = slot
                        else:
                            behind[newest[rank]] = slot
                        newest[rank] = slot
                start[at] = begin
                end[at] = max(begin, shard_link[rank]) if kind != RESHARD else begin
                during[at] = memory
                after[at] = memory
                left -= 1
                at += 1
                continue
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
            whole = 0.0  # when all weights are there
            if slots:
                for step in range(at, last + 1):
                    stage = stage_of(codes[step])
                    slot = stage if home[stage] == rank else num_stages + stage
                    if kind_of(codes[step]) != W:
                        begin = max(begin, first_unit[slot])
                        whole = max(whole, last_unit[slot])
                    if kind_of(codes[step]) in (B, W) and owes[slot] == 0:
                        owes[slot] = 1
                        memory += gradients[stage]
                while reducing[rank] >= 0 and freed[reducing[rank]] <= begin:
                    memory -= gradients[reducing[rank] % num_stages]
                    reducing[rank] = behind[reducing[rank]]
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
            if whole > begin:
                finish = max(finish, whole + max(lasts, 0.0) / units)
            if slots:
                latest[rank] = last
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
                    base = copy_offset(microbatch_of(code), second_from, num_stages)
                    message = message_index(base, stage, 0 if kind == F else 1)
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
