"""The simulator: every action starts as soon as its rank is free and its inputs have arrived."""

from __future__ import annotations

from collections.abc import Collection
from typing import NamedTuple

from zeropipe.core.action import COMPUTE, OFFLOAD, OFFLOADING, RESHARD, UNSHARD, B, F, I, Kind, W
from zeropipe.core.complete import check_complete
from zeropipe.core.deadlock import build_deadlock_error
from zeropipe.core.gradient_policy import REDUCES_AT_ONCE
from zeropipe.core.jit import Arrays, Floats, Ints, arrays
from zeropipe.core.needs import Dependencies, build_dependencies, copy_offset, find_nonblocking_actions, message_index
from zeropipe.core.offload_actions import merge_offloading
from zeropipe.core.offload_timeline import offloading_of
from zeropipe.core.packed import PackedRows, is_joined, is_offloading, kind_of, microbatch_of, stage_of
from zeropipe.core.phases import Phases
from zeropipe.core.schedule import Schedule, require_schedule
from zeropipe.core.select_rows import select_rows
from zeropipe.core.shard_actions import with_shards
from zeropipe.core.shard_timeline import sharding_of
from zeropipe.core.timeline import Memory, Timeline
from zeropipe.sim.costs import Costs, require_stage_costs
from zeropipe.sim.tables import (
    CostTables,
    OffloadTables,
    ShardTables,
    build_cost_tables,
    build_offload_tables,
    build_shard_tables,
    first_memory,
    phase_saving,
)  # fmt: skip


class Results(NamedTuple):
    """The result of each key."""

    ended: Floats  # when the action that produces it ended; -1 before
    arrived: Floats  # when it was available where it is needed; -1 before
    waiter: Ints  # the rank that waits for it, or -1


class RankState(NamedTuple):
    """The state of each rank. A slot is a stage, or its second copy."""

    position: Ints  # the index of its next action
    clock: Floats  # the end of its last action, and of its blocking send
    memory: Floats
    first_nonblocking: Ints
    last_nonblocking: Ints
    stack: Ints  # ranks that can run
    has_gradients: Ints  # by slot: whether its first B or W has begun


class ShardState(NamedTuple):
    """Gathers and reductions under way.

    The slots of a rank whose gradients are in memory form a linked list, from `first_reducing` over `next_reducing` to
    `last_reducing`.
    """

    num_slots: int  # 0 if stages are not sharded
    link_free: Floats  # by rank: when its link to the ranks that share its stages is free
    last_action: Ints  # by rank
    first_reducing: Ints  # by rank
    last_reducing: Ints  # by rank
    first_unit: Floats  # by slot: when its first unit is gathered
    last_unit: Floats  # by slot: when all units are gathered
    has_gradients: Ints  # by slot
    reduced: Floats  # by slot: when its gradients are reduced
    next_reducing: Ints  # by slot
    held: Floats  # by slot: memory of its rolling gradients
    pending: Floats  # by rank: memory of rolling gradients that are being reduced
    pending_end: Floats  # by rank: when they are reduced
    has_room: Floats  # by rank: when gradients may be computed again, with few enough units being reduced


class OffloadState(NamedTuple):
    """Copies under way. A slot is a microbatch of a stage."""

    num_microbatches: int  # 0 without any copies
    out_free: Floats  # by rank: when its lane to the host is free
    in_free: Floats  # by rank: when its lane from the host is free
    copied: Floats  # by slot: when its OFFLOAD or RELOAD has ended
    num_freed: Ints  # by rank: the index of the first action that may be an OFFLOAD whose memory is not yet free


class Columns(NamedTuple):
    """The times and memory levels of each action."""

    start: Floats
    end: Floats
    during: Floats
    after: Floats


