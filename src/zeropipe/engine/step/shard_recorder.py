"""Records sharded stages: when they are gathered and reduced, and the bytes of unsharded weights and gradients."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch

from zeropipe.core.action import Action, Kind
from zeropipe.engine import fsdp_private
from zeropipe.engine.mesh.sharded_stage import ShardedStage
from zeropipe.engine.step.cell_runner import Call
from zeropipe.engine.timing import mark_time
from zeropipe.engine.torch_private import tensors as torch_tensors


class ShardEvent:
    """One UNSHARD or REDUCE_GRAD: from the start of its first unit to the end of its last."""

    __slots__ = ("action", "end", "size", "start")

    def __init__(self, action: Action, size: int) -> None:
        self.action, self.size = action, size
        self.start: Any = None
        self.end: Any = None


class ShardRecorder:
    """Records all sharded stages of one rank. On CUDA times are events; on CPU a gather ends when it was waited for."""

    def __init__(self, device: torch.device, shards: Mapping[int, ShardedStage]) -> None:
        self._device, self._shards = device, shards
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" and shards else None
        self.events: list[ShardEvent] = []
        self.is_recording, self._peak = False, 0
        self._stages: dict[int, StageObserver] = {}
        for stage, sharded in shards.items():
            sharded.initialize()
            self._stages[stage] = StageObserver(self, stage, sharded.unsharded_bytes())
            sharded.set_observer(self._stages[stage])
        self.num_units = max((sharded.num_units for sharded in shards.values()), default=1)
        units = [unit for sharded in shards.values() for unit in sharded.units]
        self._weights = {torch_tensors.storage_id(s) for unit in units for s in fsdp_private.weight_storages(unit)}

    @property
    def is_cuda(self) -> bool:
        return self._stream is not None

    def begin(self) -> None:
        """Start recording a step; the events of the previous one are deleted."""
        self.events.clear()
        self.is_recording = True

    def end(self) -> None:
        """Stop recording."""
        self.is_recording = False

    def wrap(self, call: Call, action: Action) -> Call:
        """Wrap an action of the Program for a sharded stage."""
        if action.kind is not Kind.UNSHARD:
            return call

        def gather() -> None:
            self._stages[action.stage].add_event(Kind.UNSHARD)
            call()

        return gather

    def is_weight(self, storage: Any) -> bool:
        """Whether a storage holds unsharded weights: its bytes are counted here, and not for a microbatch."""
        return torch_tensors.storage_id(storage) in self._weights

    def count_bytes(self, after_reshard: bool = False) -> int:
        """Bytes of unsharded weights and gradients now, or after the RESHARD that follows an action."""
        storages = []
        for stage in self._shards.values():
            for unit in stage.units:
                storages += fsdp_private.gradient_storages(unit)
                if not (after_reshard and stage.regather):
                    storages += fsdp_private.weight_storages(unit)
        return sum({torch_tensors.storage_id(storage): storage.nbytes() for storage in storages}.values())

    def reset_peak(self) -> None:
        """Measure the peak from now on."""
        self._peak = self.count_bytes()

    def update_peak(self) -> int:
        """The largest number of bytes since `reset_peak`, now included."""
        self._peak = max(self._peak, self.count_bytes())
        return self._peak

    def mark_time(self, wait: Callable[[], object] | None = None, stream: Any = None) -> Any:
        """The time now; on CUDA an event on a stream, or after `wait`."""
        if wait is None:
            return mark_time(self._device, stream)
        with torch.cuda.stream(self._stream):
            wait()
            return mark_time(self._device)


class StageObserver:
    """Receives the gathers and reductions of the units of one stage."""

    def __init__(self, recorder: ShardRecorder, stage: int, sizes: tuple[int, int]) -> None:
        self._recorder, self._stage, self._sizes = recorder, stage, sizes
        self._event: ShardEvent | None = None

    def add_event(self, kind: Kind) -> ShardEvent:
        weights, gradients = self._sizes
        self._event = ShardEvent(Action(self._stage, kind, 0), weights if kind is Kind.UNSHARD else gradients)
        self._recorder.events.append(self._event)
        return self._event

    def on_gather_start(self) -> None:
        if self._recorder.is_recording and self._event is not None and self._event.start is None:
            self._event.start = self._recorder.mark_time()

    def on_gather_issued(self, wait: Callable[[], object]) -> None:
        if self._recorder.is_recording and self._event is not None and self._recorder.is_cuda:
            self._event.end = self._recorder.mark_time(wait)
        elif self._recorder.is_recording:
            self._recorder.update_peak()

    def on_gather_end(self) -> None:
        if self._recorder.is_recording and self._event is not None and not self._recorder.is_cuda:
            self._event.end = self._recorder.mark_time()
            self._recorder.update_peak()

    def on_reduce_start(self, is_first: bool) -> None:
        if not self._recorder.is_recording:
            return
        if is_first:
            self.add_event(Kind.REDUCE_GRAD).start = self._recorder.mark_time()
        if not self._recorder.is_cuda:
            self._recorder.update_peak()

    def on_reduce_end(self, unit: Any) -> None:
        if not self._recorder.is_recording or self._event is None:
            return
        if not self._recorder.is_cuda:
            self._event.end = self._recorder.mark_time()
            self._recorder.update_peak()
        elif fsdp_private.groups_of(unit):
            self._event.end = self._recorder.mark_time(stream=fsdp_private.reduce_stream(unit))
