"""The tensors that a module keeps from one forward to the next: its buffers, and other tensors among its attributes."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

from torch import Tensor, nn

_SLOT = "slot"  # of a deferred layer: a constant that represents the layer in compiled graphs


class Entry(NamedTuple):
    """The location of a tensor: `table[name]`."""

    label: str
    table: dict[str, Any]
    name: str


class State:
    """The buffers of a module and its submodules, and the attributes that are tensors when this is created."""

    def __init__(self, module: nn.Module) -> None:
        children = [(f"{prefix}." if prefix else "", child) for prefix, child in module.named_modules()]
        self._buffers = [(prefix, child._buffers) for prefix, child in children]
        self._attributes = [
            Entry(prefix + name, vars(child), name)
            for prefix, child in children
            for name, value in vars(child).items()
            if isinstance(value, Tensor) and name != _SLOT
        ]

    def entries(self) -> Iterator[Entry]:
        """All locations that have a tensor now."""
        for prefix, table in self._buffers:
            for name, buffer in table.items():
                if buffer is not None:
                    yield Entry(prefix + name, table, name)
        for entry in self._attributes:
            if isinstance(entry.table.get(entry.name), Tensor):
                yield entry
