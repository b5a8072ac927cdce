"""Check that a schedule is complete and placed: every action is in range, on its rank, and present once."""

from __future__ import annotations

from zeropipe.core.action import OFFLOAD, B, F, I, Kind, W
from zeropipe.core.jit import Arrays, Ints, arrays
from zeropipe.core.needs import copy_offset, flat_tables
from zeropipe.core.offload_actions import check_offloading
from zeropipe.core.packed import encode, is_joined, kind_of, microbatch_of, stage_of
from zeropipe.core.placement import require_placement
from zeropipe.core.schedule import Schedule
from zeropipe.errors import ScheduleError

# the actions found of a stage and microbatch: a bit per kind, and above these bits the number of its W
_FULL_BACKWARD = 1 << B
_SPLIT_BACKWARD = 1 << I | 1 << W
_ANY_BACKWARD = 1 << B | 1 << I
_FULL = 1 << F | _FULL_BACKWARD
_SPLIT = 1 << F | _SPLIT_BACKWARD
_KINDS = (1 << 4) - 1
_COUNT_SHIFT = 4
_NO_WEIGHTS = -2
# faults of an action
_OUT_OF_RANGE, _WRONG_RANK, _REPEATED, _SECOND_BACKWARD, _NOT_COMPUTE, _NOT_A_PAIR, _SLICE_TOO_EARLY = range(1, 8)


def check_complete(schedule: Schedule) -> None:
    """Raise unless every stage runs F and (B, or I and W) once per microbatch, on the rank of its Placement.

    A W in parts must have all of them. With slices, each slice of a microbatch has these actions: F in the order of
    the slices, backwards in the opposite one.
    """
    parts = schedule.problem.num_weight_parts
    if type(parts) is not int or parts < 1:
        raise ScheduleError(f"num_weight_parts is {parts!r}: must be a positive integer")
    xp = arrays(schedule.num_actions)
    found = _scan(xp, schedule)
    index = xp.call(incomplete_kernel, found, parts)
    if index == _NO_WEIGHTS:
        raise ScheduleError(f"num_weight_parts is {parts}, but the schedule has no W; leave it out, or use 1")
    if index >= 0:
        stage, number = divmod(int(index), schedule.problem.total_slices)
        bits, count = int(found[index]) & _KINDS, int(found[index]) >> _COUNT_SHIFT
        if bits == _SPLIT:
            raise ScheduleError(
                f"{schedule.decode(encode(stage, W, number))} is present {count} of {parts} times: "
                f"every W here has {parts} parts"
            )
        present = [k.name for k in (Kind.F, Kind.B, Kind.I, Kind.W) if bits >> k & 1]
        rule = "must be F and B, or F, I and W"
        text = f"only {' and '.join(present)}" if present else "no action"
        microbatch, slice_ = divmod(number, schedule.num_slices)
        of_slice = f", slice {slice_}" if schedule.num_slices > 1 else ""
        raise ScheduleError(f"stage {stage}, microbatch {microbatch}{of_slice} has {text}: {rule}")


def check_actions(schedule: Schedule) -> None:
    """Raise unless every action is in range, on its rank and present at most once (a W: once per part)."""
    _scan(arrays(schedule.num_actions), schedule)


def _scan(xp: Arrays, schedule: Schedule) -> Ints:
    """The actions of each (stage, microbatch), as bits; raises at the first one with a fault."""
    problem, placement = schedule.problem, schedule.placement
    require_placement(placement, problem)
    if len(schedule.rows) != problem.num_ranks:
        raise ScheduleError(f"there are {len(schedule.rows)} rows for {problem.num_ranks} ranks: must be one per rank")
    found = xp.full_ints(problem.num_stages * problem.total_slices)
    index, fault = xp.call(
        scan_kernel, xp.ints(schedule.packed.codes), xp.list_ints(schedule.packed.offsets),
        flat_tables(xp, placement), problem.num_stages, problem.total_slices, problem.num_slices,
        problem.num_weight_parts, schedule.second_slice_from, found,
    )  # fmt: skip
    if fault:
        raise _scan_error(schedule, int(index), int(fault))
    if schedule.offloading is not None:
        check_offloading(schedule, schedule.offloading)
    _check_marks(schedule)
    return found


def _check_marks(schedule: Schedule) -> None:
    """ScheduleError for a checkpointed F that does not exist, or whose activations are offloaded."""
    offloading = () if schedule.offloading is None else schedule.offloading.view
    copied = {(stage_of(code), microbatch_of(code)) for code in offloading if kind_of(code) == OFFLOAD}
    for stage, number in sorted(schedule.checkpointed):
        action = schedule.decode(encode(stage, F, number))
        if not (0 <= stage < schedule.num_stages and 0 <= number < schedule.problem.total_slices):
            raise ScheduleError(f"{action} is checkpointed and out of range: the schedule has no such F")
        if (stage, number) in copied:
            raise ScheduleError(
                f"{action} is checkpointed and its activations are copied to the host: leave out one of them"
            )


