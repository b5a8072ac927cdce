"""Proves a schedule complete and placed: every action in range, on its rank, and there once."""

from __future__ import annotations

from zeropipe.core.action import Kind, decode
from zeropipe.core.deadlock import step_number
from zeropipe.core.jit import Ints, arrays
from zeropipe.core.needs import flat_tables
from zeropipe.core.placement import require_placement
from zeropipe.core.schedule import Schedule
from zeropipe.errors import ScheduleError

_SPLIT = 0b1101  # F, I and W
_NO_WEIGHTS = -2


def check_complete(schedule: Schedule) -> None:
    """Every stage runs F and (B, or I and W) exactly once per microbatch, on the rank its Placement says.

    Where a W is cut into parts, all of them are there.
    """
    parts = schedule.problem.num_weight_parts
    if type(parts) is not int or parts < 1:
        raise ScheduleError(f"num_weight_parts is {parts!r}: a whole number from 1 on is needed")
    seen = _scan(schedule)
    place = arrays(schedule.num_actions).call(incomplete_kernel, seen, parts)
    if place == _NO_WEIGHTS:
        raise ScheduleError(f"num_weight_parts is {parts}, but the schedule has no W: leave it out, or make it 1")
    if place >= 0:
        stage, microbatch = divmod(int(place), schedule.num_microbatches)
        bits, ran = int(seen[place]) & 15, int(seen[place]) >> 4
        if bits == _SPLIT:
            raise ScheduleError(f"{stage}W{microbatch} is there {ran} of {parts} times: every W here has {parts} parts")
        have = [k.name for k in (Kind.F, Kind.B, Kind.I, Kind.W) if bits >> k & 1]
        rule = "each stage and microbatch needs F and B, or F, I and W"
        found = f"only {' and '.join(have)}" if have else "nothing"
        raise ScheduleError(f"stage {stage}, microbatch {microbatch} has {found}: {rule}")


def check_order(schedule: Schedule) -> None:
    """What `lower` needs: every action in range, placed and there no more than once (a W: once per part)."""
    _scan(schedule)


def _scan(schedule: Schedule) -> Ints:
    """For each (stage, microbatch) a bit per kind, and above them how often W ran.

    Raises at the first action out of range, misplaced or repeated.
    """
    problem, placement = schedule.problem, schedule.placement
    require_placement(placement, problem)
    if len(schedule.rows) != problem.num_ranks:
        raise ScheduleError(f"there are {len(schedule.rows)} rows for {problem.num_ranks} ranks: give one per rank")
    xp = arrays(schedule.num_actions)
    seen = xp.full_ints(problem.num_stages * problem.num_microbatches)
    at, fault = xp.call(
        scan_kernel, xp.ints(schedule.lines.codes), xp.list_ints(schedule.lines.offsets),
        flat_tables(xp, placement), problem.num_stages, problem.num_microbatches, problem.num_weight_parts,
        schedule.split, seen,
    )  # fmt: skip
    if fault:
        _raise_scan_fault(schedule, int(at), int(fault))
    return seen


def _raise_scan_fault(schedule: Schedule, at: int, fault: int) -> None:
    rank, step = step_number(schedule.lines, at)
    action = decode(memoryview(schedule.lines.codes).cast("q")[at])
    where = f"rank {rank}, step {step}: {action}"
    p = schedule.problem
    if fault == 1:
        raise ScheduleError(f"{where} is out of range: stages 0 to {p.num_stages - 1}, "
                            f"microbatches 0 to {p.num_microbatches - 1}")  # fmt: skip
    if fault == 2:
        home = schedule.placement.rank_of(action.stage, action.microbatch)
        raise ScheduleError(f"{where} is on the wrong rank: the placement puts stage {action.stage}, "
                            f"microbatch {action.microbatch} on rank {home}")  # fmt: skip
    if fault == 3 and action.kind is Kind.W and p.num_weight_parts > 1:
        raise ScheduleError(f"{where} is one too many: every W here has {p.num_weight_parts} parts")
    if fault == 3:
        raise ScheduleError(f"{where} is there twice: every action runs exactly once")
    if fault == 4:
        raise ScheduleError(f"{where} does the backward a second time: a backward is either B, or I and W")
    if fault == 5:
        raise ScheduleError(f"{where} is no computation: a Schedule holds F, B, I and W; lower() adds the messages")
    raise ScheduleError(f"{where} opens an Overlap that is no pair: it joins an F and a B (or I), in that order")


def scan_kernel(codes, offsets, tables, num_stages, num_microbatches, parts, split, seen):  # type: ignore[no-untyped-def]
    """(index, fault) of the first bad action, or (-1, 0)."""
    for rank in range(len(offsets) - 1):
        joined = 0
        for at in range(offsets[rank], offsets[rank + 1]):
            code = codes[at]
            kind = (code >> 1) & 15
            stage = (code >> 5) & 0xFFFF
            microbatch = code >> 21
            if kind > 3:
                return at, 5
            if joined and (code & 1 or not (kind == 1 or kind == 2)):
                return at, 6
            joined = code & 1
            if joined and (kind != 0 or at + 1 == offsets[rank + 1]):
                return at, 6
            if stage >= num_stages or microbatch >= num_microbatches:
                return at, 1
            base = 0 if microbatch < split else num_stages
            if tables[base + stage] != rank:
                return at, 2
            place = stage * num_microbatches + microbatch
            bits = seen[place]
            if kind == 3:
                if bits >> 4 == parts:
                    return at, 3
                bits += 16
            elif bits >> kind & 1:
                return at, 3
            if (kind == 1 and bits & 12) or (kind >= 2 and bits & 2):
                return at, 4
            seen[place] = bits | 1 << kind
    return -1, 0


def incomplete_kernel(seen, parts):  # type: ignore[no-untyped-def]
    """The first (stage, microbatch) that lacks an action, -1 if none does, -2 if there are parts of no W."""
    whole = 16 * parts + 0b1101
    found = -1 if parts == 1 else -2
    for place in range(len(seen)):
        if seen[place] == whole:  # F, I and all of W
            found = -1
        elif seen[place] != 0b0011:  # F and B
            return place
    return found
