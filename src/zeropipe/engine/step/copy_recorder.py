"""Records the copies of activations to the host and back: when they ran, and their bytes."""

from __future__ import annotations

import time
from array import array
from collections.abc import Callable, Sequence
from itertools import accumulate
from typing import Any, NamedTuple

import torch

from zeropipe.core.action import Action
from zeropipe.core.offload_timeline import Offloading
from zeropipe.core.packed import PackedRows, encode


class CopyEvent(NamedTuple):
    """One OFFLOAD or RELOAD."""

    action: Action
    start: Any  # seconds, or an event of CUDA
    end: Any
    size: int


class CopyColumns(NamedTuple):
    """The recorded copies of a rank, as columns."""

    codes: bytes
    start: bytes
    end: bytes
    size: bytes


class CopyRecorder:
    """Records all copies of one rank, on the stream that they run on."""

    def __init__(self) -> None:
        self.events: list[CopyEvent] = []

    def wrap(self, copy: Callable[[], int], action: Action, stream: torch.cuda.Stream | None) -> Callable[[], int]:
        """A copy whose start and end are recorded; it returns its bytes."""

        def timed() -> int:
            start = _mark(stream)
            size = copy()
            self.events.append(CopyEvent(action, start, _mark(stream), size))
            return size

        return timed

    def columns(self, to_seconds: Callable[[Any], float]) -> CopyColumns:
        """The copies; `to_seconds` converts a start or an end."""
        codes = array("q", (encode(*event.action[:3]) for event in self.events))
        start, end = (array("d", (to_seconds(event[n]) for event in self.events)).tobytes() for n in (1, 2))
        return CopyColumns(codes.tobytes(), start, end, array("d", (event.size for event in self.events)).tobytes())


def _mark(stream: torch.cuda.Stream | None) -> Any:
    if stream is None:
        return time.perf_counter()
    event = torch.cuda.Event(enable_timing=True)
    event.record(stream)
    return event


def build_offloading(ranks: Sequence[CopyColumns], zero: float) -> Offloading | None:
    """The copies of all ranks; None without any. Times count from `zero`."""
    if not any(columns.codes for columns in ranks):
        return None
    sizes = [len(columns.codes) // 8 for columns in ranks]
    packed = PackedRows(b"".join(columns.codes for columns in ranks), tuple(accumulate(sizes, initial=0)))
    start, end = (
        array("d", (time - zero for column in columns for time in memoryview(column).cast("d"))).tobytes()
        for columns in ([columns.start for columns in ranks], [columns.end for columns in ranks])
    )
    return Offloading(packed, start, end, b"".join(columns.size for columns in ranks))
