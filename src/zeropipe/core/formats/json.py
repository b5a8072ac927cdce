"""zeropipe's own JSON: versioned; unlike CSV it has the placement, the name and (of a Timeline) the times."""

from __future__ import annotations

import json
from array import array
from collections.abc import Callable
from dataclasses import asdict
from math import inf, isfinite
from typing import Any

from zeropipe.core.action import Kind, parse_action, parse_step
from zeropipe.core.complete import check_actions
from zeropipe.core.formats.parse import parse_json, require_text
from zeropipe.core.model.checkpointing import Checkpointing
from zeropipe.core.offload_timeline import Offloading
from zeropipe.core.packed import PackedRows, find_marks, pack
from zeropipe.core.phases import LayerPhases, Phases, PhaseTimes
from zeropipe.core.placement import (
    Placement,
    Problem,
    match_placement,
    require_num_actions,
    require_placement,
    require_problem,
)
from zeropipe.core.schedule import Rows, Schedule, require_schedule
from zeropipe.core.shard_timeline import Sharding
from zeropipe.core.timeline import Memory, Origin, Timeline
from zeropipe.errors import ConfigError, ScheduleError, ZeropipeError, short, suggest

VERSION = 1
_SIZES = ("num_ranks", "num_stages", "num_microbatches", "num_weight_parts", "num_slices")
_FIELDS = ("zeropipe", "type", "name", *_SIZES, "placement", "rows")
_PLACEMENT = ("name", "copies", "split")


def to_json(what: Schedule | Timeline) -> str:
    """The schedule or timeline as text; `from_json` returns an equal value."""
    return json.dumps(to_data(what))


def to_data(what: Schedule | Timeline) -> dict[str, Any]:
    """The schedule or timeline as plain data, for a JSON document that may have other fields, too."""
    if isinstance(what, Timeline):
        return _timeline_to_data(what)
    require_schedule(what)
    return _schedule_to_data(what)


def from_json(text: str) -> Schedule | Timeline:
    """The Schedule or Timeline of a text that `to_json` wrote."""
    require_text(text, "json")
    try:
        data = parse_json(text)
    except ValueError as error:
        raise ScheduleError(f"not JSON: {error}") from None
    return from_data(data)


def from_data(data: Any) -> Schedule | Timeline:
    """The Schedule or Timeline of plain data that `to_data` returned."""
    if isinstance(data, dict) and "traceEvents" in data and "zeropipe" not in data:
        raise ScheduleError("this trace is not zeropipe's, or has several timelines: only a trace of one can be read")
    if not isinstance(data, dict) or "zeropipe" not in data:
        raise ScheduleError("this JSON is not zeropipe's: it has no field 'zeropipe' with the version")
    if data["zeropipe"] != VERSION:
        raise ScheduleError(f"this file has version {data['zeropipe']!r}, this zeropipe reads version {VERSION}")
    try:
        if data.get("type") == "timeline":  # may have more fields: the events of a trace, the step of a training run
            return _parse_timeline(data)
        _require_known_fields(data)
        return _parse_schedule(data)
    except ZeropipeError:
        raise
    except (KeyError, TypeError, ValueError, AttributeError, IndexError, OverflowError) as error:
        reason = f"field {error} is missing" if isinstance(error, KeyError) else str(error)
        raise ScheduleError(f"this JSON is damaged: {reason}") from None


def _schedule_to_data(schedule: Schedule) -> dict[str, Any]:
    placement = schedule.placement
    return {
        "zeropipe": VERSION,
        "type": "schedule",
        "name": schedule.name,
        "num_ranks": schedule.num_ranks,
        "num_stages": schedule.num_stages,
        "num_microbatches": schedule.num_microbatches,
        "num_weight_parts": schedule.problem.num_weight_parts,
        **({"num_slices": schedule.num_slices} if schedule.num_slices > 1 else {}),
        "placement": {"name": placement.name, "copies": placement.copies, "split": placement.second_from},
        "rows": [" ".join(map(str, row)) for row in schedule.rows],
    }


