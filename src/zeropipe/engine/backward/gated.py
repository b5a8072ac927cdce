"""Experts of torchtitan and of AReaL's Archon, three stacks of weights each, whose weight gradients wait for W."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from zeropipe.engine.backward.stacks import deferring, product, take_over

GATE, DOWN, UP = range(3)
COMPUTE = torch.bfloat16  # what both round to, whatever their mixed precision is


def _cast_for_each(module: Any, x: Tensor) -> tuple[Tensor, Tensor]:
    """torchtitan's: the two gradients of x are added in its own dtype."""
    return x.to(COMPUTE), x.to(COMPUTE)


def _cast_for_both(module: Any, x: Tensor) -> tuple[Tensor, Tensor]:
    """Archon's: one cast, and none where it computes one expert after the other."""
    x = x.to(COMPUTE) if module.use_grouped_mm else x
    return x, x


@dataclass(frozen=True)
class _Known:
    """A class of experts: its stacks, what its functions call, and what its gate and its up projection get."""

    names: tuple[str, str, str]
    steps: dict[str, set[str]]  # another version may compute in another way
    inputs: Callable[[Any, Tensor], tuple[Tensor, Tensor]]


# by module and name, so that neither need be imported
_KNOWN = {
    ("torchtitan.models.common.moe", "GroupedExperts"): _Known(
        names=("w1_EFD", "w2_EDF", "w3_EFD"),
        steps={"forward": {"bfloat16", "silu", "type_as"}},
        inputs=_cast_for_each,
    ),
    ("areal.experimental.models.archon.moe.grouped_experts", "GroupedExperts"): _Known(
        names=("w1", "w2", "w3"),
        steps={
            "forward": {"use_grouped_mm", "_run_experts_for_loop", "_run_experts_grouped_mm"},
            "_run_experts_for_loop": {"matmul", "silu"},
            "_run_experts_grouped_mm": {"bfloat16", "_grouped_mm", "silu", "type_as"},
        },
        inputs=_cast_for_both,
    ),
}


def defer_gated(module: nn.Module) -> None:
    """Let such experts leave their weight gradients to W. Subclasses compute in ways of their own."""
    for child in module.modules():
        if _is_known(child):
            take_over(child, _deferred(type(child)))


def _is_known(module: nn.Module) -> bool:
    """Whether it is such a module that is not deferred yet and computes in the way that is known."""
    kind = type(module)
    known = _KNOWN.get((kind.__module__, kind.__name__))
    if known is None or getattr(module, "defers_experts", False) or "forward" in vars(module):
        return False
    if module._parameters.keys() != set(known.names):
        return False
    return all(calls <= _calls(_function(kind, name)) for name, calls in known.steps.items())


def _function(kind: type[nn.Module], name: str) -> Any:
    """A function of the class, or one that its forward finds in its module."""
    return getattr(kind, name, None) or getattr(kind.forward, "__globals__", {}).get(name)


def _calls(function: Any) -> set[str]:
    """The names in a function's code, also if torch.compile, or a function that calls it, has taken its place."""
    names: set[str] = set()
    for cell in (function, *_closure(function)):
        code = getattr(inspect.unwrap(cell), "__code__", None) if callable(cell) else None
        names.update(code.co_names if code else ())
    return names


def _closure(function: Any) -> list[Any]:
    """What a function keeps of where it was made."""
    return list(inspect.getclosurevars(function).nonlocals.values()) if inspect.isfunction(function) else []


@functools.cache
def _deferred(kind: type[nn.Module]) -> type[nn.Module]:
    """A subclass that defers the three products."""
    known = _KNOWN[kind.__module__, kind.__name__]

    def forward(self: Any, x: Tensor, counts: Tensor) -> Tensor:
        if self.is_watched or (torch.is_grad_enabled() and not x.requires_grad):
            return kind.forward(self, x, counts)
        offsets = counts.cumsum(0, dtype=torch.int32)
        gate, up = known.inputs(self, x)
        hidden = functional.silu(product(self, GATE, gate, offsets)) * product(self, UP, up, offsets)
        return product(self, DOWN, hidden, offsets).type_as(x)

    return deferring(kind, known.names, forward, is_transposed=False)
