"""Cuts every W into parts and puts them where a rank would wait."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from zeropipe.core.complete import check_complete
from zeropipe.core.jit import arrays
from zeropipe.core.needs import link
from zeropipe.core.placement import MAX_PARTS
from zeropipe.core.schedule import Lines, Schedule
from zeropipe.core.timeline import ROUNDING
from zeropipe.errors import ConfigError
from zeropipe.sim.costs import Costs
from zeropipe.sim.simulate import simulate
from zeropipe.sim.tables import tables_of

SHARES = (1.0, 0.75, 0.5, 0.25, 0.0)  # how much of a part must fit into a gap: the best of these is taken


def fill_gaps(schedule: Schedule, costs: Costs | None = None, *, parts: int = 4) -> Schedule:
    """`schedule` with every W in `parts` equal parts, run where its rank would wait for data under these costs.

    F, B and I keep their order. A W waits for a gap as long as memory allows: up to `costs.memory_limit`, or to
    what each rank needs anyway where no limit is given. The schedule never becomes longer; one without W stays as it
    is.
    """
    costs = costs or Costs()
    best = simulate(cut_weights(schedule, parts), costs)
    limits = best.peak_memory if costs.memory_limit is None else (costs.memory_limit,) * schedule.num_ranks
    filled = _filled(best.schedule, costs, [limit * ROUNDING for limit in limits])
    if not (costs.blocking or costs.serial_links):
        filled = filled[:1]  # the others are known to be no shorter
    return min(best, *(simulate(one, costs) for one in filled), key=lambda timeline: timeline.makespan).schedule


def cut_weights(schedule: Schedule, parts: int) -> Schedule:
    """`schedule` with every W in `parts` equal parts, one after the other."""
    if type(parts) is not int or not 1 <= parts <= MAX_PARTS:
        raise ConfigError(f"parts={parts!r}: a W is cut into 1 to {MAX_PARTS} parts")
    have = schedule.problem.num_weight_parts
    if have != 1:
        raise ConfigError(f"the W of {schedule.name} are in {have} parts already: start from the one with whole W")
    check_complete(schedule)  # before its rows are others
    xp = arrays(schedule.num_actions)
    whole, sizes = xp.ints(schedule.lines.codes), xp.full_ints(schedule.num_ranks)
    codes = xp.full_ints(xp.call(count_kernel, whole, xp.list_ints(schedule.lines.offsets), parts, sizes))
    if len(codes) == schedule.num_actions:  # no W, or all of it in one part
        return schedule
    xp.call(cut_kernel, whole, parts, codes)
    offsets = [0]
    for size in sizes:
        offsets.append(offsets[-1] + int(size))
    problem = replace(schedule.problem, num_weight_parts=parts)
    return replace(schedule, problem=problem, lines=Lines(xp.int_bytes(codes), tuple(offsets)))


def count_kernel(codes, offsets, parts, sizes):  # type: ignore[no-untyped-def]
    """Each rank's number of actions once its W are cut, and their sum."""
    total = 0
    for rank in range(len(offsets) - 1):
        size = 0
        for at in range(offsets[rank], offsets[rank + 1]):
            size += parts if (codes[at] >> 1) & 15 == 3 else 1
        sizes[rank] = size
        total += size
    return total


def cut_kernel(codes, parts, out):  # type: ignore[no-untyped-def]
    """Write every W `parts` times."""
    place = 0
    for at in range(len(codes)):
        for _ in range(parts if (codes[at] >> 1) & 15 == 3 else 1):
            out[place] = codes[at]
            place += 1


