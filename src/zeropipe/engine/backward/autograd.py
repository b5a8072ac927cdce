"""torch's own way to split a backward, to compare with the weight-gradient store."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from zeropipe.engine.torch_private import autograd as torch_autograd
from zeropipe.errors import EngineError


class AutogradSplit:
    """I keeps the graph alive and W walks it again, one `autograd.grad` per parameter.

    Works for any layer, but needs more memory and, under activation checkpointing, recomputes a block once per
    parameter. Layers must not be deferred.
    """

    def __init__(self) -> None:
        self._waiting: dict[tuple[int, int], Callable[[], None]] = {}

    def backward_input(
        self,
        stage: int,
        microbatch: int,
        module: nn.Module,
        roots: Sequence[Any],
        gradients: Sequence[Tensor] | None,
        inputs: Sequence[Tensor],
    ) -> Sequence[Tensor | None]:
        """I: the gradients of the inputs, which are also left on them. A stage without inputs does all in W.

        `roots`: the outputs that need a gradient, or their gradient edges; or the loss, without `gradients`.
        """
        if not roots or not any(tensor.requires_grad for tensor in inputs):
            self._waiting[stage, microbatch] = partial(_backward, roots, gradients)
            return [None] * len(inputs)
        _require_no_late_hooks(module)
        if gradients is None:
            gradients = [torch.ones_like(root) for root in roots]
        graph = [torch_autograd.gradient_edge(root) if isinstance(root, Tensor) else root for root in roots]
        grads, groups = torch_autograd.stage_backward_input(graph, gradients, list(inputs), module.parameters())
        if lost := torch_autograd.passed_over(graph, groups, inputs):
            raise EngineError(
                f"split='autograd' gives no gradient to a leaf of shape {list(lost[0].shape)}, whose way to the outputs"
                " meets that of no input: use split='store'"
            )
        # What W begins with has to live until then: I lets go of the graph, and a node written in Python dies with it.
        alive = graph if torch_autograd.begins_in_python(groups) else []
        self._waiting[stage, microbatch] = partial(_weights, list(module.parameters()), groups, alive)
        return grads

    def flush(self, stage: int, microbatch: int) -> None:
        """W: add the weight gradients."""
        if (stage, microbatch) not in self._waiting:
            raise EngineError(f"{stage}W{microbatch}: no such I ran, or this W ran already")
        self._waiting.pop((stage, microbatch))()

    def clear(self) -> None:
        """Forget everything, after a step that failed."""
        self._waiting.clear()


def _require_no_late_hooks(module: nn.Module) -> None:
    """EngineError for hooks that torch's W would pass over: it adds gradients itself."""
    for name, parameter in module.named_parameters():
        if parameter._post_accumulate_grad_hooks:
            raise EngineError(
                f"{name} has a hook that waits until its gradient was added (register_post_accumulate_grad_hook), which"
                " split='autograd' never calls: use split='store'"
            )


def _weights(parameters: list[nn.Parameter], groups: list[dict[str, Any]], alive: list[Any]) -> None:
    torch_autograd.stage_backward_weight(parameters, groups)


def _backward(roots: Sequence[Any], gradients: Sequence[Tensor] | None) -> None:
    if roots:
        torch_autograd.backward(roots, gradients)
