"""What a rank ran beside its computations, recorded: gathers, reductions and copies, as columns."""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple, Protocol

from zeropipe.core.action import Action
from zeropipe.core.packed import PackedRows, encode


class Event(Protocol):
    """An action from start to end, which are None or results of `mark_time`."""

    @property
    def action(self) -> Action: ...
    @property
    def start(self) -> Any: ...
    @property
    def end(self) -> Any: ...
    @property
    def size(self) -> int: ...


class EventColumns(NamedTuple):
    """The events of a rank: codes of actions, seconds, bytes."""

    codes: bytes
    start: bytes
    end: bytes
    size: bytes


def pack_events(events: Iterable[Event], to_seconds: Callable[[Any], float]) -> EventColumns:
    """The events that have ended; `to_seconds` converts starts and ends."""
    rows = []
    for event in events:
        if event.start is not None and event.end is not None:
            start, end = to_seconds(event.start), to_seconds(event.end)
            rows.append((encode(*event.action[:3]), start, max(start, end), float(event.size)))
    return EventColumns(*(array(kind, [row[n] for row in rows]).tobytes() for n, kind in enumerate("qddd")))


def join_events(ranks: Sequence[EventColumns], zero: float) -> tuple[PackedRows, bytes, bytes, bytes] | None:
    """The actions of all ranks, their starts, ends and sizes; None without any. Times count from `zero`."""
    if not any(columns.codes for columns in ranks):
        return None
    packed = PackedRows.of(memoryview(columns.codes).cast("q") for columns in ranks)
    start, end = (
        array("d", (time - zero for column in columns for time in memoryview(column).cast("d"))).tobytes()
        for columns in ([columns.start for columns in ranks], [columns.end for columns in ranks])
    )
    return packed, start, end, b"".join(columns.size for columns in ranks)
