"""A slow, direct simulator: the reference for the compiled kernels."""

from zeropipe.core.action import Action, Kind, Overlap


def actions_of(step):
    return list(step) if isinstance(step, Overlap) else [step]


def reference_needs(action, num_stages, num_slices=1):
    """The needs of an action, each a set of actions of which one must be done."""
    stage, kind, microbatch, slice_, _ = action
    if kind is Kind.W:
        return [{Action(stage, Kind.I, microbatch, slice_)}]
    needs = [] if kind is Kind.F else [{Action(stage, Kind.F, microbatch, slice_)}]
    kinds, way = ((Kind.F,), -1) if kind is Kind.F else ((Kind.I, Kind.B), 1)
    if 0 <= stage + way < num_stages:
        needs.append({Action(stage + way, one, microbatch, slice_) for one in kinds})
    if slice_ is not None and 0 <= slice_ + way < num_slices:
        needs.append({Action(stage, one, microbatch, slice_ + way) for one in kinds})
    return needs


def reference_simulate(schedule, duration, latency=lambda source, target: 0.0):
    """{action: (start, end)}, or None on a deadlock. `duration(actions)` is the time of a step."""
    rows = [list(row) for row in schedule.rows]
    position, clock, times = [0] * len(rows), [0.0] * len(rows), {}
    rank_of = {a: r for r, row in enumerate(rows) for step in row for a in actions_of(step)}
    progress = True
    while progress:
        progress = False
        for rank, row in enumerate(rows):
            while position[rank] < len(row):
                actions = actions_of(row[position[rank]])
                start = clock[rank]
                for action in actions:
                    for choices in reference_needs(action, schedule.num_stages, schedule.num_slices):
                        done = [c for c in choices if c in times]
                        if not done:
                            start = None
                            break
                        source = rank_of[done[0]]
                        delay = latency(source, rank) if source != rank else 0.0
                        start = max(start, times[done[0]][1] + delay)
                    if start is None:
                        break
                if start is None:
                    break
                end = start + duration(actions)
                times |= dict.fromkeys(actions, (start, end))
                clock[rank] = end
                position[rank] += 1
                progress = True
    return times if all(position[r] == len(row) for r, row in enumerate(rows)) else None