def simulate(schedule: Schedule, costs: Costs | None = None) -> Timeline:
    """The timeline of `schedule` under `costs` (default: F = I = W = 1, messages free).

    Raises ScheduleError for an incomplete schedule and DeadlockError for one that cannot end.
    """
    require_schedule(schedule)
    costs = require_stage_costs(costs)
    check_complete(schedule)
    rows = schedule.packed if costs.shards is None else with_shards(schedule, costs.shards, costs.gradients)
    rows = merge_offloading(schedule, rows)
    xp, num_ranks = arrays(rows.num_codes), schedule.num_ranks
    deps, tables = build_dependencies(xp, schedule, rows), build_cost_tables(xp, schedule, costs)
    results = Results(
        ended=xp.full_floats(deps.num_keys, -1.0), arrived=xp.full_floats(deps.num_keys, -1.0),
        waiter=xp.full_ints(deps.num_keys, -1),
    )  # fmt: skip
    first, last = find_nonblocking_actions(xp, deps, costs.blocking, costs.blocking_ends)
    ranks = RankState(
        position=xp.list_ints(rows.offsets[:-1]), clock=xp.full_floats(num_ranks),
        memory=xp.list_floats(first_memory(schedule, costs)), first_nonblocking=first, last_nonblocking=last,
        stack=xp.full_ints(num_ranks), has_gradients=xp.full_ints(2 * schedule.num_stages),
    )  # fmt: skip
    shard_state = _create_shard_state(xp, num_ranks, 2 * schedule.num_stages if costs.shards else 0)
    offload_state = _create_offload_state(xp, schedule, rows)
    start, end, during, after = (xp.full_floats(rows.num_codes) for _ in range(4))
    columns = Columns(start=start, end=end, during=during, after=after)
    if not xp.call(
        simulate_kernel, deps, tables, build_shard_tables(xp, schedule, costs),
        build_offload_tables(xp, schedule, costs), xp.full_floats(tables.num_edges),
        results, ranks, shard_state, offload_state, columns,
    ):  # fmt: skip
        done = xp.list_ints([int(time >= 0) for time in results.ended])
        raise build_deadlock_error(schedule, deps, ranks.position, done)
    sharding = offloading = None
    if costs.shards is not None:
        sizes = [costs.column(name, schedule.num_stages) for name in ("full_weights", "full_gradients")]
        sharding = sharding_of(*_select_events(xp, rows, (Kind.UNSHARD, Kind.REDUCE_GRAD), columns), sizes, costs.units)
    if schedule.offloading is not None:
        size = costs.column("offload_size", schedule.num_stages)
        offloading = offloading_of(*_select_events(xp, rows, OFFLOADING, columns), size)
    if rows.num_codes > schedule.num_actions:
        columns = Columns(*select_rows(xp, rows, COMPUTE, *columns)[1])
    return Timeline(
        schedule,
        start=xp.float_bytes(columns.start),
        end=xp.float_bytes(columns.end),
        memory=Memory(xp.float_bytes(columns.during), xp.float_bytes(columns.after)),
        memory_limit=costs.memory_limit,
        unit=costs.unit,
        memory_unit=costs.memory_unit,
        blocking=costs.blocking,
        blocking_ends=costs.blocking_ends,
        sharding=sharding,
        offloading=offloading,
        phases=None if costs.phases is None else Phases(tuple(costs.stage_phases(schedule.num_stages)), costs.sm_tax),
    )


def _select_events(
    xp: Arrays, rows: PackedRows, kinds: Collection[Kind], columns: Columns
) -> tuple[PackedRows, bytes, bytes]:
    """The actions of these kinds, their starts and their ends."""
    packed, (start, end) = select_rows(xp, rows, kinds, columns.start, columns.end)
    return packed, xp.float_bytes(start), xp.float_bytes(end)


def _create_offload_state(xp: Arrays, schedule: Schedule, rows: PackedRows) -> OffloadState:
    num_microbatches = 0 if schedule.offloading is None else schedule.num_microbatches
    return OffloadState(
        num_microbatches=num_microbatches, out_free=xp.full_floats(schedule.num_ranks),
        in_free=xp.full_floats(schedule.num_ranks), copied=xp.full_floats(schedule.num_stages * num_microbatches),
        num_freed=xp.list_ints(rows.offsets[:-1]),
    )  # fmt: skip


def _create_shard_state(xp: Arrays, num_ranks: int, num_slots: int) -> ShardState:
    return ShardState(
        num_slots=num_slots, link_free=xp.full_floats(num_ranks), last_action=xp.full_ints(num_ranks, -1),
        first_reducing=xp.full_ints(num_ranks, -1), last_reducing=xp.full_ints(num_ranks, -1),
        first_unit=xp.full_floats(num_slots), last_unit=xp.full_floats(num_slots),
        has_gradients=xp.full_ints(num_slots), reduced=xp.full_floats(num_slots),
        next_reducing=xp.full_ints(num_slots, -1), held=xp.full_floats(num_slots), pending=xp.full_floats(num_ranks),
        pending_end=xp.full_floats(num_ranks), has_room=xp.full_floats(num_ranks),
    )  # fmt: skip


