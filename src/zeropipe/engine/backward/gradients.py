"""The home of gradients: `.grad` of a parameter is read and written here and nowhere else.

A gradient that exists is added to in place, so a caller may keep gradients in memory of its own (a flat buffer).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from zeropipe.engine.torch_private import tensors as torch_tensors


def grad_dtype(parameter: Tensor) -> torch.dtype:
    """What gradients are kept in: set by main_gradients, the parameter's own otherwise."""
    return getattr(parameter, "grad_dtype", None) or parameter.dtype


def main_gradients(module: nn.Module, dtype: torch.dtype | None) -> None:
    """Keep the gradients of all of the module's parameters in `dtype`, in I and in W (None: the parameters' own).

    torch's optimizers want gradients in the parameters' dtype: give such parameters to MasterWeights.
    """
    for parameter in module.parameters():
        if parameter.is_floating_point():
            parameter.grad_dtype = dtype or parameter.dtype


def gradient(parameter: Tensor) -> Tensor:
    """The parameter's gradient; zeros, which are then its gradient, if it had none."""
    if parameter.grad is None:
        parameter.grad = torch.zeros_like(parameter, dtype=grad_dtype(parameter))
    return parameter.grad


def peek(parameter: Tensor) -> Tensor | None:
    """The parameter's gradient, if it has one; of a spread one, this process's piece of it."""
    return None if parameter.grad is None else local(parameter.grad)


def start(parameter: Tensor, value: Tensor) -> None:
    """`value` is the first gradient of a parameter that has none; of a spread one, this process's piece of it."""
    parameter.grad = torch_tensors.like(parameter, value) if isinstance(parameter, DTensor) else value


def present(parameters: Iterable[Tensor]) -> list[Tensor]:
    """The gradients that are there; of a sharded one this process's piece."""
    return [local(p.grad) for p in parameters if p.grad is not None]


def is_watched(parameter: Tensor | None) -> bool:
    """Whether hooks wait for its gradient: they would run before W."""
    return bool(parameter is not None and (parameter._backward_hooks or parameter._post_accumulate_grad_hooks))


def local(tensor: Tensor) -> Tensor:
    """This process's piece of a tensor: all of it, unless it is sharded."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def scale(parameters: Iterable[Tensor], factor: float) -> None:
    """Multiply gradients in place."""
    if gradients := present(parameters):
        torch_tensors.multiply(gradients, factor)


def divide(parameters: Iterable[Tensor], number: int) -> None:
    """Divide gradients in place, each once."""
    unique = {id(parameter): parameter for parameter in parameters}
    if gradients := present(unique.values()):
        torch_tensors.divide(gradients, number)


def squares(parameters: Iterable[Tensor]) -> float:
    """The sum of all squares."""
    gradients = present(parameters)
    return torch_tensors.squared_norm(gradients) if gradients else 0.0


class FirstGradients:
    """Sees to it that `.grad` of a stage's parameters is memory of their own.

    Autograd makes the first gradient of a parameter its `.grad` without a copy, and adds later ones to it in place. A
    view of an output gradient shares memory: with an output gradient that waits for W, with a gradient on its way to
    the stage before, with another parameter's `.grad`.
    """

    def __init__(self, find: Callable[[], Iterable[Tensor]]) -> None:
        self._find, self._parameters, self._without = find, list[Tensor](), list[Tensor]()

    def begin(self) -> None:
        """Before a step."""
        if not self._parameters:  # found once: to walk through a model takes milliseconds
            self._parameters = list(self._find())
        self._without = [parameter for parameter in self._parameters if parameter.grad is None]

    def own(self) -> None:
        """After a backward pass: copy the new gradients that share memory."""
        if not self._without:
            return
        without = []
        for parameter in self._without:
            if parameter.grad is None:
                without.append(parameter)
            elif torch_tensors.is_shared(parameter.grad):
                parameter.grad = parameter.grad.clone()
        self._without = without


class Aside:
    """Gradients of earlier steps, which a step's sums and scaling must not touch."""

    def __init__(self) -> None:
        self._kept: list[tuple[Tensor, Tensor]] = []

    def put(self, parameters: Iterable[Tensor]) -> None:
        """Take the gradients away for now."""
        for parameter in parameters:
            if parameter.grad is not None:
                self._kept.append((parameter, parameter.grad))
                parameter.grad = None

    def bring_back(self) -> None:
        """Add what came since to the gradients that were there, in their own memory."""
        for parameter, before in self._kept:
            if parameter.grad is not None:
                before.add_(parameter.grad)
            parameter.grad = before
        self._kept.clear()


@contextmanager
def aside(parameters: Sequence[Tensor]) -> Iterator[Aside]:
    """Gradients of earlier steps are put aside inside, and are back afterwards also if the step fails."""
    kept = Aside()
    kept.put(parameters)
    try:
        yield kept
    finally:
        kept.bring_back()
