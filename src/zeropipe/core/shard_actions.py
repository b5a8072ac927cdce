"""The actions of sharded stages in a Program: when weights are gathered and freed, and gradients reduced.

A sharded stage keeps a shard of its weights on each of several ranks that run the same row. It needs
    UNSHARD        before F, B and I: gather the full weights. A W reads no weights
    RESHARD        when the full weights are no longer needed
    REDUCE_GRAD    after its last B or W: sum the full gradients; each rank keeps a shard of the sum

Rolling gradients are reduced several times in a step, and each sum is added to the shard. See `GradientPolicy`.
"""

from __future__ import annotations

from itertools import accumulate
from typing import NamedTuple

from zeropipe.core.action import REDUCE_GRAD, RESHARD, UNSHARD, B, W
from zeropipe.core.gradient_policy import GradientPolicy, reduce_kernel
from zeropipe.core.jit import Arrays, Ints, arrays
from zeropipe.core.packed import PackedRows, encode, is_joined, kind_of, stage_of
from zeropipe.core.schedule import Program, Schedule
from zeropipe.errors import ConfigError, ScheduleError

POLICIES = ("keep", "regather", "ends")
_, _REGATHER, _ENDS = range(3)
PREFETCH_STEPS = 2  # steps from an UNSHARD to the first use of its stage: it takes about as long as one or two steps
# faults of an action
(
    _INSIDE_OVERLAP, _WRONG_RANK, _ALREADY_FULL, _NOT_FULL, _NO_BACKWARD, _TOO_EARLY, _REPEATED, _NOT_GATHERED,
    _NOT_REDUCED,
) = range(1, 10)  # fmt: skip


def require_policy(shards: object) -> None:
    """ConfigError unless `shards` is one of POLICIES."""
    if shards not in POLICIES:
        raise ConfigError(f"shards={shards!r}: must be {', '.join(map(repr, POLICIES))}, or None for unsharded stages")


class HeldStages(NamedTuple):
    """The stages of each rank, in order and concatenated."""

    stages: Ints
    offsets: Ints  # of each rank


def _find_held_stages(xp: Arrays, schedule: Schedule) -> HeldStages:
    """The stages of each rank, of all copies of the model."""
    held = [schedule.placement.stages_of(rank) for rank in range(schedule.num_ranks)]
    offsets = accumulate(map(len, held), initial=0)
    return HeldStages(xp.list_ints([stage for stages in held for stage in stages]), xp.list_ints(list(offsets)))


def with_shards(schedule: Schedule, shards: str, gradients: str = "whole") -> PackedRows:
    """The schedule's rows with UNSHARD, RESHARD and REDUCE_GRAD for all stages; see `lower`."""
    require_policy(shards)
    policy, packed, num_stages = POLICIES.index(shards), schedule.packed, schedule.num_stages
    rolling = GradientPolicy.parse(gradients)
    rolling.require_parts(schedule.problem.num_weight_parts)
    xp = arrays(packed.num_codes)
    held, codes, starts = _find_held_stages(xp, schedule), xp.ints(packed.codes), xp.list_ints(packed.offsets)
    reduces, following = xp.full_ints(packed.num_codes), xp.full_ints(packed.num_codes)
    limit = num_stages if policy == _ENDS else rolling.max_stages(num_stages)
    xp.call(
        reduce_kernel, codes, starts, limit, reduces, following, xp.full_ints(num_stages, -1),
        xp.full_ints(num_stages, -1),
    )  # fmt: skip
    # "regather" adds two actions per action, the others two per stage; a stage without work is reduced once
    size = 3 * packed.num_codes if policy == _REGATHER else packed.num_codes + 2 * len(held.stages)
    out = xp.full_ints(size + sum(map(int, reduces)) + len(held.stages))
    offsets = xp.full_ints(schedule.num_ranks + 1)
    last_use, is_reduced, is_full = (xp.full_ints(num_stages) for _ in range(3))
    xp.call(
        shards_kernel, codes, starts, held, policy, PREFETCH_STEPS, reduces, last_use, is_reduced, is_full, out, offsets
    )
    ends = tuple(int(offset) for offset in offsets)
    return PackedRows(xp.int_bytes(out[: ends[-1]]), ends)


