"""The recorded Timeline: when each action ran and the memory it kept. Only with `record=True`."""

from __future__ import annotations

import time
from array import array
from collections import Counter, defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

from zeropipe.core.action import Action, Kind, Overlap, W
from zeropipe.core.offload_timeline import Offloading
from zeropipe.core.packed import PackedRows, kind_of, microbatch_of, pack, stage_of
from zeropipe.core.schedule import Schedule
from zeropipe.core.shard_timeline import Sharding
from zeropipe.core.timeline import Memory, Timeline
from zeropipe.engine.backward.gradients import to_local
from zeropipe.engine.backward.splitters import Splitter
from zeropipe.engine.comm.communicator import Communicator
from zeropipe.engine.mesh.sharded_stage import ShardedStage
from zeropipe.engine.step.cell_runner import Call, Cell
from zeropipe.engine.step.clock import Clock
from zeropipe.engine.step.copy_recorder import CopyRecorder
from zeropipe.engine.step.event_columns import EventColumns, join_events, pack_events
from zeropipe.engine.step.offload import Copy
from zeropipe.engine.step.phase_recorder import PhaseRecorder, join_phases
from zeropipe.engine.step.shard_recorder import ShardRecorder
from zeropipe.engine.step.watchers import Watcher
from zeropipe.engine.timing import elapsed_seconds, mark_time
from zeropipe.engine.torch_private import autograd as torch_autograd
from zeropipe.engine.torch_private import tensors as torch_tensors

COLUMN_TYPES = "qdddd"  # of RecordedAction, as arrays


class RecordedAction(NamedTuple):
    """One action as it ran, or a part of a W."""

    code: int
    start: float
    end: float
    during: float  # memory
    after: float