def simulate_kernel(
    deps: Dependencies, costs: CostTables, shards: ShardTables, offload: OffloadTables, edge_free: Floats, results:
    Results, ranks: RankState, shard_state: ShardState, offload_state: OffloadState, columns: Columns,
) -> bool:  # fmt: skip
    """Run every rank as far as possible, in its own order; True if all reach their end.

    A rank that lacks a result becomes its `waiter`, and returns to the stack when the result is produced. So each
    action is visited at most twice. Times do not depend on the order of the stack: all messages of a direction are sent
    by one rank, in its own order.
    """
    codes, offsets, remote, own, makes, to = deps.codes, deps.offsets, deps.remote, deps.own, deps.makes, deps.to
    durations, savings, num_stages = costs.durations, costs.savings, costs.num_stages
    activation, released, stash = costs.activation, costs.released, costs.stash
    num_weight_parts = costs.num_weight_parts
    num_rows = costs.num_rows
    edges, travel, transfer = costs.edges, costs.travel, costs.transfer
    ended, arrived, waiter = results.ended, results.arrived, results.waiter
    stack, position = ranks.stack, ranks.position
    start, end, during, after = columns.start, columns.end, columns.during, columns.after
    is_sharded = shard_state.num_slots > 0
    is_offloaded = offload_state.num_microbatches > 0
    num_ranks = len(offsets) - 1
    for rank in range(num_ranks):
        stack[rank] = num_ranks - 1 - rank
    top = num_ranks
    remaining = len(codes)
    while top > 0:
        top -= 1
        rank = stack[top]
        at = position[rank]
        now = ranks.clock[rank]
        memory = ranks.memory[rank]
        while at < offsets[rank + 1]:
            if is_offloaded and is_offloading(codes[at]):
                memory = _run_copy(at, rank, now, memory, codes, offload, offload_state, columns)
                remaining -= 1
                at += 1
                continue
            if is_sharded and kind_of(codes[at]) >= UNSHARD:
                memory = _run_sharding_action(at, rank, now, memory, codes, costs, shards, shard_state, columns)
                remaining -= 1
                at += 1
                continue
            last = at + is_joined(codes[at])
            missing = -1
            begin = now
            for half in range(at, last + 1):
                needed = own[half]
                if needed >= 0:
                    if ended[needed] < 0:
                        missing = needed
                    elif ended[needed] > begin:
                        begin = ended[needed]
                needed = remote[half]
                if needed >= 0:
                    if arrived[needed] < 0:
                        missing = needed
                    elif arrived[needed] > begin:
                        begin = arrived[needed]
            if missing >= 0:
                waiter[missing] = rank
                break
            duration = 0.0
            gathered = 0.0  # when all weights are gathered
            if is_offloaded:
                begin, memory = _wait_for_copies(at, last, rank, begin, memory, codes, offload, offload_state, columns)
            if is_sharded:
                begin, gathered, memory = _use_sharded_stages(
                    at, last, rank, begin, memory, codes, costs, shards, shard_state
                )
            for half in range(at, last + 1):
                row = _row_of(codes[half], costs)
                kind = kind_of(codes[half])
                duration += durations[kind * num_rows + row]
                if last > at:
                    # an Overlap of two stages saves the mean of the savings of each stage's own pair
                    duration -= savings[row] / 2
                if kind == F:
                    memory += activation[row]
                elif kind != W:
                    memory += costs.key_gradients[row]
            if last > at and costs.num_classes:
                duration -= phase_saving(costs, codes[at], codes[last])
            finish = begin + max(duration, 0.0)
            if gathered > begin:
                finish = max(finish, gathered + max(duration, 0.0) / shards.units)
            now = finish
            needed_memory = memory
            allocated = 0.0  # gradients of stages that have none yet
            freed = 0.0  # by the same actions meanwhile
            for half in range(at, last + 1):
                row = _row_of(codes[half], costs)
                kind = kind_of(codes[half])
                if kind == F:
                    needed_memory += costs.f_workspace[row]
                elif kind == I:
                    needed_memory += costs.i_workspace[row]
                else:
                    if kind == B:
                        needed_memory += costs.workspace[row]
                    slot = _slot_of(stage_of(codes[half]), rank, costs)
                    if ranks.has_gradients[slot] == 0:
                        ranks.has_gradients[slot] = 1
                        allocated += costs.first_gradients[stage_of(codes[half])]
                        freed += released[row] if kind == B else stash[row] / num_weight_parts
            needed_memory += max(allocated - freed, 0.0)
            memory += allocated
            for half in range(at, last + 1):
                start[half] = begin
                end[half] = finish
                during[half] = needed_memory
            for half in range(at, last + 1):
                code = codes[half]
                if last > at:  # else row and kind are set above
                    row = _row_of(code, costs)
                    kind = kind_of(code)
                if kind == B:
                    memory -= released[row]
                elif kind == I:
                    memory -= released[row] - stash[row]
                elif kind == W:
                    memory -= stash[row] / num_weight_parts
                result = makes[half]
                if result < 0:
                    continue
                ended[result] = finish
                arrived[result] = finish
                if to[half] >= 0:
                    offset = copy_offset(microbatch_of(code), costs.second_from, num_stages)
                    message = message_index(offset, stage_of(code), 0 if kind == F else 1)
                    message += row % (costs.num_slices * num_stages) // num_stages * costs.num_messages
                    blocks = half < ranks.first_nonblocking[rank] or half > ranks.last_nonblocking[rank]
                    sent = now if blocks else finish
                    if costs.serial_links and edge_free[edges[message]] > sent:
                        sent = edge_free[edges[message]]
                    arrived[result] = sent + travel[message]
                    edge_free[edges[message]] = sent + transfer[message]
                    if blocks:
                        now = arrived[result]
                if waiter[result] >= 0:
                    stack[top] = waiter[result]
                    waiter[result] = -1
                    top += 1
            for half in range(at, last + 1):
                after[half] = memory
            remaining -= last + 1 - at
            at = last + 1
        position[rank] = at
        ranks.clock[rank] = now
        ranks.memory[rank] = memory
    return remaining == 0


