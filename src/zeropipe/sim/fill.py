"""Run weight gradients where a rank would otherwise wait.

No action waits for a W, so a W can be delayed until its rank waits for data. First every W is divided into equal parts,
which fit into smaller gaps. Then each rank's row is rewritten: its other actions keep their order, and pending parts
fill the gaps between them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import accumulate
from typing import NamedTuple

from zeropipe.core.action import B, F, I, W
from zeropipe.core.complete import check_complete
from zeropipe.core.jit import Floats, Ints, arrays
from zeropipe.core.needs import Dependencies, build_dependencies, copy_offset, message_index
from zeropipe.core.packed import PackedRows, is_joined, kind_of, microbatch_of, stage_of, with_kind
from zeropipe.core.placement import MAX_WEIGHT_PARTS
from zeropipe.core.schedule import Schedule, require_schedule
from zeropipe.core.timeline import ROUNDING, Timeline
from zeropipe.errors import ConfigError
from zeropipe.sim.costs import Costs, require_stage_costs
from zeropipe.sim.simulate import Results, simulate
from zeropipe.sim.tables import CostTables, build_cost_tables, constant_memory, phase_saving

# a part fills a gap if at least this fraction of it fits; each value is tried, and the shortest schedule is returned
FIT_FRACTIONS = (1.0, 0.75, 0.5, 0.25, 0.0)


class FillState(NamedTuple):
    """The state of each rank while its row is rewritten."""

    position: Ints  # the index of its next F, B or I
    cursor: Ints  # where its next action is written
    clock: Floats
    memory: Floats
    limits: Floats  # of its memory
    pending: Ints  # parts of W whose I has run, from `first` to `count`; a rank's begin where its row does
    first: Ints
    count: Ints
    stack: Ints  # ranks that can run


ROUNDING_TIME, ROUNDING_FIT = 1e-12, 1e-9  # of a time, and of a W: two sums that differ by less are equal


def is_ready(ready: float, now: float) -> bool:
    """Return whether an input that arrives at `ready` is there, within rounding."""
    return ready <= now + ROUNDING_TIME * now


def fits_gap(now: float, ready: float, duration: float, min_fit: float) -> bool:
    """Return whether a rank waits from `now` to `ready` for so long that at least `min_fit` of a W fits."""
    return not is_ready(ready, now) and now + min_fit * duration <= ready + ROUNDING_FIT * duration


def fill_gaps(schedule: Schedule, costs: Costs | None = None, *, weight_parts: int = 4) -> Schedule:
    """`schedule` with every W in `weight_parts` equal parts, run where its rank would wait under these costs.

    F, B and I keep their order. A W waits for a gap as long as memory allows: up to `costs.memory_limit`, or without
    one up to the peak of its rank. The schedule never becomes longer; one without W stays unchanged.
    """
    require_schedule(schedule)
    exact = require_stage_costs(costs)
    costs = exact.with_reserved_workspace(schedule.placement)
    divided = simulate(divide_weights(schedule, weight_parts), costs)
    if costs.shards is not None:
        return _fill_sharded(simulate(schedule, costs), divided, costs)
    if costs is not exact and costs.memory_limit is None:
        return _fill_beside_workspace(divided, simulate(divided.schedule, exact), costs, exact)
    limits = divided.peak_memory if costs.memory_limit is None else (costs.memory_limit,) * schedule.num_ranks
    filled = _fill_rows(divided.schedule, costs, limits)
    if not (costs.blocking or costs.blocking_ends or costs.serial_links):
        filled = filled[:1]  # the others are known to be no shorter
    return min(divided, *(simulate(one, costs) for one in filled), key=lambda timeline: timeline.makespan).schedule


def _fill_beside_workspace(reserved: Timeline, divided: Timeline, costs: Costs, exact: Costs) -> Schedule:
    """The shortest of the divided and filled schedules in which no rank has a higher peak than in the divided one.

    Rows are filled by `costs`, where the largest workspace is resident all the time, so the peaks of the divided
    schedule, `reserved`, are higher than with the `exact` costs.
    """
    limits = (reserved.peak_memory, divided.peak_memory)
    filled = [simulate(one, exact) for own in limits for one in _fill_rows(divided.schedule, costs, own)]
    return min(_select_fitting([divided, *filled], limits[1]), key=lambda timeline: timeline.makespan).schedule


def _fill_sharded(original: Timeline, divided: Timeline, costs: Costs) -> Schedule:
    """The shortest of the original, divided and filled schedules that stay within their memory.

    When a stage is gathered depends on the number of actions before it, and rows are filled without the memory of full
    weights and gradients. So only a simulation shows the makespan and the memory of a filled schedule.
    """
    unsharded = simulate(divided.schedule, costs.without_sharding()).peak_memory
    full_sizes = [peak - own for peak, own in zip(divided.peak_memory, unsharded, strict=True)]
    limits = original.peak_memory if costs.memory_limit is None else (costs.memory_limit,) * original.num_ranks
    rows = _fill_rows(divided.schedule, costs, [limit - size for limit, size in zip(limits, full_sizes, strict=True)])
    candidates = [divided, *(simulate(one, costs) for one in rows)]
    fitting = _select_fitting(candidates, list(map(max, limits, original.peak_memory)))
    return min([*fitting, original], key=lambda timeline: timeline.makespan).schedule


def _select_fitting(timelines: Sequence[Timeline], limits: Sequence[float]) -> list[Timeline]:
    """Those in which each rank stays within its limit."""
    bounds = [limit * ROUNDING for limit in limits]
    return [one for one in timelines if all(p <= bound for p, bound in zip(one.peak_memory, bounds, strict=True))]


def divide_weights(schedule: Schedule, weight_parts: int) -> Schedule:
    """`schedule` with every W in `weight_parts` equal parts, in sequence."""
    if schedule.num_slices > 1:
        raise ConfigError(f"weight_parts={weight_parts!r}: {schedule.name} has slices, whose W are not divided")
    if type(weight_parts) is not int or not 1 <= weight_parts <= MAX_WEIGHT_PARTS:
        raise ConfigError(f"weight_parts={weight_parts!r}: must be an integer from 1 to {MAX_WEIGHT_PARTS}")
    if schedule.offloading is not None:
        raise ConfigError(f"{schedule.name} has OFFLOAD and RELOAD, whose places depend on the others: fill gaps first")
    if schedule.checkpointed:
        raise ConfigError(f"{schedule.name} has checkpointed F, which depend on the memory of others: fill gaps first")
    present = schedule.problem.num_weight_parts
    if present != 1:
        raise ConfigError(f"{schedule.name} has W in {present} parts already: must be undivided")
    check_complete(schedule)  # before its rows change
    xp = arrays(schedule.num_actions)
    codes, sizes = xp.ints(schedule.packed.codes), xp.full_ints(schedule.num_ranks)
    divided = xp.full_ints(xp.call(count_kernel, codes, xp.list_ints(schedule.packed.offsets), weight_parts, sizes))
    if len(divided) == schedule.num_actions:  # no W, or one part
        return schedule
    xp.call(divide_kernel, codes, weight_parts, divided)
    problem = replace(schedule.problem, num_weight_parts=weight_parts)
    offsets = tuple(accumulate(map(int, sizes), initial=0))
    return replace(schedule, problem=problem, packed=PackedRows(xp.int_bytes(divided), offsets))


def count_kernel(codes: Ints, offsets: Ints, num_weight_parts: int, sizes: Ints) -> int:
    """The number of actions of each rank with its W divided, and their sum."""
    total = 0
    for rank in range(len(offsets) - 1):
        size = 0
        for at in range(offsets[rank], offsets[rank + 1]):
            size += num_weight_parts if kind_of(codes[at]) == W else 1
        sizes[rank] = size
        total += size
    return total


def divide_kernel(codes: Ints, num_weight_parts: int, out: Ints) -> None:
    """Write every W once per part."""
    cursor = 0
    for at in range(len(codes)):
        for _ in range(num_weight_parts if kind_of(codes[at]) == W else 1):
            out[cursor] = codes[at]
            cursor += 1


def _fill_rows(schedule: Schedule, costs: Costs, limits: Sequence[float]) -> list[Schedule]:
    """The schedule with its rows rewritten for each of FIT_FRACTIONS, the shortest first."""
    xp, num_ranks = arrays(schedule.num_actions * len(FIT_FRACTIONS)), schedule.num_ranks
    deps, tables = build_dependencies(xp, schedule), build_cost_tables(xp, schedule, costs)
    filled = []
    for fraction in FIT_FRACTIONS:
        results = Results(
            ended=xp.full_floats(deps.num_keys, -1.0), arrived=xp.full_floats(deps.num_keys, -1.0),
            waiter=xp.full_ints(deps.num_keys, -1),
        )  # fmt: skip
        offsets = schedule.packed.offsets[:-1]
        state = FillState(
            position=xp.list_ints(offsets), cursor=xp.list_ints(offsets), clock=xp.full_floats(num_ranks),
            memory=xp.list_floats(constant_memory(schedule, costs)),
            limits=xp.list_floats([limit * ROUNDING for limit in limits]), pending=xp.full_ints(schedule.num_actions),
            first=xp.full_ints(num_ranks), count=xp.full_ints(num_ranks), stack=xp.full_ints(num_ranks),
        )  # fmt: skip
        out = xp.full_ints(schedule.num_actions)
        makespan = xp.call(fill_kernel, deps, tables, fraction, results, state, out)
        packed = PackedRows(xp.int_bytes(out), schedule.packed.offsets)
        filled.append((float(makespan), replace(schedule, packed=packed)))
    return [schedule for _, schedule in sorted(filled, key=lambda pair: pair[0])]


def fill_kernel(
    deps: Dependencies, costs: CostTables, fraction: float, results: Results, state: FillState, out: Ints
) -> float:
    """Run F, B and I in their order as early as possible, and W, oldest first, while the rank waits; the makespan.

    Messages take as long as alone on their link; the caller simulates the result.
    """
    codes, offsets, remote, own, makes, to = deps.codes, deps.offsets, deps.remote, deps.own, deps.makes, deps.to
    durations, num_stages, num_weight_parts = costs.durations, costs.num_stages, costs.num_weight_parts
    activation, stash = costs.activation, costs.stash
    ended, arrived, waiter = results.ended, results.arrived, results.waiter
    cursor, pending, first, count, stack = state.cursor, state.pending, state.first, state.count, state.stack
    num_ranks = len(offsets) - 1
    for rank in range(num_ranks):
        stack[rank] = num_ranks - 1 - rank
    top = num_ranks
    while top > 0:
        top -= 1
        rank = stack[top]
        row = offsets[rank]
        at = state.position[rank]
        now = state.clock[rank]
        memory = state.memory[rank]
        while at < offsets[rank + 1]:
            if kind_of(codes[at]) == W:
                at += 1
                continue
            last = at + is_joined(codes[at])
            missing = -1
            begin = now
            duration = 0.0
            allocated = 0.0
            grown = 0.0
            for half in range(at, last + 1):
                needed = own[half]
                if needed >= 0:
                    begin = max(begin, ended[needed])
                needed = remote[half]
                if needed >= 0:
                    if arrived[needed] < 0:
                        missing = needed
                    begin = max(begin, arrived[needed])
                stage = stage_of(codes[half])
                kind = kind_of(codes[half])
                duration += durations[kind * num_stages + stage]
                if last > at:
                    duration -= costs.savings[stage] / 2
                if kind == F:
                    allocated += activation[stage]
                elif kind == I:
                    grown += max(0.0, stash[stage] - activation[stage])  # with recomputation the stash may be larger
            if last > at and costs.num_classes:
                duration -= phase_saving(costs, codes[at], codes[last])
            if missing >= 0:
                waiter[missing] = rank
                break
            while first[rank] < count[rank]:
                weight = pending[row + first[rank]]
                stage = stage_of(weight)
                part = durations[W * num_stages + stage]
                is_over = allocated + grown > 0 and memory + allocated + grown > state.limits[rank]
                if not is_over and now + fraction * part > begin - 1e-9 * part:
                    break
                out[cursor[rank]] = weight
                cursor[rank] += 1
                first[rank] += 1
                memory -= stash[stage] / num_weight_parts
                now += part
            now = max(now, begin) + max(duration, 0.0)
            memory += allocated
            for half in range(at, last + 1):
                code = codes[half]
                out[cursor[rank]] = code
                cursor[rank] += 1
                stage = stage_of(code)
                kind = kind_of(code)
                if kind == B:
                    memory -= activation[stage]
                elif kind == I:
                    memory -= activation[stage] - stash[stage]
                    for _ in range(num_weight_parts):
                        pending[row + count[rank]] = with_kind(code, W)
                        count[rank] += 1
                result = makes[half]
                ended[result] = now
                arrived[result] = now
                if to[half] >= 0:
                    offset = copy_offset(microbatch_of(code), costs.second_from, num_stages)
                    arrived[result] = now + costs.travel[message_index(offset, stage, 0 if kind == F else 1)]
                if waiter[result] >= 0:
                    stack[top] = waiter[result]
                    waiter[result] = -1
                    top += 1
            at = last + 1
        if at == offsets[rank + 1]:
            while first[rank] < count[rank]:
                weight = pending[row + first[rank]]
                now += durations[W * num_stages + stage_of(weight)]
                out[cursor[rank]] = weight
                cursor[rank] += 1
                first[rank] += 1
        state.position[rank] = at
        state.clock[rank] = now
        state.memory[rank] = memory
    makespan: float = max(state.clock)
    return makespan
