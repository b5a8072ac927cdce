"""Runs weight gradients where a rank would otherwise wait.

No action waits for a W, so a W can be put off until its rank waits for data. Every W is first cut into equal parts,
which fit into smaller gaps. Then each rank's row is written anew: its other actions keep their order, and the parts
that are due go into the gaps between them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from zeropipe.core.action import B, F, I, W
from zeropipe.core.complete import check_complete
from zeropipe.core.jit import arrays
from zeropipe.core.needs import build_dependencies, copy_offset, message_index
from zeropipe.core.packed import PackedRows, is_joined, kind_of, microbatch_of, stage_of, with_kind
from zeropipe.core.placement import MAX_WEIGHT_PARTS
from zeropipe.core.schedule import Schedule, require_schedule
from zeropipe.core.timeline import ROUNDING, Timeline
from zeropipe.errors import ConfigError
from zeropipe.sim.costs import Costs, given_costs
from zeropipe.sim.simulate import simulate
from zeropipe.sim.tables import tables_of

# a part goes into a gap if at least this share of it fits; each share is tried, and the shortest schedule taken
SHARES = (1.0, 0.75, 0.5, 0.25, 0.0)


def fill_gaps(schedule: Schedule, costs: Costs | None = None, *, weight_parts: int = 4) -> Schedule:
    """`schedule` with every W in `weight_parts` equal parts, run where its rank would wait under these costs.

    F, B and I keep their order. A W waits for a gap as long as memory allows: up to `costs.memory_limit`, or to
    what each rank needs anyway where no limit is given. The schedule never becomes longer; one without W stays as it
    is.
    """
    require_schedule(schedule)
    costs = given_costs(costs)
    cut = simulate(cut_weights(schedule, weight_parts), costs)
    if costs.shards is not None:
        return _fill_sharded(simulate(schedule, costs), cut, costs)
    limits = cut.peak_memory if costs.memory_limit is None else (costs.memory_limit,) * schedule.num_ranks
    filled = _filled(cut.schedule, costs, limits)
    if not (costs.blocking or costs.blocking_ends or costs.serial_links):
        filled = filled[:1]  # the others are known to be no shorter
    return min(cut, *(simulate(one, costs) for one in filled), key=lambda timeline: timeline.makespan).schedule


def _fill_sharded(before: Timeline, cut: Timeline, costs: Costs) -> Schedule:
    """The shortest of the schedule as it was, cut, and filled, of those that keep the memory.

    When a stage is gathered depends on how many actions are ahead of it, and rows are filled without whole weights and
    gradients: so only a simulation tells how long one is and what it needs.
    """
    bare = simulate(cut.schedule, costs.unsharded()).peak_memory
    whole = [peak - own for peak, own in zip(cut.peak_memory, bare, strict=True)]
    limits = before.peak_memory if costs.memory_limit is None else (costs.memory_limit,) * before.num_ranks
    rows = _filled(cut.schedule, costs, [limit - size for limit, size in zip(limits, whole, strict=True)])
    most = [max(pair) * ROUNDING for pair in zip(limits, before.peak_memory, strict=True)]
    found = [cut, *(simulate(one, costs) for one in rows)]
    fitting = [one for one in found if all(peak <= limit for peak, limit in zip(one.peak_memory, most, strict=True))]
    return min([*fitting, before], key=lambda timeline: timeline.makespan).schedule


def cut_weights(schedule: Schedule, weight_parts: int) -> Schedule:
    """`schedule` with every W in `weight_parts` equal parts, one after the other."""
    if type(weight_parts) is not int or not 1 <= weight_parts <= MAX_WEIGHT_PARTS:
        raise ConfigError(f"weight_parts={weight_parts!r}: a W is cut into 1 to {MAX_WEIGHT_PARTS} parts")
    have = schedule.problem.num_weight_parts
    if have != 1:
        raise ConfigError(f"the W of {schedule.name} are in {have} parts already: start from the one with whole W")
    check_complete(schedule)  # before its rows are others
    xp = arrays(schedule.num_actions)
    whole, sizes = xp.ints(schedule.packed.codes), xp.full_ints(schedule.num_ranks)
    codes = xp.full_ints(xp.call(count_kernel, whole, xp.list_ints(schedule.packed.offsets), weight_parts, sizes))
    if len(codes) == schedule.num_actions:  # no W, or all of it in one part
        return schedule
    xp.call(cut_kernel, whole, weight_parts, codes)
    offsets = [0]
    for size in sizes:
        offsets.append(offsets[-1] + int(size))
    problem = replace(schedule.problem, num_weight_parts=weight_parts)
    return replace(schedule, problem=problem, packed=PackedRows(xp.int_bytes(codes), tuple(offsets)))


def count_kernel(codes, offsets, num_weight_parts, sizes):  # type: ignore[no-untyped-def]
    """Each rank's number of actions once its W are cut, and their sum."""
    total = 0
    for rank in range(len(offsets) - 1):
        size = 0
        for at in range(offsets[rank], offsets[rank + 1]):
            size += num_weight_parts if kind_of(codes[at]) == W else 1
        sizes[rank] = size
        total += size
    return total


def cut_kernel(codes, num_weight_parts, out):  # type: ignore[no-untyped-def]
    """Write every W as often as it has parts."""
    place = 0
    for at in range(len(codes)):
        for _ in range(num_weight_parts if kind_of(codes[at]) == W else 1):
            out[place] = codes[at]
            place += 1


