"""Two streams for steps whose F and B run together on a GPU."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch

from zeropipe.core.action import Overlap, Step
from zeropipe.engine.stages.contract import StageInfo
from zeropipe.engine.step.cells import Call, Cell
from zeropipe.engine.torch_private import autograd as torch_autograd
from zeropipe.errors import EngineError


class Streams:
    """Puts computations where they run: on the current stream, or on their cell's where a row has Overlaps.

    Backward runs on the stream of its forward, so the two cells of an Overlap belong to different ones. The main stream
    waits for both, but a send follows its own cell's stream: what is done first leaves first.
    """

    def __init__(
        self,
        row: Sequence[Step],
        cells: Mapping[tuple[int, int], Cell],
        stages: Mapping[int, StageInfo],
        device: torch.device,
    ) -> None:
        self._device = device
        self._streams: tuple[torch.cuda.Stream, ...] = ()
        if _colour(row, cells) and device.type == "cuda":
            self._streams = (torch.cuda.Stream(device), torch.cuda.Stream(device))
            torch_autograd.quiet_streams()
            # Gradients are accumulated on the stream their accumulator was made on. Made on one of the two, it would
            # keep a backward on the other waiting for the forward beside it.
            parameters = (p for info in stages.values() for p in info.module.parameters() if p.requires_grad)
            self._accumulators = [torch_autograd.gradient_edge(parameter) for parameter in parameters]

    def placed(self, calls: Sequence[Call], cells: Sequence[Cell]) -> Call:
        """A step's computations, each on its cell's stream: after all that was issued, before all that will be."""
        placed = [self.beside(call, cell) for call, cell in zip(calls, cells)]
        streams = [stream for cell in cells if (stream := self._stream_of(cell)) is not None]

        def in_order() -> None:
            for call in placed:
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
        return in_order if len(placed) > 1 else placed[0]

    def beside(self, call: Call, cell: Cell) -> Call:
        """On its cell's stream, whatever the others do."""
        stream = self._stream_of(cell)
        if stream is None:
            return call

        def run() -> None:
            with torch.cuda.stream(stream):
                call()

        return run

    def _stream_of(self, cell: Cell) -> torch.cuda.Stream | None:
        return self._streams[cell.side] if self._streams and cell.side is not None else None


def _colour(row: Sequence[Step], cells: Mapping[tuple[int, int], Cell]) -> bool:
    """Put the two cells of every Overlap on different streams; whether there is any Overlap.

    A cell meets at most one cell that started before it (as a forward) and one that starts after it (as a backward),
    so walking the row once is enough.
    """
    needed = False
    for step in row:
        if isinstance(step, Overlap):
            forward, backward = (cells[a.stage, a.microbatch] for a in step)
            if forward is backward:
                raise EngineError(f"{step} joins the forward and the backward of one microbatch in one stage")
            backward.side = backward.side or 0
            forward.side = 1 - backward.side
            needed = True
    return needed