def shards_kernel(
    codes: Ints, offsets: Ints, held: HeldStages, policy: int, prefetch_steps: int, reduces: Ints, last_use: Ints,
    is_reduced: Ints, is_full: Ints, out: Ints, ends: Ints,
) -> None:  # fmt: skip
    """Write the rows with sharding actions. `reduces`: whether an action is followed by the REDUCE_GRAD of its stage.

    With few microbatches, a rank may have no work for a stage that it holds. It still reduces it, at the end: another
    rank with a shard of it may have more microbatches.
    """
    has_backward = False
    for at in range(len(codes)):
        if kind_of(codes[at]) in (B, W):
            has_backward = True
    cursor = 0
    for rank in range(len(offsets) - 1):
        begin, stop = offsets[rank], offsets[rank + 1]
        for index in range(held.offsets[rank], held.offsets[rank + 1]):
            stage = held.stages[index]
            last_use[stage] = -1
            is_reduced[stage] = 0
            is_full[stage] = 0
        for at in range(begin, stop):
            if kind_of(codes[at]) != W:
                last_use[stage_of(codes[at])] = at
        if policy == _ENDS:
            for index in range(held.offsets[rank], held.offsets[rank + 1]):
                out[cursor] = encode(held.stages[index], UNSHARD, 0)
                cursor += 1
        at = begin
        while at < stop:
            last = at + is_joined(codes[at])
            if policy != _ENDS:
                upcoming, steps = at, 0  # gather the stages of this step and of the next ones
                while upcoming < stop and steps <= prefetch_steps:
                    stage = stage_of(codes[upcoming])
                    if kind_of(codes[upcoming]) != W and not is_full[stage]:
                        is_full[stage] = 1
                        out[cursor] = encode(stage, UNSHARD, 0)
                        cursor += 1
                    steps += 1 - is_joined(codes[upcoming])
                    upcoming += 1
            for half in range(at, last + 1):
                out[cursor] = codes[half]
                cursor += 1
            if policy != _ENDS:
                for half in range(at, last + 1):
                    stage = stage_of(codes[half])
                    is_used = kind_of(codes[half]) != W
                    if is_used and is_full[stage] and (policy == _REGATHER or at <= last_use[stage] <= last):
                        is_full[stage] = 0
                        out[cursor] = encode(stage, RESHARD, 0)
                        cursor += 1
                for half in range(at, last + 1):
                    stage = stage_of(codes[half])
                    if reduces[half]:
                        is_reduced[stage] = 1
                        out[cursor] = encode(stage, REDUCE_GRAD, 0)
                        cursor += 1
            at = last + 1
        for index in range(held.offsets[rank], held.offsets[rank + 1]):
            stage = held.stages[index]
            if policy == _ENDS:
                out[cursor] = encode(stage, RESHARD, 0)
                cursor += 1
            if has_backward and (policy == _ENDS or not is_reduced[stage]):
                out[cursor] = encode(stage, REDUCE_GRAD, 0)
                cursor += 1
        ends[rank + 1] = cursor


class StageState(NamedTuple):
    """The state of each stage on the rank that is being checked."""

    rank: Ints
    is_sharded: Ints
    is_full: Ints
    is_used: Ints
    is_reduced: Ints
    has_gradients: Ints  # that are not reduced
    last_gradient: Ints


def check_shards(program: Program) -> None:
    """Raise unless sharded stages have full weights when used, and are reduced after their last gradient.

    A stage without any UNSHARD, RESHARD or REDUCE_GRAD is not sharded.
    """
    schedule, packed = program.schedule, program.packed
    xp, num_stages = arrays(packed.num_codes), schedule.num_stages
    state = StageState(
        rank=xp.full_ints(num_stages, -1), is_sharded=xp.full_ints(num_stages), is_full=xp.full_ints(num_stages),
        is_used=xp.full_ints(num_stages), is_reduced=xp.full_ints(num_stages),
        has_gradients=xp.full_ints(num_stages), last_gradient=xp.full_ints(num_stages),
    )  # fmt: skip
    held = _find_held_stages(xp, schedule)
    index, fault = xp.call(check_kernel, xp.ints(packed.codes), xp.list_ints(packed.offsets), num_stages, held, state)
    if fault:
        raise _shards_error(program, int(index), int(fault))


