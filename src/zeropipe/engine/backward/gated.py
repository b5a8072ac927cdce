"""Gated experts of other frameworks, three stacks of weights each, whose weight gradients wait for W.

`zeropipe.integrations` registers the classes: nothing here depends on a framework.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from zeropipe.engine.backward.stacks import convert, create_deferred_class, expert_linear

GATE, DOWN, UP = range(3)


@dataclass(frozen=True)
class GatedExperts:
    """A class of experts that computes down(silu(gate(x)) * up(x)), called with the rows and their number per expert.

    `names`: its weight stacks: gate, down, up. `calls`: for each of its functions, names in their code; a version
    without them may compute something else and is not deferred. `cast_inputs`: maps the module and x to the inputs of
    gate and up.
    """

    names: tuple[str, str, str]
    calls: dict[str, set[str]]
    cast_inputs: Callable[[Any, Tensor], tuple[Tensor, Tensor]]


_registered: dict[tuple[str, str], GatedExperts] = {}


def register_gated_experts(module_name: str, class_name: str, experts: GatedExperts) -> None:
    """Let `defer` convert the instances of a class, which is named so that it need not be imported."""
    _registered[module_name, class_name] = experts


def defer_gated(module: nn.Module) -> None:
    """Let registered experts leave their weight gradients to W; subclasses are not converted."""
    if not _registered:
        return
    for child in module.modules():
        if _can_defer(child):
            convert(child, _deferred_class(type(child)))


def _can_defer(module: nn.Module) -> bool:
    """Whether the module's class is registered, its code is the known one, and it is not deferred yet."""
    kind = type(module)
    experts = _registered.get((kind.__module__, kind.__name__))
    if experts is None or getattr(module, "defers_experts", False) or "forward" in vars(module):
        return False
    if module._parameters.keys() != set(experts.names):
        return False
    return all(calls <= _names_in(_find_function(kind, name)) for name, calls in experts.calls.items())


def _find_function(kind: type[nn.Module], name: str) -> Any:
    """A method of the class, or a function in the module of its forward."""
    return getattr(kind, name, None) or getattr(kind.forward, "__globals__", {}).get(name)


def _names_in(function: Any) -> set[str]:
    """The names in a function's code; of a wrapper (such as torch.compile's), also those of the wrapped function."""
    names: set[str] = set()
    for cell in (function, *_closure(function)):
        code = getattr(inspect.unwrap(cell), "__code__", None) if callable(cell) else None
        names.update(code.co_names if code else ())
    return names


def _closure(function: Any) -> list[Any]:
    """The values of a function's nonlocal variables."""
    return list(inspect.getclosurevars(function).nonlocals.values()) if inspect.isfunction(function) else []


@functools.cache
def _deferred_class(base: type[nn.Module]) -> type[nn.Module]:
    experts = _registered[base.__module__, base.__name__]

    def forward(self: Any, x: Tensor, counts: Tensor) -> Tensor:
        if self.has_hooks or (torch.is_grad_enabled() and not x.requires_grad):
            return base.forward(self, x, counts)
        offsets = counts.cumsum(0, dtype=torch.int32)
        gate, up = experts.cast_inputs(self, x)
        hidden = functional.silu(expert_linear(self, GATE, gate, offsets)) * expert_linear(self, UP, up, offsets)
        return expert_linear(self, DOWN, hidden, offsets).type_as(x)

    return create_deferred_class(base, experts.names, forward, is_transposed=False)
