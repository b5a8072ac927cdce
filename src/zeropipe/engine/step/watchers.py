"""Watchers wrap the computation of a step's actions: labels for torch.profiler, the check for NaN."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from json import dumps

import torch
from torch import Tensor
from torch.profiler import record_function

from zeropipe.core.action import Action, Kind, Overlap
from zeropipe.core.formats.torch_trace import PIPELINE
from zeropipe.core.schedule import Schedule
from zeropipe.engine.backward.gradients import local_grad
from zeropipe.engine.step.cell_runner import Call, Cell
from zeropipe.engine.step.offload import Copy
from zeropipe.engine.torch_private.autograd import add_profiler_metadata, is_profiling


class Watcher:
    """Wraps the actions that an executor runs."""

    def wrap(self, call: Call, actions: Sequence[Action], cells: Sequence[Cell]) -> Call:
        """Wrap the computation of one action, or of the two of an Overlap."""
        return call

    def wrap_sharding(self, call: Call, action: Action) -> Call:
        """Wrap an UNSHARD, RESHARD or REDUCE_GRAD."""
        return call

    def wrap_copy(self, copy: Copy, action: Action, stream: torch.cuda.Stream | None) -> Copy:
        """Wrap the copies of an OFFLOAD or RELOAD, which run on a stream, or on the CPU at once."""
        return copy


class ProfilerLabels(Watcher):
    """Labels each computation with its action while torch.profiler runs, as `zeropipe trace compare` reads it.

    The trace of a rank also gets the number of stages: without the other ranks' traces it would look complete.
    """

    def __init__(self, schedule: Schedule) -> None:
        self._metadata: str | None = dumps({"schedule": schedule.name, "num_stages": schedule.num_stages})

    def wrap(self, call: Call, actions: Sequence[Action], cells: Sequence[Cell]) -> Call:
        label = str(actions[0] if len(actions) == 1 else Overlap(*actions))
        metadata, self._metadata = self._metadata, None  # with the first action of the row

        def labelled() -> None:
            if not is_profiling():
                call()
                return
            if metadata is not None:
                add_profiler_metadata(PIPELINE, metadata)
            with record_function(label):
                call()

        return labelled


class FiniteCheck(Watcher):
    """Raises at the first action that computes a NaN or an infinity. It waits for the device after every action."""

    def wrap(self, call: Call, actions: Sequence[Action], cells: Sequence[Cell]) -> Call:
        def checked() -> None:
            call()
            for action, cell in zip(actions, cells):
                for name, tensor in _results(action, cell):
                    if tensor.is_floating_point() and not bool(tensor.isfinite().all()):
                        raise FloatingPointError(f"{action} computed {name} that is not finite")

        return checked


def _results(action: Action, cell: Cell) -> Iterator[tuple[str, Tensor]]:
    """The tensors that an action has computed, with their names."""
    if action.kind is Kind.F:
        if cell.loss is not None:
            yield "a loss", cell.loss
        for tensor in cell.output or (cell.next.inputs if cell.next is not None else ()):
            yield "an output", tensor
        return
    if action.kind is not Kind.W:
        previous = cell.previous.output_gradients if cell.previous is not None else ()
        for tensor in cell.input_gradients or previous:
            if tensor is not None:
                yield "an input's gradient", tensor
    for name, parameter in cell.module.named_parameters():
        if (gradient := local_grad(parameter)) is not None:
            yield f"a gradient of {name}", gradient
