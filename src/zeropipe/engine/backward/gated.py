"""torchtitan's experts, three stacks of weights each, whose weight gradients wait for W."""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from zeropipe.engine.backward.stacks import deferring, product, take_over

GATE, DOWN, UP = range(3)
COMPUTE = torch.bfloat16  # torchtitan's choice, whatever its mixed precision is
_NAMES = ("w1_EFD", "w2_EDF", "w3_EFD")
_STEPS = {"bfloat16", "silu", "type_as"}  # what its forward calls; another torchtitan may compute in another way


def defer_gated(module: nn.Module) -> None:
    """Let torchtitan's GroupedExperts leave their weight gradients to W. Subclasses compute in ways of their own."""
    for child in module.modules():
        if _is_gated(child):
            take_over(child, _deferred(type(child)))


def _is_gated(module: nn.Module) -> bool:
    """Whether it is such a module and not deferred yet; known by its name, so that torchtitan need not be imported."""
    kind = type(module)
    if (kind.__module__, kind.__name__) != ("torchtitan.models.common.moe", "GroupedExperts"):
        return False
    code = getattr(kind.forward, "__code__", None)
    if code is None or not _STEPS.issubset(code.co_names):
        return False
    is_deferred = getattr(module, "defers_experts", False)
    return not is_deferred and "forward" not in vars(module) and module._parameters.keys() == set(_NAMES)


@functools.cache
def _deferred(kind: type[nn.Module]) -> type[nn.Module]:
    """A subclass that defers the three products."""

    def forward(self: Any, x: Tensor, counts: Tensor) -> Tensor:
        if self.is_watched or (torch.is_grad_enabled() and not x.requires_grad):
            return kind.forward(self, x, counts)
        offsets = counts.cumsum(0, dtype=torch.int32)
        # one cast for each product, as torchtitan has it: the two gradients of x are added in its own dtype
        hidden = functional.silu(product(self, GATE, x.to(COMPUTE), offsets))
        hidden = hidden * product(self, UP, x.to(COMPUTE), offsets)
        return product(self, DOWN, hidden, offsets).type_as(x)

    return deferring(kind, _NAMES, forward, is_transposed=False)
