"""What stages return keeps its values, also if a stage modifies the same memory later.

A buffer is copied when it is returned; anything else is new in nearly every model, and is only checked. What was
modified in place before it was sent, used or given to the caller is refused.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor, nn

from zeropipe.engine.blocks.state import State
from zeropipe.engine.torch_private import tensors as torch_tensors
from zeropipe.errors import EngineError


def require_unmodified(tensors: Sequence[Tensor], version: int, name: str) -> None:
    """EngineError if tensors that `name` returned are not at this version (torch_tensors.versions) any more."""
    if torch_tensors.sum_versions(tensors) != version:
        raise EngineError(
            f"a tensor that {name} returned was modified in place before it was used: return a copy (x.clone()), or "
            "register it as a buffer"
        )


class Buffers:
    """The buffers of a stage, which later forwards may modify."""

    def __init__(self, module: nn.Module) -> None:
        self._state = State(module)
        self._memory: frozenset[int] = frozenset()

    def begin(self) -> None:
        """Before a step: look where they are."""
        self._memory = frozenset(torch_tensors.memory_of(table[name]) for _, table, name in self._state.entries())

    def own(self, tensor: Tensor) -> Tensor:
        """A tensor that shares no memory with a buffer: itself, or else a copy."""
        return tensor.clone() if self._memory and self._has(tensor) else tensor

    def own_all(self, output: Any) -> Any:
        """The same for the tensors of a nested value."""
        if self._memory and any(map(self._has, torch_tensors.tensors_in(output))):
            return torch_tensors.mapped(self.own, output)
        return output

    def _has(self, tensor: Tensor) -> bool:
        return torch_tensors.memory_of(tensor) in self._memory


class Kept:
    """Results of a step, which the caller gets at its end."""

    def __init__(self) -> None:
        self._seen: list[tuple[Sequence[Tensor], int, str]] = []

    def add(self, result: Any, name: str) -> Any:
        """Note a result that `name` returned, and give it back."""
        tensors = list(torch_tensors.tensors_in(result))
        self._seen.append((tensors, torch_tensors.sum_versions(tensors), name))
        return result

    def check(self) -> None:
        """EngineError if a result was modified since."""
        for tensors, version, name in self._seen:
            require_unmodified(tensors, version, name)
        self._seen.clear()
