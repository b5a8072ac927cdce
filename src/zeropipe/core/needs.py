"""What an action needs before it may start: the one statement of data dependencies.

    F of a stage         needs F of the previous stage
    B or I of a stage    needs F of the same stage, and B or I of the next stage
    W of a stage         needs I of the same stage (its parts do not need each other)

With slices, all of this holds for each slice of a microbatch, and

    F of a slice         needs F of the slice before it, on the same stage
    B or I of a slice    needs B or I of the slice after it, on the same stage

Both are on one rank, so these two only restrict the order of its row, which `check_complete` checks.

Other actions need two results of a stage and microbatch (or slice): "forward done" and "backward done". Each has a
number, its key. `build_dependencies` computes for every action of a schedule the keys that it needs, the key that it
produces, and the rank that its result is sent to. The checker, the lowering, the simulator and the explanations read
these columns and have no rules of their own.

If sends block, an action also waits until the previous send of its rank has ended: see `find_nonblocking_actions`.
"""

from __future__ import annotations

from typing import NamedTuple

from zeropipe.core.action import RECV_B, RECV_F, SEND_B, UNSHARD, Action, B, F, I, Kind, W, peer_stage
from zeropipe.core.jit import Arrays, Ints
from zeropipe.core.packed import PackedRows, encode, kind_of, microbatch_of, stage_of
from zeropipe.core.placement import Placement
from zeropipe.core.schedule import Schedule


def needs(action: Action, num_stages: int, num_slices: int = 1) -> tuple[Action, ...]:
    """The actions that must end before `action` starts, without marks. An I in the result stands for an I or a B."""
    action = action._replace(checkpointed=False)
    stage, kind = action.stage, action.kind
    if kind is Kind.W:
        return (action._replace(kind=Kind.I),)
    found = []
    if kind is Kind.F:
        if stage > 0:
            found.append(action._replace(stage=stage - 1))
        if action.slice:
            found.append(action._replace(slice=action.slice - 1))
        return tuple(found)
    found.append(action._replace(kind=Kind.F))
    if stage + 1 < num_stages:
        found.append(action._replace(kind=Kind.I, stage=stage + 1))
    if action.slice is not None and action.slice + 1 < num_slices:
        found.append(action._replace(kind=Kind.I, slice=action.slice + 1))
    return tuple(found)


def key_of(stage: int, microbatch: int, backward: int, num_microbatches: int) -> int:
    """The key of a stage's forward result, or with `backward` = 1 of its backward result.

    With slices, microbatches here and in all kernels are the slices of all microbatches: `Problem.total_slices`.
    """
    return 2 * (stage * num_microbatches + microbatch) + backward


def key_action(key: int, schedule: Schedule) -> Action:
    """The action that produces the result of a key (I stands for I or B)."""
    index, backward = divmod(key, 2)
    stage, number = divmod(index, schedule.problem.total_slices)
    return schedule.decode(encode(stage, I if backward else F, number))


def copy_offset(microbatch: int, second_from: int, num_stages: int) -> int:
    """Where the table of a microbatch's copy of the model begins in the concatenated tables of all copies."""
    return 0 if microbatch < second_from else num_stages


def message_index(offset: int, stage: int, backward: int) -> int:
    """The index, in the list of `number_edges`, of the message that a stage sends forward (or backward)."""
    return 2 * (offset + stage) + backward


class Dependencies(NamedTuple):
    """Columns with an entry per action; -1 for none.

    A SEND or RECV has only `own`: the key of the result that it carries. Sharding actions (shard_actions.py) have none.
    """

    codes: Ints
    offsets: Ints  # of each rank's actions
    remote: Ints  # the key needed from another stage
    own: Ints  # the key needed from its own stage
    makes: Ints  # the key of its result
    to: Ints  # the rank that its result is sent to
    num_keys: int


def flat_tables(xp: Arrays, placement: Placement) -> Ints:
    """The stage -> rank tables of all copies, concatenated."""
    return xp.list_ints([rank for table in placement.copies for rank in table])


