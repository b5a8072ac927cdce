"""Measures sharded stages: when they are gathered and reduced, and what is whole of them."""

from __future__ import annotations

import time
from array import array
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch

from zeropipe.core.action import Action, Kind
from zeropipe.core.packed import PackedRows, encode
from zeropipe.core.shard_timeline import Sharding
from zeropipe.engine import fsdp_private
from zeropipe.engine.mesh.shards import Shards
from zeropipe.engine.step.cells import Call
from zeropipe.engine.torch_private import tensors as torch_tensors


class Piece:
    """One UNSHARD or REDUCE_GRAD: from the start of its first unit to the end of its last."""

    __slots__ = ("action", "end", "size", "start")

    def __init__(self, action: Action, size: int) -> None:
        self.action, self.size = action, size
        self.start: Any = None
        self.end: Any = None


class Gauge:
    """Of all sharded stages of one rank. On CUDA times are events; on CPU a gathering ends when it was waited for."""

    def __init__(self, device: torch.device, shards: Mapping[int, Shards]) -> None:
        self._device, self._shards = device, shards
        self._side = torch.cuda.Stream(device) if device.type == "cuda" and shards else None
        self.pieces: list[Piece] = []
        self.on, self.most = False, 0
        self._stages: dict[int, StageGauge] = {}
        for stage, some in shards.items():
            some.set_up()
            self._stages[stage] = StageGauge(self, stage, some.whole_bytes())
            some.watched_by(self._stages[stage])
        self.units = max((some.num_units for some in shards.values()), default=1)
        units = [unit for stage in shards.values() for unit in stage.units]
        self._weights = {torch_tensors.storage_id(s) for unit in units for s in fsdp_private.whole_storages(unit)}

    @property
    def is_cuda(self) -> bool:
        return self._side is not None

    def begin(self) -> None:
        """A step that is recorded begins; the one before is forgotten."""
        self.pieces.clear()
        self.on = True

    def end(self) -> None:
        """It has ended."""
        self.on = False

    def watch(self, call: Call, action: Action) -> Call:
        """Wrap a call of the Program for a sharded stage."""
        if action.kind is not Kind.UNSHARD:
            return call

        def gather() -> None:
            self._stages[action.stage].open(Kind.UNSHARD)
            call()

        return gather

    def is_weight(self, storage: Any) -> bool:
        """Whether a storage holds whole weights: what it takes is counted here, and not for a microbatch."""
        return torch_tensors.storage_id(storage) in self._weights

    def level(self, left: bool = False) -> int:
        """Bytes of whole weights and gradients now. `left`: what will be left when RESHARD has run after an action."""
        storages = []
        for stage in self._shards.values():
            for unit in stage.units:
                storages += fsdp_private.gradient_storages(unit)
                if not (left and stage.regather):
                    storages += fsdp_private.whole_storages(unit)
        return sum({torch_tensors.storage_id(storage): storage.nbytes() for storage in storages}.values())

    def reset(self) -> None:
        """Forget the highest level."""
        self.most = self.level()

    def see(self) -> int:
        """The highest level since `reset`, this moment included."""
        self.most = max(self.most, self.level())
        return self.most

    def mark(self, wait: Callable[[], object] | None = None, stream: Any = None) -> Any:
        """This moment; on CUDA of a stream, or after what `wait` waits for."""
        if self._side is None:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        with torch.cuda.stream(stream if wait is None else self._side):
            if wait is not None:
                wait()
            event.record()
        return event


class StageGauge:
    """What the units of one stage tell."""

    def __init__(self, gauge: Gauge, stage: int, sizes: tuple[int, int]) -> None:
        self._gauge, self._stage, self._sizes = gauge, stage, sizes
        self._piece: Piece | None = None

    def open(self, kind: Kind) -> Piece:
        """A new piece of the lane."""
        weights, gradients = self._sizes
        self._piece = Piece(Action(self._stage, kind, 0), weights if kind is Kind.UNSHARD else gradients)
        self._gauge.pieces.append(self._piece)
        return self._piece

    def gathering(self) -> None:
        if self._gauge.on and self._piece is not None and self._piece.start is None:
            self._piece.start = self._gauge.mark()

    def begun(self, wait: Callable[[], object]) -> None:
        if self._gauge.on and self._piece is not None and self._gauge.is_cuda:
            self._piece.end = self._gauge.mark(wait)
        elif self._gauge.on:
            self._gauge.see()

    def gathered(self) -> None:
        if self._gauge.on and self._piece is not None and not self._gauge.is_cuda:
            self._piece.end = self._gauge.mark()
            self._gauge.see()

    def reducing(self) -> None:
        if not self._gauge.on:
            return
        if self._piece is None or self._piece.action.kind is not Kind.REDUCE_GRAD:
            self.open(Kind.REDUCE_GRAD).start = self._gauge.mark()
        if not self._gauge.is_cuda:
            self._gauge.see()

    def reduced(self, unit: Any) -> None:
        if not self._gauge.on or self._piece is None:
            return
        if not self._gauge.is_cuda:
            self._piece.end = self._gauge.mark()
            self._gauge.see()
        elif fsdp_private.groups_of(unit):
            self._piece.end = self._gauge.mark(stream=fsdp_private.reduce_stream(unit))


class Lane(NamedTuple):
    """What a rank measured, as columns."""

    codes: bytes
    start: bytes
    end: bytes
    size: bytes
    units: int


def lane_of(gauge: Gauge, seconds: Callable[[Any], float]) -> Lane:
    """The pieces of a rank; `seconds` makes times of what `Gauge.mark` gave."""
    found = [
        (encode(*piece.action), seconds(piece.start), max(seconds(piece.start), seconds(piece.end)), float(piece.size))
        for piece in gauge.pieces
        if piece.start is not None and piece.end is not None
    ]
    codes, start, end, size = (array(kind, [row[n] for row in found]).tobytes() for n, kind in enumerate("qddd"))
    return Lane(codes, start, end, size, gauge.units)


def sharding_of(lanes: Sequence[Lane], zero: float) -> Sharding | None:
    """The lanes of all ranks; None if no stage is sharded. Times count from `zero`."""
    if not any(lane.codes for lane in lanes):
        return None
    packed = PackedRows.of(memoryview(lane.codes).cast("q") for lane in lanes)
    start, end = (
        array("d", (time - zero for column in columns for time in memoryview(column).cast("d"))).tobytes()
        for columns in ([lane.start for lane in lanes], [lane.end for lane in lanes])
    )
    return Sharding(packed, start, end, b"".join(lane.size for lane in lanes), max(lane.units for lane in lanes))


def starts_of(lanes: Sequence[Lane]) -> Iterator[float]:
    """When the pieces of all ranks start."""
    for lane in lanes:
        yield from memoryview(lane.start).cast("d")
