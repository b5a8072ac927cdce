"""Two CUDA streams for Overlaps, whose F and B run at the same time."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch

from zeropipe.core.action import Overlap, Step
from zeropipe.engine.stages.contract import StageInfo
from zeropipe.engine.step.cell_runner import Call, Cell
from zeropipe.engine.torch_private import autograd as torch_autograd
from zeropipe.errors import EngineError


class Streams:
    """Runs computations on the current stream, or on the stream of their cell where a row has Overlaps.

    Backward runs on the stream of its forward, so the two cells of an Overlap belong to different ones. The main stream
    waits for both, but a send waits for its own cell's stream only.
    """

    def __init__(
        self,
        row: Sequence[Step],
        cells: Mapping[tuple[int, int], Cell],
        stages: Mapping[int, StageInfo],
        device: torch.device,
        two: bool = True,
    ) -> None:
        self._device = device
        self._streams: tuple[torch.cuda.Stream, ...] = ()
        if _assign_streams(row, cells) and two and device.type == "cuda":
            self._streams = (torch.cuda.Stream(device), torch.cuda.Stream(device))
            torch_autograd.silence_stream_warning()
            # Gradients are accumulated on the stream that created their accumulator. Created on one of the two, it
            # would make a backward on the other one wait for the forward that runs at the same time.
            parameters = (p for info in stages.values() for p in info.module.parameters() if p.requires_grad)
            self._accumulators = [torch_autograd.gradient_edge(parameter) for parameter in parameters]

    def run_together(self, calls: Sequence[Call], cells: Sequence[Cell]) -> Call:
        """Computations, each on its cell's stream: after all work issued before, before all work issued later."""
        wrapped = [self.run_on_stream(call, cell) for call, cell in zip(calls, cells)]
        streams = [stream for cell in cells if (stream := self._stream_of(cell)) is not None]

        def in_order() -> None:
            for call in wrapped:
                call()

        def forked() -> None:
            main = torch.cuda.current_stream(self._device)
            for stream in streams:
                stream.wait_stream(main)
            in_order()
            for stream in streams:
                main.wait_stream(stream)

        if streams:
            return forked
        return in_order if len(wrapped) > 1 else wrapped[0]

    def run_on_stream(self, call: Call, cell: Cell) -> Call:
        """A call on its cell's stream."""
        stream = self._stream_of(cell)
        if stream is None:
            return call

        def run() -> None:
            with torch.cuda.stream(stream):
                call()

        return run

    def _stream_of(self, cell: Cell) -> torch.cuda.Stream | None:
        return self._streams[cell.stream_index] if self._streams and cell.stream_index is not None else None


def _assign_streams(row: Sequence[Step], cells: Mapping[tuple[int, int], Cell]) -> bool:
    """Put the two cells of every Overlap on different streams; returns whether there is any Overlap.

    A cell overlaps at most one earlier cell (as a forward) and one later cell (as a backward), so one pass over the
    row is enough.
    """
    has_overlap = False
    for step in row:
        if isinstance(step, Overlap):
            forward, backward = (cells[a.stage, a.microbatch] for a in step)
            if forward is backward:
                raise EngineError(f"{step} overlaps the forward and the backward of one microbatch in one stage")
            backward.stream_index = backward.stream_index or 0
            forward.stream_index = 1 - backward.stream_index
            has_overlap = True
    return has_overlap