def number_edges(placement: Placement) -> tuple[list[int], list[tuple[int, int]]]:
    """Number the edges: the pairs (sending rank, receiving rank) that exchange messages.

    The first list has the edge of each message (see `message_index`), -1 where sender and receiver are the same rank
    and no message is sent. The second list has the pair of each edge.
    """
    edges: dict[tuple[int, int], int] = {}
    numbers = []
    for table in placement.copies:
        for stage, rank in enumerate(table):
            for other in (stage + 1, stage - 1):  # forward, backward
                crosses = 0 <= other < len(table) and table[other] != rank
                numbers.append(edges.setdefault((rank, table[other]), len(edges)) if crosses else -1)
    return numbers, list(edges)


def build_dependencies(xp: Arrays, schedule: Schedule, packed: PackedRows | None = None) -> Dependencies:
    """The columns of a schedule, or of other rows of it. All stages and microbatches must be in range."""
    packed = schedule.packed if packed is None else packed
    problem = schedule.problem
    remote, own, makes, to = (xp.full_ints(packed.num_codes, -1) for _ in range(4))
    deps = Dependencies(
        codes=xp.ints(packed.codes), offsets=xp.list_ints(packed.offsets), remote=remote, own=own, makes=makes, to=to,
        num_keys=2 * problem.num_stages * problem.total_slices,
    )  # fmt: skip
    tables = flat_tables(xp, schedule.placement)
    xp.call(dependencies_kernel, deps, tables, problem.num_stages, problem.total_slices, schedule.second_slice_from)
    return deps


def dependencies_kernel(
    deps: Dependencies, tables: Ints, num_stages: int, num_microbatches: int, second_from: int
) -> None:
    """Fill the columns remote, own, makes and to."""
    codes, remote, own, makes, to = deps.codes, deps.remote, deps.own, deps.makes, deps.to
    for at in range(len(codes)):
        code = codes[at]
        kind = kind_of(code)
        stage = stage_of(code)
        microbatch = microbatch_of(code)
        forward = key_of(stage, microbatch, 0, num_microbatches)
        if kind == F:
            makes[at] = forward
            source, target = stage - 1, stage + 1
        elif kind < W:
            own[at] = forward
            makes[at] = forward + 1
            source, target = stage + 1, stage - 1
        elif kind == W:
            own[at] = forward + 1
            continue
        elif kind >= UNSHARD:
            continue
        else:
            sender = peer_stage(stage, kind) if kind in (RECV_F, RECV_B) else stage
            own[at] = key_of(sender, microbatch, 1 if kind >= SEND_B else 0, num_microbatches)
            continue
        if 0 <= source < num_stages:
            remote[at] = makes[at] + 2 * num_microbatches * (source - stage)
        if 0 <= target < num_stages:
            offset = copy_offset(microbatch, second_from, num_stages)
            if tables[offset + target] != tables[offset + stage]:
                to[at] = tables[offset + target]


def find_nonblocking_actions(xp: Arrays, deps: Dependencies, blocking: bool, blocking_ends: bool) -> tuple[Ints, Ints]:
    """The first and the last action of each rank whose sends do not block.

    By default these are all its actions; with `blocking` none; with `blocking_ends` those of its steady state, between
    warm-up and cool-down.
    """
    begin, end = deps.offsets[:-1], deps.offsets[1:]
    if blocking:
        begin, end = end, begin
    first, last = xp.list_ints(begin), xp.list_ints(end)
    if blocking_ends:
        xp.call(steady_state_kernel, deps.codes, deps.offsets, first, last)
    return first, last


def steady_state_kernel(codes: Ints, offsets: Ints, first: Ints, last: Ints) -> None:
    """The steady state: from the last F before the first backward to the first backward after the last F."""
    for rank in range(len(offsets) - 1):
        first[rank] = offsets[rank + 1]
        last[rank] = offsets[rank] - 1
        forward = offsets[rank]
        is_followed = False  # by a backward, the latest F
        for at in range(offsets[rank], offsets[rank + 1]):
            kind = kind_of(codes[at])
            if kind == F:
                forward = at
                is_followed = False
            elif kind in (B, I) and not is_followed:
                is_followed = True
                first[rank] = min(first[rank], forward)
                last[rank] = at
