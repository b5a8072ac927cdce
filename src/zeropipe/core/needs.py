"""What an action needs before it may start: the one statement of data dependencies.

    F of a stage         needs F of the stage before
    B or I of a stage    needs F of the same stage, and B or I of the stage after
    W of a stage         needs I of the same stage (its parts do not need each other)

Two results matter to others: "forward done" and "backward done" of a stage and microbatch. Each has a number, its key:
2 (stage num_microbatches + microbatch), backward one more. `link` writes for every action of a schedule which keys it
needs, which one it makes, and the rank to send it to. The checker, the lowering, the simulator and the explanations
walk these four columns and know no rule of their own.
"""

from __future__ import annotations

from dataclasses import dataclass

from zeropipe.core.action import Action, Kind
from zeropipe.core.jit import Arrays, Ints, arrays
from zeropipe.core.placement import Placement
from zeropipe.core.schedule import Lines, Schedule


def needs(action: Action, num_stages: int) -> tuple[Action, ...]:
    """The actions that must end before `action` starts. Where an I is named, a B serves as well."""
    stage, kind, microbatch = action
    if kind is Kind.F:
        return (Action(stage - 1, Kind.F, microbatch),) if stage > 0 else ()
    if kind is Kind.W:
        return (Action(stage, Kind.I, microbatch),)
    own = Action(stage, Kind.F, microbatch)
    return (own, Action(stage + 1, Kind.I, microbatch)) if stage + 1 < num_stages else (own,)


def key_name(number: int, num_microbatches: int) -> Action:
    """The action that makes the result of a key (I stands for I or B)."""
    place, backward = divmod(number, 2)
    return Action(place // num_microbatches, Kind.I if backward else Kind.F, place % num_microbatches)


@dataclass(frozen=True)
class Links:
    """Per action: the key needed from another stage, the key needed from its own, the key made, the rank told."""

    arrays: Arrays
    codes: Ints
    offsets: Ints
    remote: Ints
    own: Ints
    makes: Ints
    to: Ints
    num_keys: int


def flat_tables(xp: Arrays, placement: Placement) -> Ints:
    """All copies' stage -> rank tables back to back."""
    return xp.list_ints([rank for table in placement.copies for rank in table])


def number_edges(placement: Placement) -> tuple[list[int], list[tuple[int, int]]]:
    """The edge of each message, and (sending rank, receiving rank) of each edge.

    Forward from stage s of copy c is at (c num_stages + s) 2, backward one behind; -1 where no message is needed.
    """
    edges: dict[tuple[int, int], int] = {}
    numbers = []
    for table in placement.copies:
        for stage, rank in enumerate(table):
            for other in (stage + 1, stage - 1):
                crosses = 0 <= other < len(table) and table[other] != rank
                numbers.append(edges.setdefault((rank, table[other]), len(edges)) if crosses else -1)
    return numbers, list(edges)


def link(schedule: Schedule, lines: Lines | None = None, *, passes: int = 1) -> Links:
    """The dependency columns of a schedule (every stage and microbatch must be in range).

    `passes` says how often the caller will walk them, which decides whether compiled kernels pay.
    """
    lines = lines or schedule.lines
    problem, placement = schedule.problem, schedule.placement
    size = lines.offsets[-1]
    xp = arrays(size * passes)
    codes = xp.ints(lines.codes)
    remote, own, makes, to = (xp.full_ints(size, -1) for _ in range(4))
    xp.call(
        link_kernel, codes, flat_tables(xp, placement), problem.num_stages, problem.num_microbatches, schedule.split,
        remote, own, makes, to,
    )  # fmt: skip
    num_keys = 2 * problem.num_stages * problem.num_microbatches
    return Links(xp, codes, xp.list_ints(lines.offsets), remote, own, makes, to, num_keys)


def link_kernel(codes, tables, num_stages, num_microbatches, split, remote, own, makes, to):  # type: ignore[no-untyped-def]
    """Fill the four columns for compute actions; communication actions keep -1."""
    for at in range(len(codes)):
        code = codes[at]
        kind = (code >> 1) & 15
        if kind > 3:
            continue
        stage = (code >> 5) & 0xFFFF
        microbatch = code >> 21
        place = (stage * num_microbatches + microbatch) * 2
        base = 0 if microbatch < split else num_stages
        rank = tables[base + stage]
        if kind == 0:
            makes[at] = place
            if stage > 0:
                remote[at] = place - 2 * num_microbatches
            if stage + 1 < num_stages and tables[base + stage + 1] != rank:
                to[at] = tables[base + stage + 1]
        elif kind == 3:
            own[at] = place + 1
        else:
            makes[at] = place + 1
            own[at] = place
            if stage + 1 < num_stages:
                remote[at] = place + 2 * num_microbatches + 1
            if stage > 0 and tables[base + stage - 1] != rank:
                to[at] = tables[base + stage - 1]
