"""The measured Timeline: when each action ran and what it kept alive. Only built when asked for."""

from __future__ import annotations

import socket
import time
from array import array
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

from zeropipe.core.action import Action, Kind
from zeropipe.core.schedule import Schedule
from zeropipe.core.timeline import Memory, Timeline
from zeropipe.engine.backward.splitters import Splitter
from zeropipe.engine.comm.fabric import Fabric
from zeropipe.engine.step.cells import Cell
from zeropipe.engine.step.executor import Call

PINGS = 16
CLOCK_TAG = 2


class Recorder:
    """Times every action of one rank: host clock on CPU, events on CUDA."""

    def __init__(self, device: torch.device, parameters: Sequence[Tensor], splitter: Splitter) -> None:
        self._device, self._splitter = device, splitter
        self._parameters = {p.untyped_storage().data_ptr() for p in parameters}
        self._marks: list[tuple[Any, Any, int, int, int]] = []
        self._kept: dict[tuple[int, int], int] = {}  # bytes saved by F for the backward
        self._stashed: dict[int, int] = {}  # bytes between I and W, by stage
        self._origin: tuple[float, Any] = (0.0, None)

    def begin(self) -> None:
        """Start recording a step; the one before is forgotten."""
        self._marks.clear()
        self._kept.clear()
        self._stashed.clear()
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
            event = torch.cuda.Event(enable_timing=True)
            event.record()
            self._origin = (time.perf_counter(), event)

    def watch(self, call: Call, actions: Sequence[Action], cells: Sequence[Cell]) -> Call:
        """Wrap the computation of a step."""
        return self._on_cuda(call, len(actions)) if self._device.type == "cuda" else self._on_cpu(call, actions, cells)

    def _on_cpu(self, call: Call, actions: Sequence[Action], cells: Sequence[Cell]) -> Call:
        kept, stashed = self._kept, self._stashed
        splits = next((a.stage for a in actions if a.kind in (Kind.I, Kind.W)), None)
        forward = next(((c.stage, c.microbatch) for a, c in zip(actions, cells) if a.kind is Kind.F), None)
        backward = next(((c.stage, c.microbatch) for a, c in zip(actions, cells) if a.kind in (Kind.B, Kind.I)), None)
        parameters, number = self._parameters, len(actions)

        def timed() -> None:
            saved: dict[int, int] = {}

            def pack(tensor: Tensor) -> Tensor:
                storage = tensor.untyped_storage()
                if storage.data_ptr() not in parameters:
                    saved[storage.data_ptr()] = storage.nbytes()
                return tensor

            start = time.perf_counter()
            if forward is None:
                call()
            else:
                with saved_tensors_hooks(pack, _same):
                    call()
            end = time.perf_counter()
            if forward is not None:
                kept[forward] = sum(saved.values())
            during = sum(kept.values()) + sum(stashed.values())
            if backward is not None:
                kept.pop(backward, None)
            if splits is not None:
                stashed[splits] = self._splitter.alive(splits)
            self._marks.append((start, end, number, during, sum(kept.values()) + sum(stashed.values())))

        return timed

    def _on_cuda(self, call: Call, number: int) -> Call:
        def timed() -> None:
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            torch.cuda.reset_peak_memory_stats(self._device)
            start.record()
            call()
            end.record()
            during = torch.cuda.max_memory_allocated(self._device)
            self._marks.append((start, end, number, during, torch.cuda.memory_allocated(self._device)))

        return timed

    def columns(self) -> tuple[bytes, bytes, bytes, bytes]:
        """Start, end, memory during, memory after: one entry per action, in the order of the row."""
        columns = tuple(array("d") for _ in range(4))
        for start, end, number, during, after in self._marks:
            values = (self._seconds(start), self._seconds(end), float(during), float(after))
            for column, value in zip(columns, values):
                column.extend([value] * number)
        return tuple(column.tobytes() for column in columns)  # type: ignore[return-value]

    def _seconds(self, mark: Any) -> float:
        if isinstance(mark, float):
            return mark
        mark.synchronize()
        return self._origin[0] + self._origin[1].elapsed_time(mark) / 1000


def gather(recorder: Recorder, schedule: Schedule, fabric: Fabric, offset: float) -> Timeline:
    """The Timeline of all ranks on rank 0's clock; every rank calls this and gets it."""
    everyone = fabric.exchange((offset, *recorder.columns()))
    rows = [everyone[rank] for rank in fabric.layout.pipeline]
    start, end, during, after = (array("d") for _ in range(4))
    for shift, *columns in rows:
        first, last, level, left = (memoryview(column).cast("d") for column in columns)
        start.extend(t - shift for t in first)
        end.extend(t - shift for t in last)
        during.extend(level)
        after.extend(left)
    zero = min(start)
    return Timeline(
        schedule,
        array("d", (t - zero for t in start)).tobytes(),
        array("d", (t - zero for t in end)).tobytes(),
        Memory(during.tobytes(), after.tobytes()),
        unit="s",
        memory_unit="B",
        measured=True,
    )


def clock_offset(fabric: Fabric) -> float:
    """How far this rank's clock is ahead of rank 0's. Ranks of one machine share a clock: 0."""
    machines = fabric.exchange(_machine())
    for rank in range(1, fabric.size):
        if machines[rank] != machines[0] and fabric.rank in (0, rank):
            found = _ping(fabric, rank)
            if fabric.rank == rank:
                return found
    return 0.0


def _ping(fabric: Fabric, rank: int) -> float:
    """Rank `rank` asks rank 0 for the time; the fastest answer counts."""
    word, best = torch.zeros(1, dtype=torch.float64), (float("inf"), 0.0)
    for _ in range(PINGS):
        if fabric.rank == 0:
            fabric.receive(word, rank, CLOCK_TAG)
            word.fill_(time.perf_counter())
            fabric.send(word, rank, CLOCK_TAG)
        else:
            asked = time.perf_counter()
            fabric.send(word, 0, CLOCK_TAG)
            fabric.receive(word, 0, CLOCK_TAG)
            answered = time.perf_counter()
            best = min(best, (answered - asked, (asked + answered) / 2 - float(word)))
    return best[1]


def _machine() -> str:
    with suppress(OSError):
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    return socket.gethostname()


def _same(tensor: Tensor) -> Tensor:
    return tensor
