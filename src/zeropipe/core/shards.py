"""Sharded stages in a Program: when their weights are gathered, let go, and their gradients reduced.

A sharded stage keeps a part of its weights on each of several ranks that run the same row. It needs
    UNSHARD        before F, B and I: the whole weights are gathered. A W reads no weights
    RESHARD        when the whole weights are no longer needed
    REDUCE_GRAD    after its last B or W: the whole gradients are summed, and each rank keeps its part
"""

from __future__ import annotations

from itertools import accumulate

from zeropipe.core.action import REDUCE_GRAD, RESHARD, UNSHARD, B, W
from zeropipe.core.jit import arrays
from zeropipe.core.packed import PackedRows, decode, encode, is_joined, kind_of, stage_of
from zeropipe.core.schedule import Program, Schedule
from zeropipe.errors import ConfigError, ScheduleError

POLICIES = ("keep", "regather", "ends")
_KEEP, _REGATHER, _ENDS = range(3)
AHEAD = (
    2  # steps by which UNSHARD comes before the first use of its stage: it takes about as long as one or two of them
)


def require_policy(shards: object) -> None:
    """ConfigError for what is no policy."""
    if shards not in POLICIES:
        raise ConfigError(f"shards={shards!r}: give {', '.join(map(repr, POLICIES))}, or None for whole stages")


def with_shards(schedule: Schedule, shards: str) -> PackedRows:
    """The schedule's rows with UNSHARD, RESHARD and REDUCE_GRAD, all stages being sharded."""
    require_policy(shards)
    policy, packed, num_stages = POLICIES.index(shards), schedule.packed, schedule.num_stages
    xp = arrays(packed.num_codes)
    held, first = _held(schedule)
    # regathering puts two around each action, and there is one REDUCE_GRAD; else there are three for each stage
    size = 3 * packed.num_codes if policy == _REGATHER else packed.num_codes + 2 * len(held)
    out = xp.full_ints(size + len(held))
    offsets = xp.full_ints(schedule.num_ranks + 1)
    xp.call(
        shards_kernel, xp.ints(packed.codes), xp.list_ints(packed.offsets), xp.list_ints(held), xp.list_ints(first),
        policy, AHEAD, xp.full_ints(num_stages), xp.full_ints(num_stages), xp.full_ints(num_stages), out, offsets,
    )  # fmt: skip
    ends = tuple(int(offset) for offset in offsets)
    return PackedRows(xp.int_bytes(out[: ends[-1]]), ends)


def _held(schedule: Schedule) -> tuple[list[int], list[int]]:
    """The stages of each rank, in order and back to back, and where each rank's begin."""
    stages: list[set[int]] = [set() for _ in range(schedule.num_ranks)]
    for table in schedule.placement.copies:
        for stage, rank in enumerate(table):
            stages[rank].add(stage)
    return [stage for some in stages for stage in sorted(some)], list(accumulate(map(len, stages), initial=0))


def shards_kernel(  # type: ignore[no-untyped-def]
    codes, offsets, held, first, policy, ahead, last_use, last_gradient, whole, out, ends
):
    """Write the rows with what moves shards. `whole`: whether a stage is gathered.

    Where there are few microbatches, a rank may have no work for a stage that it holds. It reduces it all the same, at
    the end: another rank that shares it may have more microbatches.
    """
    training = False
    for at in range(len(codes)):
        if kind_of(codes[at]) in (B, W):
            training = True
    place = 0
    for rank in range(len(offsets) - 1):
        begin, stop = offsets[rank], offsets[rank + 1]
        for index in range(first[rank], first[rank + 1]):
            last_use[held[index]] = -1
            last_gradient[held[index]] = -1
            whole[held[index]] = 0
        for at in range(begin, stop):
            kind, stage = kind_of(codes[at]), stage_of(codes[at])
            if kind != W:
                last_use[stage] = at
            if kind in (B, W):
                last_gradient[stage] = at
        if policy == _ENDS:
            for index in range(first[rank], first[rank + 1]):
                out[place] = encode(held[index], UNSHARD, 0)
                place += 1
        at = begin
        while at < stop:
            last = at + is_joined(codes[at])
            if policy != _ENDS:
                coming, steps = at, 0  # gather what is used in this step and in the next ones
                while coming < stop and steps <= ahead:
                    stage = stage_of(codes[coming])
                    if kind_of(codes[coming]) != W and not whole[stage]:
                        whole[stage] = 1
                        out[place] = encode(stage, UNSHARD, 0)
                        place += 1
                    steps += 1 - is_joined(codes[coming])
                    coming += 1
            for step in range(at, last + 1):
                out[place] = codes[step]
                place += 1
            if policy != _ENDS:
                for step in range(at, last + 1):
                    stage = stage_of(codes[step])
                    used = kind_of(codes[step]) != W
                    if used and whole[stage] and (policy == _REGATHER or at <= last_use[stage] <= last):
                        whole[stage] = 0
                        out[place] = encode(stage, RESHARD, 0)
                        place += 1
                for step in range(at, last + 1):
                    stage = stage_of(codes[step])
                    if last_gradient[stage] == step:
                        out[place] = encode(stage, REDUCE_GRAD, 0)
                        place += 1
            at = last + 1
        for index in range(first[rank], first[rank + 1]):
            stage = held[index]
            if policy == _ENDS:
                out[place] = encode(stage, RESHARD, 0)
                place += 1
            if training and (policy == _ENDS or last_gradient[stage] < 0):
                out[place] = encode(stage, REDUCE_GRAD, 0)
                place += 1
        ends[rank + 1] = place