def _row_of(code: int, costs: CostTables) -> int:
    """The index of an action's slice and stage in the tables of costs, or that of a checkpointed F and its backward."""
    row: int = stage_of(code)
    if costs.num_slices > 1:
        row += microbatch_of(code) % costs.num_slices * costs.num_stages
    if len(costs.checkpointed) > 0:
        row += costs.checkpointed[stage_of(code) * costs.num_microbatches + microbatch_of(code)] * costs.num_rows // 2
    return row


def _slot_of(stage: int, rank: int, costs: CostTables) -> int:
    """The slot of a rank's copy of a stage."""
    return stage if costs.first_rank[stage] == rank else costs.num_stages + stage


def _run_sharding_action(
    at: int, rank: int, now: float, memory: float, codes: Ints, costs: CostTables, shards: ShardTables, state:
    ShardState, columns: Columns,
) -> float:  # fmt: skip
    """Run an UNSHARD, RESHARD or REDUCE_GRAD on the rank's link, beside its computations; returns its memory level."""
    kind = kind_of(codes[at])
    stage = stage_of(codes[at])
    slot = _slot_of(stage, rank, costs)
    units = shards.units
    begin = now
    finish = now
    if kind == UNSHARD:
        begin = max(now, state.link_free[rank])
        finish = begin + shards.unshard[stage]
        state.first_unit[slot] = begin + shards.unshard[stage] / units
        state.last_unit[slot] = finish
        state.link_free[rank] = finish
        memory += shards.started[stage]
    elif kind == RESHARD:
        memory -= shards.gathered[stage]
    else:
        # a unit is complete when its fraction of the preceding B or W has run; the last part of a W completes its last
        # units
        before = state.last_action[rank]
        is_inside = before >= 0 and kind_of(codes[before]) in (B, W) and stage_of(codes[before]) == stage
        if shards.limit >= 0 and is_inside:
            is_inside = _rolls_inside(before, codes, shards)
        num_parts = costs.num_weight_parts if is_inside and kind_of(codes[before]) == W else 1
        free = state.link_free[rank]
        has_room = 0.0
        for unit in range(units):
            complete = now
            if is_inside:
                fraction = max(0.0, 1 - num_parts * (1 - (unit + 1) / units))
                complete = columns.start[before] + fraction * (columns.end[before] - columns.start[before])
            if unit == 0:
                begin = max(free, complete)
            free = max(free, complete) + shards.reduce[stage] / units
            if unit < units - REDUCES_AT_ONCE:
                has_room = free
        state.link_free[rank] = free
        finish = max(begin, free)
        if shards.limit >= 0:
            memory += _free_gradients(rank, stage, slot, free, has_room, shards, state)
        elif state.has_gradients[slot]:
            state.reduced[slot] = free
            if state.first_reducing[rank] < 0:
                state.first_reducing[rank] = slot
            else:
                state.next_reducing[state.last_reducing[rank]] = slot
            state.last_reducing[rank] = slot
    columns.start[at] = begin
    columns.end[at] = finish
    columns.during[at] = memory
    columns.after[at] = memory
    return memory