def check_kernel(codes: Ints, offsets: Ints, num_stages: int, held: HeldStages, state: StageState) -> tuple[int, int]:
    """(index, fault) of the first action that is invalid for a sharded stage, or (-1, 0)."""
    is_full, last_gradient = state.is_full, state.last_gradient
    for rank in range(len(offsets) - 1):
        begin, stop = offsets[rank], offsets[rank + 1]
        for index in range(held.offsets[rank], held.offsets[rank + 1]):
            stage = held.stages[index]
            state.rank[stage] = rank
            state.is_sharded[stage] = 0
            is_full[stage] = 0
            state.is_used[stage] = 0
            state.is_reduced[stage] = 0
            state.has_gradients[stage] = 0
            last_gradient[stage] = -1
        for at in range(begin, stop):
            kind, stage = kind_of(codes[at]), stage_of(codes[at])
            if kind > W and at > begin and is_joined(codes[at - 1]):
                return at, _INSIDE_OVERLAP
            if UNSHARD <= kind <= REDUCE_GRAD:
                if stage >= num_stages or state.rank[stage] != rank:
                    return at, _WRONG_RANK
                state.is_sharded[stage] = 1
            elif kind <= W:
                state.is_used[stage] = 1
                if kind in (B, W):
                    last_gradient[stage] = at
        for at in range(begin, stop):
            kind, stage = kind_of(codes[at]), stage_of(codes[at])
            if stage >= num_stages or state.rank[stage] != rank or not state.is_sharded[stage]:
                continue
            if kind == UNSHARD:
                if is_full[stage]:
                    return at, _ALREADY_FULL
                is_full[stage] = 1
            elif kind == RESHARD:
                if not is_full[stage]:
                    return at, _NOT_FULL
                is_full[stage] = 0
            elif kind == REDUCE_GRAD:
                if state.is_used[stage] and last_gradient[stage] < 0:
                    return at, _NO_BACKWARD
                if not state.has_gradients[stage]:
                    if state.is_reduced[stage]:
                        return at, _REPEATED
                    if state.is_used[stage]:
                        return at, _TOO_EARLY
                state.is_reduced[stage] = 1
                state.has_gradients[stage] = 0
            elif kind < W and not is_full[stage]:
                return at, _NOT_GATHERED
            if kind in (B, W):
                state.has_gradients[stage] = 1
        for index in range(held.offsets[rank], held.offsets[rank + 1]):
            stage = held.stages[index]
            if state.is_sharded[stage] and state.has_gradients[stage]:
                return last_gradient[stage], _NOT_REDUCED
    return -1, 0


def _shards_error(program: Program, index: int, fault: int) -> ScheduleError:
    packed = program.packed
    rank, step = packed.locate(index)
    action = program.schedule.decode(packed.view[index])
    stage, last = action.stage, None
    for code in packed.row(rank):
        if kind_of(code) in (B, W) and stage_of(code) == stage:
            last = program.schedule.decode(code)
    reason = {
        _INSIDE_OVERLAP: "is between the two actions of an Overlap; move it before or after them",
        _WRONG_RANK: f"is on the wrong rank: the placement puts no stage {stage} there",
        _ALREADY_FULL: f"gathers weights that are gathered already; put a {stage}RESHARD before it, or remove it",
        _NOT_FULL: f"frees weights that are not gathered; put a {stage}UNSHARD before it, or remove it",
        _NO_BACKWARD: f"has nothing to reduce: stage {stage} has no backward on this rank",
        _TOO_EARLY: f"is before {last}, which adds gradients; move it after the stage's last B or W",
        _REPEATED: "is repeated: no B or W has added gradients since the one before",
        _NOT_GATHERED: f"runs without the weights of its stage; put a {stage}UNSHARD before it",
        _NOT_REDUCED: f"has the last gradients of a sharded stage, but no {stage}REDUCE_GRAD follows; put one after it",
    }[fault]
    return ScheduleError(f"rank {rank}, step {step}: {action} {reason}")