def _parse_schedule(data: dict[str, Any]) -> Schedule:
    sizes = {"num_weight_parts": 1, "num_slices": 1, **data}  # older files and those without slices lack these
    problem = Problem(*(_positive_integer(sizes, field) for field in _SIZES))
    placement = Placement(tuple(map(tuple, data["placement"]["copies"])), data["placement"]["split"])
    require_placement(placement, problem)
    rows = data["rows"]
    if len(rows) != problem.num_ranks:
        raise ScheduleError(f"num_ranks is {problem.num_ranks}, but there are {len(rows)} rows")
    require_problem(problem)
    packed = PackedRows.of(pack(map(parse_step, row.split()), problem.num_slices) for row in rows)
    require_num_actions(problem, packed.num_codes)
    named = match_placement(placement.copies, placement.second_from, problem)
    marks = find_marks((map(parse_step, row.split()) for row in rows if "c" in row), problem.num_slices)
    return Schedule.of_packed(problem, named, packed, str(data["name"]), marks)


def _require_known_fields(data: dict[str, Any]) -> None:
    """ScheduleError for a field that a schedule does not have, which would be ignored silently."""
    if data.get("type", "schedule") != "schedule":
        raise ScheduleError(f"type={short(data['type'])}: must be 'schedule' or 'timeline'")
    tables = (("", data, _FIELDS), (" of the placement", data.get("placement"), _PLACEMENT))
    for where, table, known in tables:
        for name in table if isinstance(table, dict) else ():
            if name not in known:
                raise ScheduleError(f"unknown field {short(name)}{where}: {suggest(name, known)}")


def _positive_integer(data: dict[str, Any], field: str) -> int:
    value = data[field]
    if type(value) is not int or value < 1:
        raise ScheduleError(f"{field} is {value!r}: must be a positive integer")
    return value


def _floats(data: bytes) -> list[float]:
    return list(memoryview(data).cast("d"))


def _timeline_to_data(timeline: Timeline) -> dict[str, Any]:
    memory = timeline.memory
    return {
        **_schedule_to_data(timeline.schedule),
        "type": "timeline",
        "label": timeline.label,
        "measured": timeline.measured,
        "blocking": timeline.blocking,
        "blocking_ends": timeline.blocking_ends,
        "unit": timeline.unit,
        "memory_unit": timeline.memory_unit,
        "memory_limit": timeline.memory_limit,
        "start": _floats(timeline.start),
        "end": _floats(timeline.end),
        "memory": memory and {"during": _floats(memory.during), "after": _floats(memory.after)},
        "sharding": timeline.sharding and _sharding_to_data(timeline.sharding),
        "origin": timeline.origin and asdict(timeline.origin),
        **({} if timeline.offloading is None else {"offloading": _offloading_to_data(timeline.offloading)}),
        **({} if timeline.phases is None else {"phases": timeline.phases._asdict()}),
    }


def _sharding_to_data(sharding: Sharding) -> dict[str, Any]:
    rows = [" ".join(map(str, row)) for row in Rows(sharding.packed)]
    columns = {name: _floats(getattr(sharding, name)) for name in ("start", "end", "size")}
    return {"rows": rows, **columns, "units": sharding.units}


def _offloading_to_data(offloading: Offloading) -> dict[str, Any]:
    rows = [" ".join(map(str, row)) for row in Rows(offloading.packed)]
    return {"rows": rows} | {name: _floats(getattr(offloading, name)) for name in ("start", "end", "size")}


def _parse_timeline(data: dict[str, Any]) -> Timeline:
    schedule = _parse_schedule(data)
    check_actions(schedule)
    memory, limit, size = data["memory"], data["memory_limit"], schedule.num_actions
    timeline = Timeline(
        schedule,
        start=_parse_column(size, data["start"]),
        end=_parse_column(size, data["end"]),
        memory=Memory(_parse_column(size, memory["during"]), _parse_column(size, memory["after"])) if memory else None,
        memory_limit=None if limit is None else _parse_limit(limit),
        unit=str(data["unit"]),
        memory_unit=str(data["memory_unit"]),
        label=str(data["label"]),
        measured=bool(data["measured"]),
        blocking=bool(data.get("blocking")),
        blocking_ends=bool(data.get("blocking_ends")),
        sharding=_parse_sharding(data["sharding"], schedule) if data.get("sharding") else None,
        origin=_parse_origin(data["origin"], schedule.num_stages) if data.get("origin") else None,
        offloading=_parse_offloading(data["offloading"], schedule) if data.get("offloading") else None,
        phases=_parse_phases(data["phases"], schedule.num_stages) if data.get("phases") else None,
    )
    for rank in range(schedule.num_ranks):
        previous = -inf
        for _, action, start, end in timeline.spans(rank):
            if not previous <= start <= end:
                raise ScheduleError(
                    f"rank {rank}: {action} runs from {start} to {end}: the actions of a rank must start in their "
                    "order, and end after they start"
                )
            previous = start
    return timeline


