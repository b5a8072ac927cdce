"""The simulator: every action starts as soon as its rank is free and its inputs have arrived."""

from __future__ import annotations

from zeropipe.core.complete import check_complete
from zeropipe.core.deadlock import deadlock
from zeropipe.core.jit import Arrays, Floats, Ints
from zeropipe.core.needs import link, number_edges
from zeropipe.core.schedule import Schedule
from zeropipe.core.timeline import Memory, Timeline
from zeropipe.sim.costs import Costs


def simulate(schedule: Schedule, costs: Costs | None = None) -> Timeline:
    """The timeline of `schedule` under `costs` (default: F = I = W = 1, messages free).

    Raises ScheduleError for a schedule that is not complete and DeadlockError for one that cannot end.
    """
    costs = costs or Costs()
    check_complete(schedule)
    links = link(schedule)
    xp = links.arrays
    size, num_stages = schedule.num_actions, schedule.num_stages
    durations = [x for name in ("f", "b", "i", "w") for x in costs.column(name, num_stages)]
    saving = [
        f + b - both
        for f, b, both in zip(*(costs.column(name, num_stages) for name in ("f", "b", "overlap")), strict=True)
    ]
    transfer, edge, num_edges = _messages(xp, schedule, costs)
    split = schedule.num_microbatches if schedule.placement.split is None else schedule.placement.split
    start, end, during, after = (xp.full_floats(size) for _ in range(4))
    ended, arrived = xp.full_floats(links.num_keys, -1.0), xp.full_floats(links.num_keys, -1.0)
    waiter = xp.full_ints(links.num_keys, -1)
    position, stack = xp.list_ints(schedule.lines.offsets[:-1]), xp.full_ints(schedule.num_ranks)
    finished = xp.call(
        simulate_kernel, links.codes, links.offsets, links.remote, links.own, links.makes, links.to, num_stages, split,
        xp.list_floats(durations), xp.list_floats(saving), transfer, edge, xp.full_floats(num_edges),
        costs.blocking, costs.serial_links,
        xp.list_floats(costs.column("activation", num_stages)), xp.list_floats(costs.column("stash", num_stages)),
        xp.list_floats(_constant_memory(schedule, costs)), xp.full_floats(schedule.num_ranks),
        ended, arrived, waiter, position, stack, start, end, during, after,
    )  # fmt: skip
    if not finished:
        raise deadlock(schedule, links, position, xp.list_ints([int(t >= 0) for t in ended]))
    return Timeline(
        schedule,
        xp.float_bytes(start),
        xp.float_bytes(end),
        Memory(xp.float_bytes(during), xp.float_bytes(after)),
        costs.memory_limit,
        costs.unit,
        costs.memory_unit,
        blocking=costs.blocking,
    )


def _constant_memory(schedule: Schedule, costs: Costs) -> list[float]:
    """Weights, gradients and optimizer state of each rank."""
    levels = [0.0] * schedule.num_ranks
    for weight, ranks in zip(costs.column("weights", schedule.num_stages), zip(*schedule.placement.copies)):
        for rank in set(ranks):  # where both copies of a stage are on one rank, it has the weights once
            levels[rank] += weight
    return levels


def _messages(xp: Arrays, schedule: Schedule, costs: Costs) -> tuple[Floats, Ints, int]:
    """Seconds and edge number of each message, and the number of edges."""
    size = costs.column("message", schedule.num_stages)
    numbers, edges = number_edges(schedule.placement)
    links = [costs.link(*edge) for edge in edges]
    seconds = []
    for place, edge in enumerate(numbers):
        if edge < 0:
            seconds.append(0.0)
            continue
        link = links[edge]
        # the gradient going back over a boundary is as large as the activation that crossed it
        boundary = place // 2 % schedule.num_stages - place % 2
        seconds.append(link.p2p + (size[boundary] / link.bandwidth if link.bandwidth else 0.0))
    return xp.list_floats(seconds), xp.list_ints(numbers), len(edges)


def simulate_kernel(  # type: ignore[no-untyped-def]
    codes, offsets, remote, own, makes, to, num_stages, split, durations, saving, transfer, edge, link_free,
    blocking, serial_links, activation, stash, level, clock,
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
            last = at + (codes[at] & 1)
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
                stage = (codes[step] >> 5) & 0xFFFF
                kind = (codes[step] >> 1) & 15
                lasts += durations[kind * num_stages + stage]
                if last > at:
                    # an Overlap of two stages saves the mean of what each stage's own pair would save
                    lasts -= saving[stage] / 2
                if kind == 0:
                    memory += activation[stage]
            finish = begin + max(lasts, 0.0)
            now = finish
            for step in range(at, last + 1):
                start[step] = begin
                end[step] = finish
                during[step] = memory
            for step in range(at, last + 1):
                code = codes[step]
                stage = (code >> 5) & 0xFFFF
                kind = (code >> 1) & 15
                if kind == 1:
                    memory -= activation[stage]
                elif kind == 2:
                    memory -= activation[stage] - stash[stage]
                elif kind == 3:
                    memory -= stash[stage]
                made = makes[step]
                if made < 0:
                    continue
                ended[made] = finish
                arrived[made] = finish
                if to[step] >= 0:
                    copy = 0 if code >> 21 < split else num_stages
                    message = (copy + stage) * 2 + (0 if kind == 0 else 1)
                    leaves = now if blocking else finish
                    if serial_links and link_free[edge[message]] > leaves:
                        leaves = link_free[edge[message]]
                    arrived[made] = leaves + transfer[message]
                    link_free[edge[message]] = arrived[made]
                    if blocking:
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
