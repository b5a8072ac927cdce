"""The measured Timeline: when each action ran and what it kept alive. Only built when asked for."""

from __future__ import annotations

import time
from array import array
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

from zeropipe.core.action import Action, Kind, Overlap
from zeropipe.core.packed import pack
from zeropipe.core.schedule import Schedule
from zeropipe.core.timeline import Memory, Timeline
from zeropipe.engine.backward.gradients import to_local
from zeropipe.engine.backward.splitters import Splitter
from zeropipe.engine.comm.communicator import Communicator
from zeropipe.engine.mesh.shards import Shards
from zeropipe.engine.step.cells import Call, Cell
from zeropipe.engine.step.clock import Clock
from zeropipe.engine.step.gauge import Gauge, Lane, lane_of, sharding_of, starts_of
from zeropipe.engine.step.ran import KINDS, Ran, as_ran
from zeropipe.engine.torch_private import autograd as torch_autograd
from zeropipe.engine.torch_private import tensors as torch_tensors


class Recorder:
    """Times every action of one rank: host clock on CPU, events on CUDA."""

    def __init__(
        self, device: torch.device, parameters: Sequence[Tensor], splitter: Splitter, shards: Mapping[int, Shards]
    ) -> None:
        self._device, self._splitter, self.gauge = device, splitter, Gauge(device, shards)
        self._parameters = parameters
        # start, end, actions, memory during, memory after
        self._marks: list[tuple[Any, Any, Sequence[Action], Any, int]] = []
        self._kept: dict[tuple[int, int], int] = {}  # bytes saved by F for the backward
        self._stashed: dict[int, int] = {}  # bytes between I and W, by stage
        self._origin: tuple[float, Any] = (0.0, None)
        self._allocations = torch_tensors.Allocations(device)
        self._peaks: list[int] | None = None

    def begin(self) -> None:
        """Start recording a step; the one before is forgotten."""
        self.gauge.begin()
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

    def end(self) -> None:
        """The step has ended."""
        self.gauge.end()

    def watch(self, call: Call, actions: Sequence[Action], cells: Sequence[Cell]) -> Call:
        """Wrap the computation of a step."""
        return self._on_cuda(call, actions) if self._device.type == "cuda" else self._on_cpu(call, actions, cells)

    def _on_cpu(self, call: Call, actions: Sequence[Action], cells: Sequence[Cell]) -> Call:
        kept, stashed = self._kept, self._stashed
        splits = next((a.stage for a in actions if a.kind in (Kind.I, Kind.W)), None)
        forward = next(((c.stage, c.microbatch) for a, c in zip(actions, cells) if a.kind is Kind.F), None)
        backward = next(((c.stage, c.microbatch) for a, c in zip(actions, cells) if a.kind in (Kind.B, Kind.I)), None)
        gauge = self.gauge

        def timed() -> None:
            saved: dict[int, int] = {}
            gauge.reset()

            def pack(tensor: Tensor) -> Tensor:
                storage = to_local(tensor).untyped_storage()
                if not gauge.is_weight(storage):
                    saved[storage.data_ptr()] = storage.nbytes()
                return tensor

            start = time.perf_counter()
            if forward is None:
                call()
            else:
                with saved_tensors_hooks(pack, _same), torch_autograd.selective_caches() as caches:
                    call()
            end = time.perf_counter()
            if forward is not None:
                for tensor in torch_autograd.cached_tensors(caches):
                    pack(tensor)
                for weight in self._parameters:  # weights are no activations
                    saved.pop(to_local(weight).untyped_storage().data_ptr(), None)
                kept[forward] = sum(saved.values())
            during = sum(kept.values()) + sum(stashed.values()) + gauge.see()
            if backward is not None:
                kept.pop(backward, None)
            if splits is not None:
                stashed[splits] = self._splitter.pending_bytes(splits)
            after = sum(kept.values()) + sum(stashed.values()) + gauge.level(left=True)
            self._marks.append((start, end, actions, during, after))

        return timed

    def _on_cuda(self, call: Call, actions: Sequence[Action]) -> Call:
        def timed() -> None:
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            before, _ = self._allocations.mark()
            start.record()
            call()
            end.record()
            after, alive = self._allocations.mark()
            self._marks.append((start, end, actions, (before, after), alive))

        return timed

    def rows(self, clock: Clock) -> Iterator[Ran]:
        """What ran, in its order, on rank 0's clock: the two actions of an Overlap one after the other."""
        if self._device.type == "cuda" and self._peaks is None:
            self._peaks = self._allocations.end([during for _, _, _, during, _ in self._marks])
        for index, (start, end, actions, during, after) in enumerate(self._marks):
            if self._peaks is not None:
                during = self._peaks[index]
            begun, ended = clock.of_rank_0(self._seconds(start)), clock.of_rank_0(self._seconds(end))
            for code in pack(actions if len(actions) == 1 else [Overlap(*actions)]):
                yield Ran(code, begun, ended, float(during), float(after))

    def lane(self, clock: Clock) -> Lane:
        """What was gathered and reduced, on rank 0's clock."""
        return lane_of(self.gauge, lambda mark: clock.of_rank_0(self._seconds(mark)))

    def _seconds(self, mark: Any) -> float:
        if isinstance(mark, float):
            return mark
        mark.synchronize()
        return self._origin[0] + self._origin[1].elapsed_time(mark) / 1000


def gather(recorder: Recorder, schedule: Schedule, comm: Communicator, clock: Clock) -> Timeline:
    """The Timeline of all ranks on rank 0's clock; every rank calls this and gets it."""
    mine = [array(kind, column) for kind, column in zip(KINDS, zip(*recorder.rows(clock)))]
    everyone = comm.exchange(([column.tobytes() for column in mine], recorder.lane(clock)))
    told = [everyone[rank] for rank in comm.layout.pipeline]
    rows = [[Ran(*values) for values in zip(*map(_column, KINDS, row))] for row, _ in told]
    schedule, rows = as_ran(schedule, rows)
    ran = [entry for row in rows for entry in row]
    lanes = [lane for _, lane in told]
    zero = min([*(entry.start for entry in ran), *starts_of(lanes)])
    return Timeline(
        schedule,
        array("d", (entry.start - zero for entry in ran)).tobytes(),
        array("d", (entry.end - zero for entry in ran)).tobytes(),
        Memory(
            array("d", (entry.during for entry in ran)).tobytes(), array("d", (entry.after for entry in ran)).tobytes()
        ),
        unit="s",
        memory_unit="B",
        measured=True,
        sharding=sharding_of(lanes, zero),
    )


def _column(kind: str, data: bytes) -> array[Any]:
    column = array(kind)
    column.frombytes(data)
    return column


def _same(tensor: Tensor) -> Tensor:
    return tensor