def _parse_limit(value: Any) -> float:
    if not isfinite(float(value)):
        raise ScheduleError(f"memory_limit is {value!r}: must be a finite number, or null")
    return float(value)


def _parse_column(num_actions: int, values: list[float]) -> bytes:
    if len(values) != num_actions:
        raise ScheduleError(f"a column has {len(values)} numbers for {num_actions} actions")
    column = array("d", values)
    if not all(map(isfinite, column)):
        raise ScheduleError("a column has an entry that is not a finite number")
    return column.tobytes()


def _parse_sharding(data: dict[str, Any], schedule: Schedule) -> Sharding:
    events = _parse_events("sharding", data, schedule, (Kind.UNSHARD, Kind.REDUCE_GRAD))
    return Sharding(*events, _positive_integer(data, "units"))


def _parse_offloading(data: dict[str, Any], schedule: Schedule) -> Offloading:
    return Offloading(*_parse_events("offloading", data, schedule, (Kind.OFFLOAD, Kind.RELOAD)))


def _parse_events(
    name: str, data: dict[str, Any], schedule: Schedule, kinds: tuple[Kind, Kind]
) -> tuple[PackedRows, bytes, bytes, bytes]:
    """Rows, starts, ends and sizes of actions that run beside the computations."""
    rows = [[parse_action(text) for text in row.split()] for row in data["rows"]]
    if len(rows) != schedule.num_ranks:
        raise ScheduleError(f"{name} has {len(rows)} rows for {schedule.num_ranks} ranks")
    for rank, row in enumerate(rows):
        for action in row:
            if action.kind not in kinds:
                raise ScheduleError(f"{name} of rank {rank} has {action}: must be {kinds[0].name} or {kinds[1].name}")
            if action.stage not in schedule.placement.stages_of(rank):
                raise ScheduleError(f"{name} of rank {rank} has {action}: the placement puts no such stage there")
    packed = PackedRows.of(pack(row) for row in rows)
    start, end, size = (_parse_column(packed.num_codes, data[column]) for column in ("start", "end", "size"))
    if any(a > b for a, b in zip(memoryview(start).cast("d"), memoryview(end).cast("d"), strict=True)):
        raise ScheduleError(f"{name} has an action that ends before it starts")
    return packed, start, end, size


def _parse_phases(data: dict[str, Any], num_stages: int) -> Phases:
    """The phases of each stage: lists of layers, each with F, I and W of its phases."""
    stages = tuple(
        tuple(LayerPhases(*(PhaseTimes(*times) for times in layer)) for layer in stage) for stage in data["stages"]
    )
    tax, times = data["sm_tax"], [time for stage in stages for layer in stage for phase in layer for time in phase]
    if len(stages) != num_stages or not all(0 <= time < inf for time in times) or not 0 <= tax < 1:
        raise ScheduleError("phases must have F, I and W of four phases for the layers of each stage, and sm_tax")
    return Phases(stages, tax)


def _parse_origin(data: Any, num_stages: int) -> Origin:
    rules: dict[str, Callable[[Any], bool]] = {
        "layers": lambda v: isinstance(v, list) and len(v) == num_stages and all(type(n) is int and n >= 0 for n in v),
        "ac": _is_checkpointing,
        "sequence": lambda v: type(v) is int and v >= 0,
        "dtype": lambda v: isinstance(v, str),
        **{name: lambda v: type(v) is int and v >= 1 for name in ("microbatch_size", "tp")},
        **{name: lambda v: isinstance(v, bool) for name in ("compile", "lora", "sequence_parallel")},
    }
    if isinstance(data, dict):
        data = {"sequence_parallel": False, **data}  # files of 0.1 do not have it
    if not isinstance(data, dict) or data.keys() != rules.keys():
        raise ScheduleError(f"origin is {short(data)}: must be null, or a table with {', '.join(rules)}")
    for name, rule in rules.items():
        if not rule(data[name]):
            raise ScheduleError(f"{name} of origin is {short(data[name])}, which is invalid; use null for origin")
    return Origin(**{**data, "layers": tuple(data["layers"])})


def _is_checkpointing(value: Any) -> bool:
    try:
        return bool(Checkpointing.parse(value))
    except ConfigError:
        return False
