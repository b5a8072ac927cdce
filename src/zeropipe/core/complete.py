"""Proves a schedule complete and placed: every action in range, on its rank, and there once."""

from __future__ import annotations

from zeropipe.core.action import B, F, I, Kind, W
from zeropipe.core.deadlock import step_number
from zeropipe.core.jit import Arrays, Ints, arrays
from zeropipe.core.needs import copy_base, flat_tables
from zeropipe.core.packed import decode, is_joined, kind_of, microbatch_of, stage_of
from zeropipe.core.placement import require_placement
from zeropipe.core.schedule import Schedule
from zeropipe.errors import ScheduleError

# what `scan_kernel` has seen of a stage and microbatch: a bit per kind, and above them how often W ran
_WHOLE_BACKWARD = 1 << B
_SPLIT_BACKWARD = 1 << I | 1 << W
_WHOLE = 1 << F | _WHOLE_BACKWARD
_SPLIT = 1 << F | _SPLIT_BACKWARD
_KINDS = (1 << 4) - 1
_COUNT_SHIFT = 4
_NO_WEIGHTS = -2


def check_complete(schedule: Schedule) -> None:
    """Every stage runs F and (B, or I and W) exactly once per microbatch, on the rank its Placement says.

    Where a W is cut into parts, all of them are there.
    """
    parts = schedule.problem.num_weight_parts
    if type(parts) is not int or parts < 1:
        raise ScheduleError(f"num_weight_parts is {parts!r}: a whole number from 1 on is needed")
    xp = arrays(schedule.num_actions)
    seen = _scan(xp, schedule)
    place = xp.call(incomplete_kernel, seen, parts)
    if place == _NO_WEIGHTS:
        raise ScheduleError(f"num_weight_parts is {parts}, but the schedule has no W: leave it out, or make it 1")
    if place >= 0:
        stage, microbatch = divmod(int(place), schedule.num_microbatches)
        bits, ran = int(seen[place]) & _KINDS, int(seen[place]) >> _COUNT_SHIFT
        if bits == _SPLIT:
            raise ScheduleError(f"{stage}W{microbatch} is there {ran} of {parts} times: every W here has {parts} parts")
        have = [k.name for k in (Kind.F, Kind.B, Kind.I, Kind.W) if bits >> k & 1]
        rule = "each stage and microbatch needs F and B, or F, I and W"
        found = f"only {' and '.join(have)}" if have else "nothing"
        raise ScheduleError(f"stage {stage}, microbatch {microbatch} has {found}: {rule}")


def check_order(schedule: Schedule) -> None:
    """What `lower` needs: every action in range, placed and there no more than once (a W: once per part)."""
    _scan(arrays(schedule.num_actions), schedule)


def _scan(xp: Arrays, schedule: Schedule) -> Ints:
    """What there is of each (stage, microbatch). Raises at the first action out of range, misplaced or repeated."""
    problem, placement = schedule.problem, schedule.placement
    require_placement(placement, problem)
    if len(schedule.rows) != problem.num_ranks:
        raise ScheduleError(f"there are {len(schedule.rows)} rows for {problem.num_ranks} ranks: give one per rank")
    seen = xp.full_ints(problem.num_stages * problem.num_microbatches)
    at, fault = xp.call(
        scan_kernel, xp.ints(schedule.packed.codes), xp.list_ints(schedule.packed.offsets),
        flat_tables(xp, placement), problem.num_stages, problem.num_microbatches, problem.num_weight_parts,
        schedule.second_from, seen,
    )  # fmt: skip
    if fault:
        _raise_scan_fault(schedule, int(at), int(fault))
    return seen


def _raise_scan_fault(schedule: Schedule, at: int, fault: int) -> None:
    rank, step = step_number(schedule.packed, at)
    action = decode(schedule.packed.view[at])
    where = f"rank {rank}, step {step}: {action}"
    p = schedule.problem
    if fault == 1:
        raise ScheduleError(f"{where} is out of range: stages 0 to {p.num_stages - 1}, "
                            f"microbatches 0 to {p.num_microbatches - 1}")  # fmt: skip
    if fault == 2:
        home = schedule.placement.rank_of(action.stage, action.microbatch)
        one = p.num_stages == p.num_ranks and schedule.placement.name in ("vee", "loop")
        hint = "; there is 1 stage per rank: is stages_per_rank=2 missing in @zp.register?" if one else ""
        raise ScheduleError(f"{where} is on the wrong rank: the placement puts stage {action.stage}, "
                            f"microbatch {action.microbatch} on rank {home}{hint}")  # fmt: skip
    if fault == 3 and action.kind is Kind.W and p.num_weight_parts > 1:
        raise ScheduleError(f"{where} is one too many: every W here has {p.num_weight_parts} parts")
    if fault == 3:
        raise ScheduleError(f"{where} is there twice: every action runs exactly once")
    if fault == 4:
        raise ScheduleError(f"{where} does the backward a second time: a backward is either B, or I and W")
    if fault == 5:
        raise ScheduleError(f"{where} is no computation: a Schedule holds F, B, I and W; lower() adds the messages")
    raise ScheduleError(f"{where} opens an Overlap that is no pair: it joins an F and a B (or I), in that order")


def scan_kernel(  # type: ignore[no-untyped-def]
    codes, offsets, tables, num_stages, num_microbatches, num_weight_parts, second_from, seen
):
    """(index, fault) of the first bad action, or (-1, 0)."""
    for rank in range(len(offsets) - 1):
        joined = 0
        for at in range(offsets[rank], offsets[rank + 1]):
            code = codes[at]
            kind = kind_of(code)
            stage = stage_of(code)
            microbatch = microbatch_of(code)
            if kind > W:
                return at, 5
            follows, joined = joined, is_joined(code)
            if follows and (joined or kind not in (B, I)):
                return at, 6
            if joined and (kind != F or at + 1 == offsets[rank + 1]):
                return at, 6
            if stage >= num_stages or not 0 <= microbatch < num_microbatches:
                return at, 1
            if tables[copy_base(microbatch, second_from, num_stages) + stage] != rank:
                return at, 2
            place = stage * num_microbatches + microbatch
            bits = seen[place]
            if kind == W:
                if bits >> _COUNT_SHIFT == num_weight_parts:
                    return at, 3
                bits += 1 << _COUNT_SHIFT
            elif bits >> kind & 1:
                return at, 3
            if (kind == B and bits & _SPLIT_BACKWARD) or (kind >= I and bits & _WHOLE_BACKWARD):
                return at, 4
            seen[place] = bits | 1 << kind
    return -1, 0


def incomplete_kernel(seen, num_weight_parts):  # type: ignore[no-untyped-def]
    """The first (stage, microbatch) that lacks an action, -1 if none does, _NO_WEIGHTS if there are parts of no W."""
    split = num_weight_parts << _COUNT_SHIFT | _SPLIT
    found = -1 if num_weight_parts == 1 else _NO_WEIGHTS
    for place in range(len(seen)):
        if seen[place] == split:
            found = -1
        elif seen[place] != _WHOLE:
            return place
    return found