class Recorder(Watcher):
    """Times every action of one rank: host clock on CPU, events on CUDA."""

    def __init__(
        self,
        device: torch.device,
        parameters: Sequence[Tensor],
        splitter: Splitter,
        shards: Mapping[int, ShardedStage],
        last_stage: int,
        exchanging: Collection[int],
    ) -> None:
        self._device, self._splitter, self.shards = device, splitter, ShardRecorder(device, shards)
        self._copies, self.phases = CopyRecorder(device), PhaseRecorder(device, last_stage, exchanging)
        self._parameters = parameters
        # start, end, actions, memory during, memory after
        self._marks: list[tuple[Any, Any, Sequence[Action], Any, int]] = []
        self._saved_bytes: dict[tuple[int, int], int] = {}  # bytes saved by F for the backward
        self._pending_bytes: dict[int, int] = {}  # kept from I to W, by stage
        self._origin: tuple[float, Any] = (0.0, None)
        self._allocations = torch_tensors.Allocations(device)
        self._peaks: list[int] | None = None

    def begin(self) -> None:
        """Start recording a step; the previous one is deleted."""
        self.shards.begin()
        self._copies.events.clear()
        self.phases.begin()
        self._marks.clear()
        self._saved_bytes.clear()
        self._pending_bytes.clear()
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
            event = mark_time(self._device)
            self._origin = (time.perf_counter(), event)
            self._allocations.begin()
            self._peaks = None

    def end(self) -> None:
        """Stop recording."""
        self.shards.end()

    def wrap_sharding(self, call: Call, action: Action) -> Call:
        return self.shards.wrap(call, action)

    def wrap_copy(self, copy: Copy, action: Action, stream: torch.cuda.Stream | None) -> Copy:
        key, sign = (action.stage, action.microbatch), -1 if action.kind is Kind.OFFLOAD else 1

        def counted() -> int:
            size = copy()
            if key in self._saved_bytes:  # on the CPU
                self._saved_bytes[key] += sign * size
            return size

        return self._copies.wrap(counted, action, stream)

    def wrap(self, call: Call, actions: Sequence[Action], cells: Sequence[Cell]) -> Call:
        call = self.phases.wrap(call, actions)
        return self._on_cuda(call, actions) if self._device.type == "cuda" else self._on_cpu(call, actions, cells)

    def _on_cpu(self, call: Call, actions: Sequence[Action], cells: Sequence[Cell]) -> Call:
        kept, pending = self._saved_bytes, self._pending_bytes
        split_stage = next((a.stage for a in actions if a.kind in (Kind.I, Kind.W)), None)
        forward = next(((c.stage, c.microbatch) for a, c in zip(actions, cells) if a.kind is Kind.F), None)
        backward = next(((c.stage, c.microbatch) for a, c in zip(actions, cells) if a.kind in (Kind.B, Kind.I)), None)
        shards = self.shards

        def timed() -> None:
            saved: dict[int, int] = {}
            shards.reset_peak()

            def pack(tensor: Tensor) -> Tensor:
                storage = to_local(tensor).untyped_storage()
                if not shards.is_weight(storage):
                    saved[storage.data_ptr()] = storage.nbytes()
                return tensor

            start = time.perf_counter()
            if forward is None:
                call()
            else:
                with saved_tensors_hooks(pack, _identity), torch_autograd.selective_caches() as caches:
                    call()
            end = time.perf_counter()
            if forward is not None:
                for tensor in torch_autograd.cached_tensors(caches):
                    pack(tensor)
                for weight in self._parameters:  # weights are no activations
                    saved.pop(to_local(weight).untyped_storage().data_ptr(), None)
                kept[forward] = sum(saved.values())
            during = sum(kept.values()) + sum(pending.values()) + shards.update_peak()
            if backward is not None:
                kept.pop(backward, None)
            if split_stage is not None:
                pending[split_stage] = self._splitter.pending_bytes(split_stage)
            after = sum(kept.values()) + sum(pending.values()) + shards.count_bytes(after_reshard=True)
            self._marks.append((start, end, actions, during, after))

        return timed

    def _on_cuda(self, call: Call, actions: Sequence[Action]) -> Call:
        def timed() -> None:
            before, _ = self._allocations.mark()
            start = mark_time(self._device)
            call()
            end = mark_time(self._device)
            after, alive = self._allocations.mark()
            self._marks.append((start, end, actions, (before, after), alive))

        return timed

    def rows(self, clock: Clock) -> Iterator[RecordedAction]:
        """The recorded actions in order, on rank 0's clock: the two of an Overlap one after the other."""
        if self._device.type == "cuda" and self._peaks is None:
            self._peaks = self._allocations.end([during for _, _, _, during, _ in self._marks])
        for index, (start, end, actions, during, after) in enumerate(self._marks):
            if self._peaks is not None:
                during = self._peaks[index]
            start_s, end_s = clock.to_rank_0(self._seconds(start)), clock.to_rank_0(self._seconds(end))
            for code in pack(actions if len(actions) == 1 else [Overlap(*actions)]):
                yield RecordedAction(code, start_s, end_s, float(during), float(after))

    def event_columns(self, clock: Clock) -> tuple[EventColumns, EventColumns]:
        """The gathers and reductions, and the copies to the host and back, on rank 0's clock."""
        shards, copies = (
            pack_events(events, lambda mark: clock.to_rank_0(self._seconds(mark)))
            for events in (self.shards.events, self._copies.events)
        )
        return shards, copies

    def _seconds(self, mark: Any) -> float:
        return mark if isinstance(mark, float) else self._origin[0] + elapsed_seconds(self._origin[1], mark)