def _filled(schedule: Schedule, costs: Costs, limits: Sequence[float]) -> list[Schedule]:
    """The rows written anew with each share, the shortest first."""
    links = link(schedule, passes=len(SHARES))
    xp, tables = links.arrays, tables_of(links.arrays, schedule, costs)
    found = []
    for share in SHARES:
        codes, pending = (xp.full_ints(schedule.num_actions) for _ in range(2))
        first, count, stack = (xp.full_ints(schedule.num_ranks) for _ in range(3))
        position, place = (xp.list_ints(schedule.lines.offsets[:-1]) for _ in range(2))
        ended, arrived = (xp.full_floats(links.num_keys, -1.0) for _ in range(2))
        level, clock = xp.list_floats(tables.constant), xp.full_floats(schedule.num_ranks)
        makespan = xp.call(
            fill_kernel, links.codes, links.offsets, links.remote, links.own, links.makes, links.to,
            schedule.num_stages, tables.split, tables.durations, tables.saving, tables.transfer,
            tables.activation, tables.stash, tables.parts, level, xp.list_floats(limits), share,
            ended, arrived, xp.full_ints(links.num_keys, -1), position, place, pending, first, count, stack, clock,
            codes,
        )  # fmt: skip
        lines = Lines(xp.int_bytes(codes), schedule.lines.offsets)
        found.append((float(makespan), replace(schedule, lines=lines)))
    return [filled for _, filled in sorted(found, key=lambda pair: pair[0])]


def fill_kernel(  # type: ignore[no-untyped-def]
    codes, offsets, remote, own, makes, to, num_stages, split, durations, saving, transfer,
    activation, stash, parts, level, limits, share,
    ended, arrived, waiter, position, place, pending, first, count, stack, clock, out,
):  # fmt: skip
    """Run F, B and I in their order as soon as they can, and W, oldest first, while the rank waits; the last end.

    `pending` holds each rank's W whose I has run, from `first` to `count`, part by part. Messages are as long as
    alone on their link; the caller simulates what comes out.
    """
    num_ranks = len(offsets) - 1
    for rank in range(num_ranks):
        stack[rank] = num_ranks - 1 - rank
    top = num_ranks
    while top > 0:
        top -= 1
        rank = stack[top]
        base = offsets[rank]
        at = position[rank]
        now = clock[rank]
        memory = level[rank]
        while at < offsets[rank + 1]:
            if (codes[at] >> 1) & 15 == 3:
                at += 1
                continue
            last = at + (codes[at] & 1)
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
                stage = (codes[step] >> 5) & 0xFFFF
                kind = (codes[step] >> 1) & 15
                lasts += durations[kind * num_stages + stage]
                if last > at:
                    lasts -= saving[stage] / 2
                if kind == 0:
                    takes += activation[stage]
                elif kind == 2:
                    grows += max(0.0, stash[stage] - activation[stage])  # recomputed, it may be more
            if missing >= 0:
                waiter[missing] = rank
                break
            while first[rank] < count[rank]:
                weight = pending[base + first[rank]]
                stage = (weight >> 5) & 0xFFFF
                part = durations[3 * num_stages + stage]
                full = takes + grows > 0 and memory + takes + grows > limits[rank]
                if not full and now + share * part > begin - 1e-9 * part:
                    break
                out[place[rank]] = weight
                place[rank] += 1
                first[rank] += 1
                memory -= stash[stage] / parts
                now += part
            now = max(now, begin) + max(lasts, 0.0)
            memory += takes
            for step in range(at, last + 1):
                code = codes[step]
                out[place[rank]] = code
                place[rank] += 1
                stage = (code >> 5) & 0xFFFF
                kind = (code >> 1) & 15
                if kind == 1:
                    memory -= activation[stage]
                elif kind == 2:
                    memory -= activation[stage] - stash[stage]
                    for _ in range(parts):
                        pending[base + count[rank]] = code + 2  # an I's code becomes its W's
                        count[rank] += 1
                made = makes[step]
                ended[made] = now
                arrived[made] = now
                if to[step] >= 0:
                    copy = 0 if code >> 21 < split else num_stages
                    arrived[made] = now + transfer[(copy + stage) * 2 + (0 if kind == 0 else 1)]
                if waiter[made] >= 0:
                    stack[top] = waiter[made]
                    waiter[made] = -1
                    top += 1
            at = last + 1
        if at == offsets[rank + 1]:
            while first[rank] < count[rank]:
                weight = pending[base + first[rank]]
                now += durations[3 * num_stages + ((weight >> 5) & 0xFFFF)]
                out[place[rank]] = weight
                place[rank] += 1
                first[rank] += 1
        position[rank] = at
        clock[rank] = now
        level[rank] = memory
    return max(clock)
