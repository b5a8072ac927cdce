"""Gradients of parameters: `.grad` is read and written here and nowhere else.

An existing gradient is added to in place, so a caller may keep gradients in memory of its own (a flat buffer).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from zeropipe.engine.torch_private import tensors as torch_tensors


def grad_dtype(parameter: Tensor) -> torch.dtype:
    """Dtype of a parameter's gradient: set by `main_gradients`, otherwise the parameter's own."""
    return getattr(parameter, "grad_dtype", None) or parameter.dtype


def main_gradients(module: nn.Module, dtype: torch.dtype | None) -> None:
    """Keep the gradients of all of the module's parameters in `dtype` (None: the dtype of each parameter).

    torch's optimizers require gradients in the parameters' dtype: use MasterWeights for such parameters.
    """
    for parameter in module.parameters():
        if parameter.is_floating_point():
            parameter.grad_dtype = dtype or parameter.dtype


def ensure_grad(parameter: Tensor) -> Tensor:
    """Return the parameter's gradient, which is set to zeros if there is none."""
    if parameter.grad is None:
        parameter.grad = torch.zeros_like(parameter, dtype=grad_dtype(parameter))
    return parameter.grad


def local_grad(parameter: Tensor) -> Tensor | None:
    """This process's shard of the parameter's gradient, or None."""
    return None if parameter.grad is None else to_local(parameter.grad)


def set_local_grad(parameter: Tensor, value: Tensor) -> None:
    """Make `value` this process's shard of the gradient of a parameter that has none."""
    parameter.grad = torch_tensors.sharded_like(parameter, value) if isinstance(parameter, DTensor) else value


def _local_grads(parameters: Iterable[Tensor]) -> list[Tensor]:
    """This process's shards of all gradients that exist."""
    return [to_local(p.grad) for p in parameters if p.grad is not None]


def to_local(tensor: Tensor) -> Tensor:
    """This process's shard of a DTensor; any other tensor as it is."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def scale_grads(parameters: Iterable[Tensor], factor: float) -> None:
    """Multiply gradients in place."""
    if gradients := _local_grads(parameters):
        torch_tensors.multiply(gradients, factor)


def clip_factor(norm: float, max_norm: float) -> float:
    """What gradients with that norm are multiplied with, so that it is at most `max_norm`."""
    return max_norm / (norm + 1e-6) if norm > max_norm else 1.0


def divide_grads(parameters: Iterable[Tensor], divisor: int) -> None:
    """Divide gradients in place; a parameter that is listed twice is divided once."""
    unique = {id(parameter): parameter for parameter in parameters}
    if gradients := _local_grads(unique.values()):
        torch_tensors.divide(gradients, divisor)


def squared_grad_norm(parameters: Iterable[Tensor]) -> float:
    """Sum of the squares of all gradients."""
    gradients = _local_grads(parameters)
    return torch_tensors.squared_norm(gradients) if gradients else 0.0


class FirstGradients:
    """Gives each first gradient of a stage's parameters memory of its own.

    Autograd makes the first gradient of a parameter its `.grad` without a copy, and adds later ones to it in place. A
    view of an output gradient shares memory: with an output gradient that waits for W, with a gradient that is being
    sent to the previous stage, or with another parameter's `.grad`.
    """

    def __init__(self, find_parameters: Callable[[], Iterable[Tensor]]) -> None:
        self._find_parameters = find_parameters
        self._parameters, self._without_grad = list[Tensor](), list[Tensor]()

    def begin(self) -> None:
        """At the start of a step, and after a reduce: record which parameters have no gradient yet."""
        if not self._parameters:  # once: traversing a model takes milliseconds
            self._parameters = list(self._find_parameters())
        self._without_grad = [parameter for parameter in self._parameters if parameter.grad is None]

    def copy_shared(self) -> None:
        """After a backward pass: copy new gradients that share memory."""
        if not self._without_grad:
            return
        without_grad = []
        for parameter in self._without_grad:
            if parameter.grad is None:
                without_grad.append(parameter)
            elif torch_tensors.is_shared(parameter.grad):
                parameter.grad = parameter.grad.clone()
        self._without_grad = without_grad


class GradientStash:
    """Gradients of earlier steps, which a step's sums and scaling must not change."""

    def __init__(self) -> None:
        self._stash: list[tuple[Tensor, Tensor]] = []

    def stash(self, parameters: Iterable[Tensor]) -> None:
        """Remove the gradients until `restore`."""
        for parameter in parameters:
            if parameter.grad is not None:
                self._stash.append((parameter, parameter.grad))
                parameter.grad = None

    def restore(self) -> None:
        """Add the new gradients to the stashed ones, in the memory of these."""
        for parameter, before in self._stash:
            if parameter.grad is not None:
                before.add_(parameter.grad)
            parameter.grad = before
        self._stash.clear()


@contextmanager
def stash_gradients(parameters: Sequence[Tensor]) -> Iterator[GradientStash]:
    """Stash gradients of earlier steps; they are restored also if the step fails."""
    stash = GradientStash()
    stash.stash(parameters)
    try:
        yield stash
    finally:
        stash.restore()