def _scan_error(schedule: Schedule, index: int, fault: int) -> ScheduleError:
    rank, step = schedule.packed.locate(index)
    action = schedule.decode(schedule.packed.view[index])
    p, placement = schedule.problem, schedule.placement
    if fault == _OUT_OF_RANGE:
        reason = f"is out of range: stages 0 to {p.num_stages - 1}, microbatches 0 to {p.num_microbatches - 1}"
    elif fault == _WRONG_RANK:
        one = p.num_stages == p.num_ranks and placement.name in ("vee", "loop")
        hint = "; there is 1 stage per rank: is stages_per_rank=2 missing in @zp.register?" if one else ""
        reason = (
            f"is on the wrong rank: the placement puts stage {action.stage}, microbatch {action.microbatch} on rank "
            f"{placement.rank_of(action.stage, action.microbatch)}{hint}"
        )
    elif fault == _SLICE_TOO_EARLY:
        step_to = -1 if action.kind is Kind.F else 1
        rule = "forwards run in the order of the slices, backwards in the opposite one"
        other = action._replace(slice=(action.slice or 0) + step_to)
        reason = f"runs before {other}: {rule}"
    elif fault == _REPEATED and action.kind is Kind.W and p.num_weight_parts > 1:
        reason = f"is one too many: every W here has {p.num_weight_parts} parts"
    else:
        reason = {
            _REPEATED: "is repeated: every action runs exactly once",
            _SECOND_BACKWARD: "is a second backward: a backward is either B, or I and W",
            _NOT_COMPUTE: "is not a computation: a Schedule has F, B, I and W; lower() adds the messages",
            _NOT_A_PAIR: "starts an invalid Overlap: it must have an F and a B (or I), in that order",
        }[fault]
    return ScheduleError(f"rank {rank}, step {step}: {action} {reason}")


def scan_kernel(
    codes: Ints, offsets: Ints, tables: Ints, num_stages: int, num_microbatches: int, num_slices: int,
    num_weight_parts: int, second_from: int, found: Ints,
) -> tuple[int, int]:  # fmt: skip
    """(index, fault) of the first action with a fault, or (-1, 0)."""
    for rank in range(len(offsets) - 1):
        joined = 0
        for at in range(offsets[rank], offsets[rank + 1]):
            code = codes[at]
            kind = kind_of(code)
            stage = stage_of(code)
            microbatch = microbatch_of(code)
            if kind > W:
                return at, _NOT_COMPUTE
            is_second, joined = joined, is_joined(code)
            if is_second and (joined or kind not in (B, I)):
                return at, _NOT_A_PAIR
            if joined and (kind != F or at + 1 == offsets[rank + 1]):
                return at, _NOT_A_PAIR
            if stage >= num_stages or not 0 <= microbatch < num_microbatches:
                return at, _OUT_OF_RANGE
            if tables[copy_offset(microbatch, second_from, num_stages) + stage] != rank:
                return at, _WRONG_RANK
            index = stage * num_microbatches + microbatch
            bits = found[index]
            if kind == W:
                if bits >> _COUNT_SHIFT == num_weight_parts:
                    return at, _REPEATED
                bits += 1 << _COUNT_SHIFT
            elif bits >> kind & 1:
                return at, _REPEATED
            if (kind == B and bits & _SPLIT_BACKWARD) or (kind >= I and bits & _FULL_BACKWARD):
                return at, _SECOND_BACKWARD
            found[index] = bits | 1 << kind
            if num_slices > 1:
                slice_ = microbatch % num_slices
                if kind == F and slice_ > 0 and not found[index - 1] & 1 << F:
                    return at, _SLICE_TOO_EARLY
                if kind in (B, I) and slice_ < num_slices - 1 and not found[index + 1] & _ANY_BACKWARD:
                    return at, _SLICE_TOO_EARLY
    return -1, 0


def incomplete_kernel(found: Ints, num_weight_parts: int) -> int:
    """The first (stage, microbatch) that lacks an action; -1 if none does, _NO_WEIGHTS if there are parts but no W."""
    split = num_weight_parts << _COUNT_SHIFT | _SPLIT
    result = -1 if num_weight_parts == 1 else _NO_WEIGHTS
    for index in range(len(found)):
        if found[index] == split:
            result = -1
        elif found[index] != _FULL:
            return index
    return result