def _filled(schedule: Schedule, costs: Costs, limits: Sequence[float]) -> list[Schedule]:
    """The rows written anew with each share, the shortest first."""
    xp = arrays(schedule.num_actions * len(SHARES))
    deps, tables = build_dependencies(xp, schedule), tables_of(xp, schedule, costs)
    most = xp.list_floats([limit * ROUNDING for limit in limits])
    found = []
    for share in SHARES:
        codes, pending = (xp.full_ints(schedule.num_actions) for _ in range(2))
        first, count, stack = (xp.full_ints(schedule.num_ranks) for _ in range(3))
        position, place = (xp.list_ints(schedule.packed.offsets[:-1]) for _ in range(2))
        ended, arrived = (xp.full_floats(deps.num_keys, -1.0) for _ in range(2))
        level, clock = xp.list_floats(tables.constant), xp.full_floats(schedule.num_ranks)
        makespan = xp.call(
            fill_kernel, deps.codes, deps.offsets, deps.remote, deps.own, deps.makes, deps.to,
            schedule.num_stages, tables.second_from, tables.durations, tables.saving, tables.travel,
            tables.activation, tables.stash, tables.num_weight_parts, level, most, share,
            ended, arrived, xp.full_ints(deps.num_keys, -1), position, place, pending, first, count, stack, clock,
            codes,
        )  # fmt: skip
        lines = PackedRows(xp.int_bytes(codes), schedule.packed.offsets)
        found.append((float(makespan), replace(schedule, packed=lines)))
    return [filled for _, filled in sorted(found, key=lambda pair: pair[0])]


def fill_kernel(  # type: ignore[no-untyped-def]
    codes, offsets, remote, own, makes, to, num_stages, second_from, durations, saving, travel,
    activation, stash, num_weight_parts, level, limits, share,
    ended, arrived, waiter, position, place, pending, first, count, stack, clock, out,
):  # fmt: skip
    """Run F, B and I in their order as soon as they can, and W, oldest first, while the rank waits. Gives the makespan.

    `pending` holds each rank's W whose I has run, from `first` to `count`, part by part. Messages take as long as
    alone on their link; the caller simulates what comes out.
    """
    num_ranks = len(offsets) - 1
    for rank in range(num_ranks):
        stack[rank] = num_ranks - 1 - rank
    top = num_ranks
    while top > 0:
        top -= 1
        rank = stack[top]
        begin_row = offsets[rank]
        at = position[rank]
        now = clock[rank]
        memory = level[rank]
        while at < offsets[rank + 1]:
            if kind_of(codes[at]) == W:
                at += 1
                continue
            last = at + is_joined(codes[at])
            missing = -1
            begin = now
            lasts = 0.0
            takes = 0.0
            grows = 0.0
            for step in range(at, last + 1):
                needed = own[step]
                if needed >= 0:
                    begin = max(begin, ended[needed])
                needed = remote[step]
                if needed >= 0:
                    if arrived[needed] < 0:
                        missing = needed
                    begin = max(begin, arrived[needed])
                stage = stage_of(codes[step])
                kind = kind_of(codes[step])
                lasts += durations[kind * num_stages + stage]
                if last > at:
                    lasts -= saving[stage] / 2
                if kind == F:
                    takes += activation[stage]
                elif kind == I:
                    grows += max(0.0, stash[stage] - activation[stage])  # recomputed, it may be more
            if missing >= 0:
                waiter[missing] = rank
                break
            while first[rank] < count[rank]:
                weight = pending[begin_row + first[rank]]
                stage = stage_of(weight)
                part = durations[W * num_stages + stage]
                full = takes + grows > 0 and memory + takes + grows > limits[rank]
                if not full and now + share * part > begin - 1e-9 * part:
                    break
                out[place[rank]] = weight
                place[rank] += 1
                first[rank] += 1
                memory -= stash[stage] / num_weight_parts
                now += part
            now = max(now, begin) + max(lasts, 0.0)
            memory += takes
            for step in range(at, last + 1):
                code = codes[step]
                out[place[rank]] = code
                place[rank] += 1
                stage = stage_of(code)
                kind = kind_of(code)
                if kind == B:
                    memory -= activation[stage]
                elif kind == I:
                    memory -= activation[stage] - stash[stage]
                    for _ in range(num_weight_parts):
                        pending[begin_row + count[rank]] = with_kind(code, W)
                        count[rank] += 1
                made = makes[step]
                ended[made] = now
                arrived[made] = now
                if to[step] >= 0:
                    base = copy_offset(microbatch_of(code), second_from, num_stages)
                    arrived[made] = now + travel[message_index(base, stage, 0 if kind == F else 1)]
                if waiter[made] >= 0:
                    stack[top] = waiter[made]
                    waiter[made] = -1
                    top += 1
            at = last + 1
        if at == offsets[rank + 1]:
            while first[rank] < count[rank]:
                weight = pending[begin_row + first[rank]]
                now += durations[W * num_stages + stage_of(weight)]
                out[place[rank]] = weight
                place[rank] += 1
                first[rank] += 1
        position[rank] = at
        clock[rank] = now
        level[rank] = memory
    return max(clock)
