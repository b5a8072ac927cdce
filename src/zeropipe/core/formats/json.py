"""zeropipe's own JSON: versioned, and unlike CSV it carries the placement, the name and (for a Timeline) the times."""

from __future__ import annotations

import json
from array import array
from collections.abc import Callable
from dataclasses import asdict
from math import inf, isfinite
from typing import Any

from zeropipe.core.action import Kind, parse_action, parse_step
from zeropipe.core.complete import check_order
from zeropipe.core.formats.parse import parse_json, require_text
from zeropipe.core.model.checkpointing import Checkpointing
from zeropipe.core.packed import PackedRows, pack
from zeropipe.core.placement import Placement, Problem, recognise, require_actions, require_placement
from zeropipe.core.schedule import Rows, Schedule, require_schedule
from zeropipe.core.shard_timeline import Sharding
from zeropipe.core.timeline import Memory, Origin, Timeline
from zeropipe.errors import ConfigError, ScheduleError, ZeropipeError, short, suggest

VERSION = 1
_SIZES = ("num_ranks", "num_stages", "num_microbatches", "num_weight_parts")
_FIELDS = ("zeropipe", "type", "name", *_SIZES, "placement", "rows")
_PLACEMENT = ("name", "copies", "split")


def to_json(what: Schedule | Timeline) -> str:
    """The schedule or timeline as text; `from_json` gives back an equal value."""
    return json.dumps(plain(what))


def plain(what: Schedule | Timeline) -> dict[str, Any]:
    """The schedule or timeline as plain data, for a JSON document that may hold other fields beside it."""
    if not isinstance(what, Timeline):
        require_schedule(what)
    return _timeline_data(what) if isinstance(what, Timeline) else _schedule_data(what)


def from_json(text: str) -> Schedule | Timeline:
    """The Schedule or Timeline that `to_json` wrote."""
    require_text(text, "json")
    try:
        data = parse_json(text)
    except ValueError as error:
        raise ScheduleError(f"not JSON: {error}") from None
    return from_plain(data)


def from_plain(data: Any) -> Schedule | Timeline:
    """The Schedule or Timeline of what `plain` gave."""
    if isinstance(data, dict) and "traceEvents" in data and "zeropipe" not in data:
        raise ScheduleError("this trace holds several timelines, or is not zeropipe's: one timeline's can be read back")
    if not isinstance(data, dict) or "zeropipe" not in data:
        raise ScheduleError("this JSON is not zeropipe's: it has no field 'zeropipe' with the version")
    if data["zeropipe"] != VERSION:
        raise ScheduleError(f"this file has version {data['zeropipe']!r}, this zeropipe reads version {VERSION}")
    try:
        if data.get("type") == "timeline":  # such files may hold more: a trace its events, a training run its step
            return _timeline(data)
        _require_known(data)
        return _schedule(data)
    except ZeropipeError:
        raise
    except (KeyError, TypeError, ValueError, AttributeError, IndexError, OverflowError) as error:
        what = f"field {error} is missing" if isinstance(error, KeyError) else str(error)
        raise ScheduleError(f"this JSON is damaged: {what}") from None


def _schedule_data(schedule: Schedule) -> dict[str, Any]:
    placement = schedule.placement
    return {
        "zeropipe": VERSION,
        "type": "schedule",
        "name": schedule.name,
        "num_ranks": schedule.num_ranks,
        "num_stages": schedule.num_stages,
        "num_microbatches": schedule.num_microbatches,
        "num_weight_parts": schedule.problem.num_weight_parts,
        "placement": {"name": placement.name, "copies": placement.copies, "split": placement.second_from},
        "rows": [" ".join(map(str, row)) for row in schedule.rows],
    }


def _schedule(data: dict[str, Any]) -> Schedule:
    sizes = {"num_weight_parts": 1, **data}  # files of before it was there have whole W
    problem = Problem(*(_count(sizes, field) for field in _SIZES))
    given = Placement(tuple(map(tuple, data["placement"]["copies"])), data["placement"]["split"])
    require_placement(given, problem)
    rows = data["rows"]
    if len(rows) != problem.num_ranks:
        raise ScheduleError(f"num_ranks is {problem.num_ranks}, but there are {len(rows)} rows")
    packed = PackedRows.of(pack(map(parse_step, row.split())) for row in rows)
    require_actions(problem, packed.num_codes)
    return Schedule(problem, recognise(given.copies, given.second_from, problem), packed, str(data["name"]))


def _require_known(data: dict[str, Any]) -> None:
    """ScheduleError for a field that a schedule does not have: it would be left out without a word."""
    if data.get("type", "schedule") != "schedule":
        raise ScheduleError(f"this JSON has the type {short(data['type'])}: 'schedule' and 'timeline' are known")
    parts = (("", data, _FIELDS), (" of the placement", data.get("placement"), _PLACEMENT))
    for where, table, known in parts:
        for name in table if isinstance(table, dict) else ():
            if name not in known:
                raise ScheduleError(f"unknown field {short(name)}{where}: {suggest(name, known)}")


