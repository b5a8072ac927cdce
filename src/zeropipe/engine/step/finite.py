"""Finds the action that made the first NaN or infinity."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from torch import Tensor

from zeropipe.core.action import Action, Kind
from zeropipe.engine.backward.gradients import local_grad
from zeropipe.engine.step.cells import Call, Cell


class FiniteCheck:
    """Looks at what every action made; it waits for the device each time, so it is for finding bugs."""

    def watch(self, call: Call, actions: Sequence[Action], cells: Sequence[Cell]) -> Call:
        """Wrap the computation of a step."""

        def checked() -> None:
            call()
            for action, cell in zip(actions, cells):
                for name, tensor in _made(action, cell):
                    if tensor.is_floating_point() and not bool(tensor.isfinite().all()):
                        raise FloatingPointError(f"{action} made {name} that is not finite")

        return checked


def _made(action: Action, cell: Cell) -> Iterator[tuple[str, Tensor]]:
    if action.kind is Kind.F:
        if cell.root is not None:
            yield "a loss", cell.root
        for tensor in cell.output or (cell.after.inputs if cell.after is not None else ()):
            yield "an output", tensor
        return
    if action.kind is not Kind.W:
        for tensor in cell.returned or (cell.before.gradients if cell.before is not None else ()):
            if tensor is not None:
                yield "an input's gradient", tensor
    for name, parameter in cell.module.named_parameters():
        if (gradient := local_grad(parameter)) is not None:
            yield f"a gradient of {name}", gradient
