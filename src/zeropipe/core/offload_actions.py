"""The copies of a stage's activations to the host and back: OFFLOAD and RELOAD of a microbatch.

    OFFLOAD   after its F: copies what the F left for the backward to the host, then frees it
    RELOAD    after its OFFLOAD and before its B or I: copies it back; what a W needs comes along

They run beside the computations, on two lanes of their rank: one copies to the host, one from it. A copy starts when
the actions before it in its row have ended and its lane is free. A B or I waits for its RELOAD.
"""

from __future__ import annotations

from zeropipe.core.action import OFFLOAD, RELOAD, B, F, I, W
from zeropipe.core.jit import Arrays, Ints, arrays
from zeropipe.core.needs import copy_offset, flat_tables
from zeropipe.core.packed import PackedRows, decode, is_joined, is_offloading, kind_of, microbatch_of, stage_of
from zeropipe.core.schedule import Schedule
from zeropipe.errors import ScheduleError

# what has run of a stage and microbatch
_NOTHING, _FORWARD, _OFFLOADED, _RELOADED, _BACKWARD = range(5)
# faults of an action
(
    _INSIDE_OVERLAP, _OUT_OF_RANGE, _WRONG_RANK, _NO_FORWARD, _REPEATED, _TOO_LATE, _NOT_OFFLOADED, _NOT_RELOADED,
    _NEVER_RELOADED,
) = range(1, 10)  # fmt: skip


def merge_offloading(schedule: Schedule, rows: PackedRows) -> PackedRows:
    """Other rows of the schedule, which have its computations in their order, with its OFFLOAD and RELOAD."""
    if schedule.offloading is None:
        return rows
    offloading = schedule.offloading
    xp = arrays(rows.num_codes)
    out = xp.full_ints(rows.num_codes + offloading.num_codes - schedule.num_actions)
    offsets = xp.full_ints(schedule.num_ranks + 1)
    xp.call(
        merge_kernel, xp.ints(rows.codes), xp.list_ints(rows.offsets), xp.ints(offloading.codes),
        xp.list_ints(offloading.offsets), out, offsets,
    )  # fmt: skip
    return PackedRows(xp.int_bytes(out), tuple(map(int, offsets)))


def merge_kernel(codes: Ints, offsets: Ints, copies: Ints, copy_offsets: Ints, out: Ints, ends: Ints) -> None:
    """Write the rows; copies are directly after the computation that they follow in `copies`."""
    cursor = 0
    for rank in range(len(offsets) - 1):
        following = copy_offsets[rank]
        for at in range(offsets[rank], offsets[rank + 1]):
            out[cursor] = codes[at]
            cursor += 1
            if kind_of(codes[at]) > W:
                continue
            following += 1  # the same computation
            while following < copy_offsets[rank + 1] and is_offloading(copies[following]):
                out[cursor] = copies[following]
                cursor += 1
                following += 1
        ends[rank + 1] = cursor


def check_offloading(schedule: Schedule, rows: PackedRows) -> None:
    """Raise unless every OFFLOAD follows its F, and is followed by one RELOAD before the backward."""
    problem = schedule.problem
    xp: Arrays = arrays(rows.num_codes)
    state = xp.full_ints(problem.num_stages * problem.total_slices)
    index, fault = xp.call(
        check_kernel, xp.ints(rows.codes), xp.list_ints(rows.offsets), flat_tables(xp, schedule.placement),
        problem.num_stages, problem.total_slices, schedule.second_slice_from, state,
    )  # fmt: skip
    if fault:
        raise _offloading_error(schedule, rows, int(index), int(fault))


def check_kernel(
    codes: Ints, offsets: Ints, tables: Ints, num_stages: int, num_microbatches: int, second_from: int, state: Ints
) -> tuple[int, int]:
    """(index, fault) of the first action with a fault, or (-1, 0)."""
    for rank in range(len(offsets) - 1):
        for at in range(offsets[rank], offsets[rank + 1]):
            code = codes[at]
            kind, stage, microbatch = kind_of(code), stage_of(code), microbatch_of(code)
            if is_offloading(code):
                if at > offsets[rank] and is_joined(codes[at - 1]):
                    return at, _INSIDE_OVERLAP
                if stage >= num_stages or microbatch >= num_microbatches:
                    return at, _OUT_OF_RANGE
                if tables[copy_offset(microbatch, second_from, num_stages) + stage] != rank:
                    return at, _WRONG_RANK
            elif kind not in (F, B, I):
                continue
            index = stage * num_microbatches + microbatch
            before = state[index]
            if kind == OFFLOAD:
                if before == _NOTHING:
                    return at, _NO_FORWARD
                if before != _FORWARD:
                    return at, _TOO_LATE if before == _BACKWARD else _REPEATED
                state[index] = _OFFLOADED
            elif kind == RELOAD:
                if before != _OFFLOADED:
                    return at, _REPEATED if before == _RELOADED else _NOT_OFFLOADED
                state[index] = _RELOADED
            elif kind == F:
                state[index] = _FORWARD
            else:
                if before == _OFFLOADED:
                    return at, _NOT_RELOADED
                state[index] = _BACKWARD
    for at in range(len(codes)):
        index = stage_of(codes[at]) * num_microbatches + microbatch_of(codes[at])
        if kind_of(codes[at]) == OFFLOAD and state[index] == _OFFLOADED:
            return at, _NEVER_RELOADED
    return -1, 0


def _offloading_error(schedule: Schedule, rows: PackedRows, index: int, fault: int) -> ScheduleError:
    rank, step = rows.locate(index)
    action, p = decode(rows.view[index]), schedule.problem
    name = f"{action.stage}RELOAD{action.microbatch}"
    reason = {
        _INSIDE_OVERLAP: "is between the two actions of an Overlap; move it before or after them",
        _OUT_OF_RANGE: f"is out of range: stages 0 to {p.num_stages - 1}, microbatches 0 to {p.num_microbatches - 1}",
        _WRONG_RANK: f"is on the wrong rank: the placement puts stage {action.stage} of it elsewhere",
        _NO_FORWARD: f"has nothing to copy yet; move it after {action.stage}F{action.microbatch}",
        _REPEATED: "is repeated: activations are copied to the host once, and back once",
        _TOO_LATE: "is after its backward, which has freed the activations; move it before that, or remove it",
        _NOT_OFFLOADED: f"finds nothing on the host; put {action.stage}OFFLOAD{action.microbatch} before it",
        _NOT_RELOADED: f"runs while its activations are on the host; put {name} before it",
        _NEVER_RELOADED: f"is never copied back; put {name} before its backward",
    }[fault]
    return ScheduleError(f"rank {rank}, step {step}: {action} {reason}")