def _count(data: dict[str, Any], field: str) -> int:
    value = data[field]
    if type(value) is not int or value < 1:
        raise ScheduleError(f"{field} is {value!r}: a whole number from 1 on is needed")
    return value


def _floats(data: bytes) -> list[float]:
    return list(memoryview(data).cast("d"))


def _timeline_data(timeline: Timeline) -> dict[str, Any]:
    memory = timeline.memory
    return {
        **_schedule_data(timeline.schedule),
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
        "sharding": _sharding_data(timeline.sharding),
        "origin": timeline.origin and asdict(timeline.origin),
    }


def _sharding_data(sharding: Sharding | None) -> dict[str, Any] | None:
    if sharding is None:
        return None
    rows = [" ".join(map(str, row)) for row in Rows(sharding.packed)]
    columns = {name: _floats(getattr(sharding, name)) for name in ("start", "end", "size")}
    return {"rows": rows, **columns, "units": sharding.units}


def _sharding(data: dict[str, Any], schedule: Schedule) -> Sharding:
    rows = [[parse_action(text) for text in row.split()] for row in data["rows"]]
    if len(rows) != schedule.num_ranks:
        raise ScheduleError(f"sharding has {len(rows)} rows for {schedule.num_ranks} ranks")
    for rank, row in enumerate(rows):
        for action in row:
            if action.kind not in (Kind.UNSHARD, Kind.REDUCE_GRAD):
                raise ScheduleError(f"sharding of rank {rank} holds {action}: UNSHARD and REDUCE_GRAD are known")
            if action.stage not in schedule.placement.stages_of(rank):
                raise ScheduleError(f"sharding of rank {rank} holds {action}: the placement puts no such stage there")
    packed = PackedRows.of(pack(row) for row in rows)
    start, end, size = (_column(packed.num_codes, data[name]) for name in ("start", "end", "size"))
    if any(a > b for a, b in zip(memoryview(start).cast("d"), memoryview(end).cast("d"), strict=True)):
        raise ScheduleError("sharding holds an action that ends before it starts")
    return Sharding(packed, start, end, size, _count(data, "units"))


def _timeline(data: dict[str, Any]) -> Timeline:
    schedule = _schedule(data)
    check_order(schedule)
    memory, limit, size = data["memory"], data["memory_limit"], schedule.num_actions
    timeline = Timeline(
        schedule,
        _column(size, data["start"]),
        _column(size, data["end"]),
        Memory(_column(size, memory["during"]), _column(size, memory["after"])) if memory else None,
        None if limit is None else _limit(limit),
        str(data["unit"]),
        str(data["memory_unit"]),
        str(data["label"]),
        bool(data["measured"]),
        bool(data.get("blocking")),
        bool(data.get("blocking_ends")),
        _sharding(data["sharding"], schedule) if data.get("sharding") else None,
        _origin(data["origin"], schedule.num_stages) if data.get("origin") else None,
    )
    for rank in range(schedule.num_ranks):
        before = -inf
        for _, action, start, end in timeline.spans(rank):
            if not before <= start <= end:
                raise ScheduleError(
                    f"rank {rank}: {action} runs from {start} to {end}: a rank's actions start one after the other, "
                    "and end after they start"
                )
            before = start
    return timeline


def _limit(value: Any) -> float:
    if not isfinite(float(value)):
        raise ScheduleError(f"memory_limit is {value!r}: a finite number is needed, or null")
    return float(value)


def _column(num_actions: int, values: list[float]) -> bytes:
    if len(values) != num_actions:
        raise ScheduleError(f"a column of {len(values)} numbers for {num_actions} actions")
    column = array("d", values)
    if not all(map(isfinite, column)):
        raise ScheduleError("a column holds something that is not a finite number")
    return column.tobytes()


def _origin(data: Any, num_stages: int) -> Origin:
    """The Origin of plain data; ScheduleError for what is none."""
    rules: dict[str, Callable[[Any], bool]] = {
        "layers": lambda v: isinstance(v, list) and len(v) == num_stages and all(type(n) is int and n >= 0 for n in v),
        "ac": _is_checkpointing,
        "sequence": lambda v: type(v) is int and v >= 0,
        "dtype": lambda v: isinstance(v, str),
        **{name: lambda v: type(v) is int and v >= 1 for name in ("microbatch_size", "tp")},
        **{name: lambda v: isinstance(v, bool) for name in ("compile", "lora")},
    }
    if not isinstance(data, dict) or data.keys() != rules.keys():
        raise ScheduleError(f"origin is {short(data)}: a table with {', '.join(rules)} is needed, or null")
    for name, rule in rules.items():
        if not rule(data[name]):
            raise ScheduleError(f"{name} of origin is {short(data[name])}, which no run had: take origin out")
    return Origin(**{**data, "layers": tuple(data["layers"])})


def _is_checkpointing(value: Any) -> bool:
    try:
        return bool(Checkpointing.parse(value))
    except ConfigError:
        return False
