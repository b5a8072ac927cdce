"""When the exchanges of experts in an action start and end, for the recorder."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch

from zeropipe.engine.timing import mark_time

# beside DISPATCH and COMBINE of turn_times: numbers of rows, and gradients of dispatched rows
COUNTS, RETURN = "counts", "return"


class TimedExchange(NamedTuple):
    """An exchange from its start until its rows are there."""

    name: str
    start: Any
    end: Any


class _Record(NamedTuple):
    device: torch.device
    exchanges: list[TimedExchange]


_record: _Record | None = None  # not thread-local: on CUDA a backward runs on a thread of autograd


@contextmanager
def record_exchanges(device: torch.device) -> Iterator[list[TimedExchange]]:
    """The list that the exchanges inside are added to, in order."""
    global _record
    _record = _Record(device, [])
    try:
        yield _record.exchanges
    finally:
        _record = None


@contextmanager
def timed_exchange(name: str) -> Iterator[None]:
    """The exchange runs inside."""
    if _record is None:
        yield
        return
    record, start = _record, mark_time(_record.device)
    yield
    record.exchanges.append(TimedExchange(name, start, mark_time(record.device)))
