"""A second, slow and obvious statement of the rules, to hold the fast kernels against."""

from zeropipe.core.action import Action, Kind, Overlap


def actions_of(step):
    return list(step) if isinstance(step, Overlap) else [step]


def naive_needs(action, num_stages):
    """The sets of actions of which one must be done, one set per need."""
    stage, kind, microbatch = action
    if kind is Kind.F:
        return [{Action(stage - 1, Kind.F, microbatch)}] if stage else []
    if kind is Kind.W:
        return [{Action(stage, Kind.I, microbatch)}]
    wants = [{Action(stage, Kind.F, microbatch)}]
    if stage + 1 < num_stages:
        wants.append({Action(stage + 1, Kind.I, microbatch), Action(stage + 1, Kind.B, microbatch)})
    return wants


def naive_simulate(schedule, duration, latency=lambda source, target: 0.0):
    """{action: (start, end)}, or None if some rank never ends. `duration(actions)` prices a step."""
    rows = [list(row) for row in schedule.rows]
    place, clock, times = [0] * len(rows), [0.0] * len(rows), {}
    home = {a: r for r, row in enumerate(rows) for step in row for a in actions_of(step)}
    moved = True
    while moved:
        moved = False
        for rank, row in enumerate(rows):
            while place[rank] < len(row):
                actions = actions_of(row[place[rank]])
                start = clock[rank]
                for action in actions:
                    for choices in naive_needs(action, schedule.num_stages):
                        done = [c for c in choices if c in times]
                        if not done:
                            start = None
                            break
                        source = home[done[0]]
                        wait = latency(source, rank) if source != rank else 0.0
                        start = max(start, times[done[0]][1] + wait)
                    if start is None:
                        break
                if start is None:
                    break
                end = start + duration(actions)
                times |= dict.fromkeys(actions, (start, end))
                clock[rank] = end
                place[rank] += 1
                moved = True
    return times if all(place[r] == len(row) for r, row in enumerate(rows)) else None
