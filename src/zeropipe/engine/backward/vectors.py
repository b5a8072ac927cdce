"""Gradients of vectors (norms, biases), added to `.grad` together after each backward pass.

Autograd casts and adds each of them by itself: two kernels for the 2,048 numbers of a norm, in every microbatch.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from zeropipe.engine.backward.gradients import grad_dtype
from zeropipe.engine.torch_private import tensors as torch_tensors
from zeropipe.engine.torch_private.autograd import has_grad_hooks


class VectorGradients:
    """Adds the gradients of a stage's vectors in a few kernels for each dtype.

    `keeps_dtype`: autograd casts them, which FSDP expects where it looks at gradients during a backward pass.
    """

    def __init__(self, find_parameters: Callable[[], Iterable[Tensor]], *, keeps_dtype: bool = False) -> None:
        self._find_parameters, self._keeps_dtype = find_parameters, keeps_dtype
        self._vectors: list[Tensor] | None = None

    @contextmanager
    def collect(self) -> Iterator[None]:
        """Around a backward pass, which does not see earlier gradients; if it fails, these stay as they are."""
        vectors = self._find_vectors()
        before = [(vector.grad, vector.grad_dtype) for vector in vectors]
        for vector in vectors:
            vector.grad = None
            if not self._keeps_dtype:
                vector.grad_dtype = vector.dtype
        try:
            yield
        finally:
            found = [vector.grad for vector in vectors]
            for vector, (gradient, dtype) in zip(vectors, before):
                vector.grad = None
                vector.grad_dtype = dtype
                vector.grad = gradient
        add_gradients([(vector, gradient) for vector, gradient in zip(vectors, found) if gradient is not None])

    def _find_vectors(self) -> list[Tensor]:
        """Those that are trained and have no hooks on their gradients."""
        if self._vectors is None:  # once: traversing a model takes milliseconds
            found = [p for p in self._find_parameters() if p.dim() <= 1 and not isinstance(p, DTensor)]
            self._vectors = list({id(vector): vector for vector in found}.values())
        return [vector for vector in self._vectors if vector.requires_grad and not has_grad_hooks(vector)]


@torch.no_grad()
def add_gradients(pairs: Sequence[tuple[Tensor, Tensor]]) -> None:
    """Add a gradient to the `.grad` of each parameter; the first one of a parameter becomes its `.grad`."""
    added = [(parameter.grad, gradient) for parameter, gradient in pairs if parameter.grad is not None]
    first = [(parameter, gradient) for parameter, gradient in pairs if parameter.grad is None]
    cast = [(parameter, gradient) for parameter, gradient in first if gradient.dtype != grad_dtype(parameter)]
    torch_tensors.add(added)
    for parameter, gradient in first:
        if gradient.dtype == grad_dtype(parameter):
            parameter.grad = gradient
        else:
            parameter.grad = torch.empty_like(gradient, dtype=grad_dtype(parameter))
    torch_tensors.copy([(parameter.grad, gradient) for parameter, gradient in cast])