def _rolls_inside(at: int, codes: Ints, shards: ShardTables) -> bool:
    """Whether the units of a stage are reduced within a B or W: not in an Overlap, nor in a B that gathers weights."""
    if is_joined(codes[at]) or (at > 0 and is_joined(codes[at - 1])):
        return False
    return kind_of(codes[at]) == W or not shards.regathers


def _free_gradients(
    rank: int, stage: int, slot: int, end: float, has_room: float, shards: ShardTables, state: ShardState
) -> float:
    """Free the gradients of a stage, except units that are being reduced; returns the change of memory."""
    pending = min(REDUCES_AT_ONCE, shards.units) / shards.units * shards.gradients[stage]
    change: float = pending - state.pending[rank]
    if state.has_gradients[slot]:
        change -= state.held[slot]
    state.has_gradients[slot] = 0
    state.pending[rank] = pending
    state.pending_end[rank] = end
    state.has_room[rank] = has_room
    return change


def _run_copy(
    at: int, rank: int, now: float, memory: float, codes: Ints, offload: OffloadTables, state: OffloadState, columns:
    Columns,
) -> float:  # fmt: skip
    """Run an OFFLOAD or RELOAD on its lane, beside the rank's computations; returns its memory level."""
    stage = stage_of(codes[at])
    slot = stage * state.num_microbatches + microbatch_of(codes[at])
    begin = now
    if kind_of(codes[at]) == OFFLOAD:
        begin = max(now, state.out_free[rank])
        finish = begin + offload.offload[stage]
        state.out_free[rank] = finish
    else:
        begin = max(now, state.in_free[rank], state.copied[slot])
        finish = begin + offload.reload[stage]
        state.in_free[rank] = finish
        memory += offload.size[stage]
    state.copied[slot] = finish
    columns.start[at] = begin
    columns.end[at] = finish
    columns.during[at] = memory
    columns.after[at] = memory
    return memory


def _wait_for_copies(
    at: int, last: int, rank: int, begin: float, memory: float, codes: Ints, offload: OffloadTables, state:
    OffloadState, columns: Columns,
) -> tuple[float, float]:  # fmt: skip
    """When the actions `at` to `last` can begin, and the memory level without what is on the host by then."""
    for half in range(at, last + 1):
        if kind_of(codes[half]) in (B, I):
            slot = stage_of(codes[half]) * state.num_microbatches + microbatch_of(codes[half])
            begin = max(begin, state.copied[slot])
    first = state.num_freed[rank]
    while first < at and (kind_of(codes[first]) != OFFLOAD or columns.end[first] <= begin):
        if kind_of(codes[first]) == OFFLOAD:
            memory -= offload.size[stage_of(codes[first])]
        first += 1
    state.num_freed[rank] = first
    return begin, memory


def _use_sharded_stages(
    at: int, last: int, rank: int, begin: float, memory: float, codes: Ints, costs: CostTables, shards: ShardTables,
    state: ShardState,
) -> tuple[float, float, float]:  # fmt: skip
    """When the actions `at` to `last` can begin, when all their weights are gathered, and the memory level."""
    gathered = 0.0
    for half in range(at, last + 1):
        stage = stage_of(codes[half])
        slot = _slot_of(stage, rank, costs)
        if kind_of(codes[half]) != W:
            begin = max(begin, state.first_unit[slot])
            gathered = max(gathered, state.last_unit[slot])
            if half == at or stage != stage_of(codes[at]) or kind_of(codes[at]) == W:  # the halves may share a gather
                memory += shards.gathered[stage] - shards.started[stage]
        if kind_of(codes[half]) in (B, W) and shards.limit >= 0:
            begin = max(begin, state.has_room[rank])
    if state.pending_end[rank] <= begin:
        memory -= state.pending[rank]
        state.pending[rank] = 0.0
    for half in range(at, last + 1):
        stage = stage_of(codes[half])
        slot = _slot_of(stage, rank, costs)
        if kind_of(codes[half]) in (B, W) and state.has_gradients[slot] == 0:
            state.has_gradients[slot] = 1
            is_unit = shards.limit == 0 and _rolls_inside(half, codes, shards)
            state.held[slot] = shards.gradients[stage]
            if is_unit:  # with those that are being reduced already
                state.held[slot] = max(0.0, shards.rolling[stage] - state.pending[rank])
            memory += state.held[slot]
    slot = state.first_reducing[rank]
    while slot >= 0 and state.reduced[slot] <= begin:
        memory -= shards.gradients[slot % costs.num_stages]
        slot = state.next_reducing[slot]
    state.first_reducing[rank] = slot
    state.last_action[rank] = last
    return begin, gathered, memory