def check_shards(program: Program) -> None:
    """Every stage that is sharded is whole where it is used, and reduced once, after its last gradient.

    A stage for which there is no UNSHARD, RESHARD or REDUCE_GRAD is not sharded.
    """
    schedule, packed = program.schedule, program.packed
    xp = arrays(packed.num_codes)
    num_stages = schedule.num_stages
    held, first = _held(schedule)
    at, fault = xp.call(
        check_kernel, xp.ints(packed.codes), xp.list_ints(packed.offsets), num_stages,
        xp.list_ints(held), xp.list_ints(first), xp.full_ints(num_stages, -1), xp.full_ints(num_stages),
        xp.full_ints(num_stages), xp.full_ints(num_stages), xp.full_ints(num_stages), xp.full_ints(num_stages),
    )  # fmt: skip
    if fault:
        _raise_fault(program, int(at), int(fault))


def check_kernel(  # type: ignore[no-untyped-def]
    codes, offsets, num_stages, held, first, home, sharded, whole, used, reduced, last_gradient
):
    """(index, fault) of the first action that is wrong for a sharded stage, or (-1, 0)."""
    for rank in range(len(offsets) - 1):
        begin, stop = offsets[rank], offsets[rank + 1]
        for index in range(first[rank], first[rank + 1]):
            stage = held[index]
            home[stage] = rank
            sharded[stage] = 0
            whole[stage] = 0
            used[stage] = 0
            reduced[stage] = 0
            last_gradient[stage] = -1
        for at in range(begin, stop):
            kind, stage = kind_of(codes[at]), stage_of(codes[at])
            if kind > W and at > begin and is_joined(codes[at - 1]):
                return at, 1
            if kind >= UNSHARD:
                if stage >= num_stages or home[stage] != rank:
                    return at, 2
                sharded[stage] = 1
            elif kind <= W:
                used[stage] = 1
                if kind in (B, W):
                    last_gradient[stage] = at
        for at in range(begin, stop):
            kind, stage = kind_of(codes[at]), stage_of(codes[at])
            if stage >= num_stages or home[stage] != rank or not sharded[stage]:
                continue
            if kind == UNSHARD:
                if whole[stage]:
                    return at, 3
                whole[stage] = 1
            elif kind == RESHARD:
                if not whole[stage]:
                    return at, 4
                whole[stage] = 0
            elif kind == REDUCE_GRAD:
                if used[stage] and last_gradient[stage] < 0:
                    return at, 5
                if at < last_gradient[stage]:
                    return at, 6
                if reduced[stage]:
                    return at, 7
                reduced[stage] = 1
            elif kind < W and not whole[stage]:
                return at, 8
        for index in range(first[rank], first[rank + 1]):
            stage = held[index]
            if sharded[stage] and last_gradient[stage] >= 0 and not reduced[stage]:
                return last_gradient[stage], 9
    return -1, 0


def _raise_fault(program: Program, at: int, fault: int) -> None:
    packed = program.packed
    rank, step = packed.locate(at)
    action = decode(packed.view[at])
    stage, last = action.stage, None
    for code in packed.row(rank):
        if kind_of(code) in (B, W) and stage_of(code) == stage:
            last = decode(code)
    reason = {
        1: "stands between the two actions of an Overlap: put it before or behind them",
        2: f"is on the wrong rank: the placement puts no stage {stage} there",
        3: f"gathers weights that are whole already: put a {stage}RESHARD before it, or leave it out",
        4: f"lets go of weights that are not whole: put a {stage}UNSHARD before it, or leave it out",
        5: f"has nothing to reduce: stage {stage} has no backward on this rank",
        6: f"comes before {last}, which makes more gradients: put it behind the stage's last B or W",
        7: "is there twice: gradients are reduced once",
        8: f"runs while its stage's weights are not whole: put a {stage}UNSHARD before it",
        9: f"makes the last gradients of a sharded stage, and no {stage}REDUCE_GRAD follows: put one behind it",
    }[fault]
    raise ScheduleError(f"rank {rank}, step {step}: {action} {reason}")
