"""torch's own split backward (`torch.distributed.pipelining`), to compare the weight-gradient store with."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge, get_gradient_edge
from torch.distributed.pipelining._backward import stage_backward_input, stage_backward_weight


class AutogradSplit:
    """I keeps the graph and W traverses it again, with one `autograd.grad` per parameter.

    It runs any layer, but needs more memory and, under activation checkpointing, recomputes a block once per parameter.
    Layers must not be deferred.
    """

    def __init__(self) -> None:
        self._pending: dict[tuple[int, int], Callable[[], None]] = {}

    def backward_input(
        self,
        stage: int,
        microbatch: int,
        module: nn.Module,
        roots: Sequence[Tensor],
        gradients: Sequence[Tensor] | None,
        inputs: Sequence[Tensor],
    ) -> Sequence[Tensor | None]:
        """I: the gradients of the inputs, which are also left on them. A stage without inputs does all in W.

        `roots`: the outputs that need a gradient; or the loss, without `gradients`.
        """
        if not roots or not any(tensor.requires_grad for tensor in inputs):
            self._pending[stage, microbatch] = partial(_backward, roots, gradients)
            return [None] * len(inputs)
        if gradients is None:
            gradients = [torch.ones_like(root) for root in roots]
        edges = [_Root(*get_gradient_edge(root)) for root in roots]
        grads, groups = stage_backward_input(edges, list(gradients), list(inputs), module.parameters())
        # I drops the graph, and a node written in Python is freed with it: W needs those until then.
        graph = edges if _has_python_node(groups) else []
        self._pending[stage, microbatch] = partial(_backward_weight, list(module.parameters()), groups, graph)
        return grads

    def flush(self, stage: int, microbatch: int) -> None:
        """W: add the weight gradients."""
        self._pending.pop((stage, microbatch))()


class _Root(GradientEdge):
    """The gradient edge of an output, with the attributes that torch's I reads of the output.

    torch detaches outputs from their graph afterwards, in place. That fails for a view, and an input that the stage
    returns unchanged would lose its gradient.
    """

    requires_grad = True

    @property
    def grad_fn(self) -> Any:
        return self.node

    def detach_(self) -> None: ...


def _has_python_node(groups: list[dict[str, Any]]) -> bool:
    """Whether torch's W starts at the backward of an `autograd.Function`."""
    return any(isinstance(node, torch._C._FunctionBase) for group in groups for node in group["intermediates"])


def _backward_weight(parameters: list[nn.Parameter], groups: list[dict[str, Any]], graph: list[Any]) -> None:
    stage_backward_weight(parameters, groups)


def _backward(roots: Sequence[Any], gradients: Sequence[Tensor] | None) -> None:
    if roots:
        torch.autograd.backward(roots, gradients)