def gather_timeline(recorder: Recorder, schedule: Schedule, comm: Communicator, clock: Clock) -> Timeline:
    """The Timeline of all ranks on rank 0's clock; every rank calls this and gets it."""
    columns = [array(kind, column).tobytes() for kind, column in zip(COLUMN_TYPES, zip(*recorder.rows(clock)))]
    own = (columns, *recorder.event_columns(clock), recorder.shards.num_units, recorder.phases.measured())
    everyone = comm.exchange(own)
    pipeline = [everyone[rank] for rank in comm.layout.pipeline]
    recorded, shards, copies, num_units, phases = zip(*pipeline)
    rows = [[RecordedAction(*values) for values in zip(*map(_to_array, COLUMN_TYPES, row))] for row in recorded]
    schedule, rows = _fit_schedule(schedule, rows)
    actions = [action for row in rows for action in row]
    zero = min([*(action.start for action in actions), *(t for events in shards for t in _to_array("d", events.start))])
    sharding, offloading = join_events(shards, zero), join_events(copies, zero)
    return Timeline(
        schedule,
        _to_bytes(action.start - zero for action in actions),
        _to_bytes(action.end - zero for action in actions),
        Memory(_to_bytes(action.during for action in actions), _to_bytes(action.after for action in actions)),
        unit="s",
        memory_unit="B",
        measured=True,
        sharding=None if sharding is None else Sharding(*sharding, max(num_units)),
        offloading=None if offloading is None else Offloading(*offloading),
        phases=join_phases(phases, _mean_weights(actions), schedule.num_stages),
    )


def _mean_weights(actions: Iterable[RecordedAction]) -> dict[int, float]:
    """The mean time of all parts of the W of a microbatch, by stage."""
    times, microbatches = defaultdict[int, float](float), defaultdict[int, set[int]](set)
    for action in actions:
        if kind_of(action.code) == W:
            times[stage_of(action.code)] += action.end - action.start
            microbatches[stage_of(action.code)].add(microbatch_of(action.code))
    return {stage: time / len(microbatches[stage]) for stage, time in times.items()}


def _to_bytes(values: Iterable[float]) -> bytes:
    return array("d", values).tobytes()


def _to_array(kind: str, data: bytes) -> array[Any]:
    column = array(kind)
    column.frombytes(data)
    return column


def _identity(tensor: Tensor) -> Tensor:
    return tensor


def _fit_schedule(
    schedule: Schedule, rows: Sequence[Sequence[RecordedAction]]
) -> tuple[Schedule, Sequence[Sequence[RecordedAction]]]:
    """The schedule with these rows: a W may have run in several parts, some of them before its own position.

    Where Ws ran in different numbers of parts, every W gets the largest number: the parts that it did not need take no
    time, right after its last one.
    """
    packed = PackedRows.of([action.code for action in row] for row in rows)
    if packed == schedule.packed:
        return schedule, rows
    rows = [_join_parts(row) for row in rows]
    num_parts = Counter(action.code for row in rows for action in row if kind_of(action.code) == W)
    largest = max(num_parts.values())
    padded = [_pad_parts(row, num_parts, largest) for row in rows]
    problem = replace(schedule.problem, num_weight_parts=largest)
    packed = PackedRows.of([action.code for action in row] for row in padded)
    return replace(schedule, problem=problem, packed=packed, offloading=None), padded


def _join_parts(row: Sequence[RecordedAction]) -> list[RecordedAction]:
    """Join the parts of a W that ran one after the other."""
    joined: list[RecordedAction] = []
    for action in row:
        if joined and kind_of(action.code) == W and joined[-1].code == action.code:
            first = joined.pop()
            during = max(first.during, action.during)
            action = RecordedAction(action.code, first.start, action.end, during, action.after)
        joined.append(action)
    return joined


def _pad_parts(row: Sequence[RecordedAction], num_parts: Counter[int], largest: int) -> list[RecordedAction]:
    remaining, padded = Counter(num_parts), list[RecordedAction]()
    for action in row:
        padded.append(action)
        if kind_of(action.code) == W:
            remaining[action.code] -= 1
            if not remaining[action.code]:
                empty = action._replace(start=action.end, during=action.after)
                padded += [empty] * (largest - num_parts[action.code])
    return padded
