"""The measured Timeline: when each action ran and what it kept alive. Only built when asked for."""

from __future__ import annotations

import time
from array import array
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

from zeropipe.core.action import Action, Kind
from zeropipe.core.schedule import Schedule
from zeropipe.core.timeline import Memory, Timeline
from zeropipe.engine import torch_private
from zeropipe.engine.backward.splitters import Splitter
from zeropipe.engine.comm.fabric import Fabric
from zeropipe.engine.step.cells import Cell
from zeropipe.engine.step.clock import Clock
from zeropipe.engine.step.executor import Call


class Recorder:
    """Times every action of one rank: host clock on CPU, events on CUDA."""

    def __init__(self, device: torch.device, parameters: Sequence[Tensor], splitter: Splitter) -> None:
        self._device, self._splitter = device, splitter
        self._parameters = {p.untyped_storage().data_ptr() for p in parameters}
        self._marks: list[tuple[Any, Any, int, Any, int]] = []  # start, end, actions, memory during, memory after
        self._kept: dict[tuple[int, int], int] = {}  # bytes saved by F for the backward
        self._stashed: dict[int, int] = {}  # bytes between I and W, by stage
        self._origin: tuple[float, Any] = (0.0, None)
        self._allocations = torch_private.Allocations(device)
        self._peaks: list[int] | None = None

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
            self._allocations.begin()
            self._peaks = None

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
            before, _ = self._allocations.mark()
            start.record()
            call()
            end.record()
            after, alive = self._allocations.mark()
            self._marks.append((start, end, number, (before, after), alive))

        return timed

    def rows(self, clock: Clock) -> Iterator[tuple[float, float, float, float]]:
        """Start, end, memory during, memory after, on rank 0's clock: one per action, in the order of the row."""
        if self._device.type == "cuda" and self._peaks is None:
            self._peaks = self._allocations.end([during for _, _, _, during, _ in self._marks])
        for index, (start, end, number, during, after) in enumerate(self._marks):
            if self._peaks is not None:
                during = self._peaks[index]
            begun, ended = clock.of_rank_0(self._seconds(start)), clock.of_rank_0(self._seconds(end))
            yield from [(begun, ended, float(during), float(after))] * number

    def _seconds(self, mark: Any) -> float:
        if isinstance(mark, float):
            return mark
        mark.synchronize()
        return self._origin[0] + self._origin[1].elapsed_time(mark) / 1000


def gather(recorder: Recorder, schedule: Schedule, fabric: Fabric, clock: Clock) -> Timeline:
    """The Timeline of all ranks on rank 0's clock; every rank calls this and gets it."""
    columns = [array("d", column) for column in zip(*recorder.rows(clock))]
    everyone = fabric.exchange([column.tobytes() for column in columns])
    start, end, during, after = (array("d") for _ in range(4))
    for rank in fabric.layout.pipeline:
        for whole, piece in zip((start, end, during, after), everyone[rank]):
            whole.frombytes(piece)
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


def _same(tensor: Tensor) -> Tensor:
    return tensor
