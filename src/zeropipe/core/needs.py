"""What an action needs before it may start: the one statement of data dependencies.

    F of a stage         needs F of the stage before
    B or I of a stage    needs F of the same stage, and B or I of the stage after
    W of a stage         needs I of the same stage (its parts do not need each other)

Two results matter to others: "forward done" and "backward done" of a stage and microbatch. Each has a number, its key.
`dependencies` writes for every action of a schedule which keys it needs, which one it makes, and the rank to send that
to. The checker, the lowering, the simulator and the explanations walk these columns and know no rule of their own.
"""

from __future__ import annotations

from dataclasses import dataclass

from zeropipe.core.action import RECV_B, RECV_F, SEND_B, UNSHARD, Action, B, F, I, Kind, W, far_stage
from zeropipe.core.jit import Arrays, Ints, arrays
from zeropipe.core.packed import PackedRows, kind_of, microbatch_of, stage_of
from zeropipe.core.placement import Placement
from zeropipe.core.schedule import Schedule


def needs(action: Action, num_stages: int) -> tuple[Action, ...]:
    """The actions that must end before `action` starts. Where an I is named, a B serves as well."""
    stage, kind, microbatch = action
    if kind is Kind.F:
        return (Action(stage - 1, Kind.F, microbatch),) if stage > 0 else ()
    if kind is Kind.W:
        return (Action(stage, Kind.I, microbatch),)
    own = Action(stage, Kind.F, microbatch)
    return (own, Action(stage + 1, Kind.I, microbatch)) if stage + 1 < num_stages else (own,)


def key_of(stage: int, microbatch: int, backward: int, num_microbatches: int) -> int:
    """The key of a stage's forward result, or with `backward` = 1 of its backward result."""
    return 2 * (stage * num_microbatches + microbatch) + backward


def key_name(key: int, num_microbatches: int) -> Action:
    """The action that makes the result of a key (I stands for I or B)."""
    place, backward = divmod(key, 2)
    return Action(place // num_microbatches, Kind.I if backward else Kind.F, place % num_microbatches)


def copy_base(microbatch: int, second_from: int, num_stages: int) -> int:
    """Where the tables of a microbatch's copy of the model begin, when all copies' tables lie back to back."""
    return 0 if microbatch < second_from else num_stages


def message_place(base: int, stage: int, backward: int) -> int:
    """Where `number_edges` has the message that a stage sends forward, or with `backward` = 1 backward."""
    return 2 * (base + stage) + backward


@dataclass(frozen=True)
class Dependencies:
    """Per action: the key needed from another stage, the key needed from its own, the key made, the rank told.

    A SEND or RECV has in `own` the key of the result that it carries, and nothing else. What gathers weights or reduces
    gradients has nothing: see shards.py.
    """

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
    """Number the edges: the pairs (sending rank, receiving rank) between which messages go.

    The first list says which edge each message takes (see `message_place`), -1 where sender and receiver are the same
    rank and no message is needed. The second one has the pair of each edge.
    """
    edges: dict[tuple[int, int], int] = {}
    numbers = []
    for table in placement.copies:
        for stage, rank in enumerate(table):
            for other in (stage + 1, stage - 1):  # forward, backward
                crosses = 0 <= other < len(table) and table[other] != rank
                numbers.append(edges.setdefault((rank, table[other]), len(edges)) if crosses else -1)
    return numbers, list(edges)


def dependencies(schedule: Schedule, packed: PackedRows | None = None, *, passes: int = 1) -> Dependencies:
    """The dependency columns of a schedule (every stage and microbatch must be in range), or of other rows of it.

    `passes` says how often the caller will walk them, which decides whether compiled kernels pay.
    """
    packed = schedule.packed if packed is None else packed
    problem, size = schedule.problem, packed.num_codes
    xp = arrays(size * passes)
    codes = xp.ints(packed.codes)
    remote, own, makes, to = (xp.full_ints(size, -1) for _ in range(4))
    xp.call(
        dependencies_kernel, codes, flat_tables(xp, schedule.placement), problem.num_stages, problem.num_microbatches,
        schedule.second_from, remote, own, makes, to,
    )  # fmt: skip
    num_keys = 2 * problem.num_stages * problem.num_microbatches
    return Dependencies(xp, codes, xp.list_ints(packed.offsets), remote, own, makes, to, num_keys)


def dependencies_kernel(  # type: ignore[no-untyped-def]
    codes, tables, num_stages, num_microbatches, second_from, remote, own, makes, to
):
    """Fill the four columns."""
    for at in range(len(codes)):
        code = codes[at]
        kind = kind_of(code)
        stage = stage_of(code)
        microbatch = microbatch_of(code)
        forward = key_of(stage, microbatch, 0, num_microbatches)
        if kind == F:
            makes[at] = forward
            before, behind = stage - 1, stage + 1  # where its input comes from, and its result goes
        elif kind < W:
            own[at] = forward
            makes[at] = forward + 1
            before, behind = stage + 1, stage - 1
        elif kind == W:
            own[at] = forward + 1
            continue
        elif kind >= UNSHARD:
            continue
        else:
            source = far_stage(stage, kind) if kind in (RECV_F, RECV_B) else stage
            own[at] = key_of(source, microbatch, 1 if kind >= SEND_B else 0, num_microbatches)
            continue
        if 0 <= before < num_stages:
            remote[at] = makes[at] + 2 * num_microbatches * (before - stage)
        if 0 <= behind < num_stages:
            base = copy_base(microbatch, second_from, num_stages)
            if tables[base + behind] != tables[base + stage]:
                to[at] = tables[base + behind]


def free_sends(deps: Dependencies, blocking: bool, blocking_ends: bool) -> tuple[Ints, Ints]:
    """For each rank the first and the last of the actions whose sends do not block it.

    That is all of its actions, with `blocking` none, with `blocking_ends` those of its steady state.
    """
    xp: Arrays = deps.arrays
    begin, end = deps.offsets[:-1], deps.offsets[1:]
    if blocking:
        begin, end = end, begin
    first, last = xp.list_ints(begin), xp.list_ints(end)
    if blocking_ends:
        xp.call(steady_kernel, deps.codes, deps.offsets, first, last)
    return first, last


def steady_kernel(codes, offsets, first, last):  # type: ignore[no-untyped-def]
    """The steady state: from the last F before the first backward to the first backward after the last F."""
    for rank in range(len(offsets) - 1):
        first[rank] = offsets[rank + 1]
        last[rank] = offsets[rank] - 1
        forward = offsets[rank]
        behind = False  # a backward has followed the latest F
        for at in range(offsets[rank], offsets[rank + 1]):
            kind = kind_of(codes[at])
            if kind == F:
                forward = at
                behind = False
            elif kind in (B, I) and not behind:
                behind = True
                first[rank] = min(first[rank], forward)
                last[rank] = at
