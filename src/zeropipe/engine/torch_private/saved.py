"""The places where autograd, checkpointing and compiled blocks keep tensors for a backward pass."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge, saved_tensors_hooks

from zeropipe.engine.torch_private.autograd import cache_entries, selective_caches


class SavedSlot:
    """A tensor that autograd saved. The backward refuses it if it was modified since, as it does without hooks."""

    __slots__ = ("tensor", "version")

    def __init__(self, tensor: Tensor) -> None:
        self.tensor: Tensor | None = tensor
        self.version = tensor._version

    @property
    def is_modified(self) -> bool:
        return self.tensor is not None and self.tensor._version != self.version

    def set_copy(self, tensor: Tensor) -> None:
        """Put a copy of the tensor here, with its version: whoever compares versions finds it unmodified."""
        torch._C._autograd._unsafe_set_version_counter((tensor,), (self.version,))
        self.tensor = tensor


class ListSlot:
    """A tensor in a list of a compiled block's graph node."""

    __slots__ = ("_index", "_list")

    is_modified = False

    def __init__(self, items: list[Any], index: int) -> None:
        self._list, self._index = items, index

    @property
    def tensor(self) -> Tensor | None:
        return self._list[self._index]  # type: ignore[no-any-return]

    @tensor.setter
    def tensor(self, value: Tensor | None) -> None:
        self._list[self._index] = value

    def set_copy(self, tensor: Tensor) -> None:
        """Put a copy of the tensor here."""
        self.tensor = tensor


class CacheSlot:
    """A tensor that selective checkpointing keeps."""

    __slots__ = ("_entry",)

    def __init__(self, entry: Any) -> None:
        self._entry = entry

    @property
    def tensor(self) -> Tensor | None:
        return self._entry.val  # type: ignore[no-any-return]

    @tensor.setter
    def tensor(self, value: Tensor | None) -> None:
        self._entry.val = value

    @property
    def is_modified(self) -> bool:
        return bool(self._entry.val._version != self._entry.version)

    def set_copy(self, tensor: Tensor) -> None:
        """Put a copy of the tensor here."""
        self._entry.val, self._entry.version = tensor, tensor._version


AnySlot = SavedSlot | ListSlot | CacheSlot


@contextmanager
def collect_saved(slots: list[AnySlot]) -> Iterator[None]:
    """Add the slot of every tensor that a forward inside saves for its backward; `find_compiled` finds others."""
    outer = torch._C._autograd._top_saved_tensors_default_hooks(False)

    def pack(tensor: Tensor) -> Any:
        if outer is not None:  # that of a recorder, which only looks at tensors
            outer[0](tensor)
        slot = SavedSlot(tensor)
        slots.append(slot)
        return slot

    with saved_tensors_hooks(pack, _unpack), selective_caches() as caches:
        yield
    slots += [CacheSlot(entry) for cache in caches for entry in cache_entries(cache)]


def _unpack(slot: SavedSlot) -> Tensor:
    tensor = slot.tensor
    assert tensor is not None, "a backward ran before its RELOAD: please report this as a bug"
    if slot.is_modified:
        name = tensor.type()
        raise RuntimeError(
            "one of the variables needed for gradient computation has been modified by an inplace operation: "
            f"[{name} {list(tensor.shape)}] is at version {tensor._version}; expected version {slot.version} instead"
        )
    return tensor


def find_compiled(edges: Sequence[GradientEdge]) -> list[AnySlot]:
    """The slots of tensors that compiled blocks keep in their graph nodes, without autograd's hooks (torch 2.13)."""
    waiting, seen, slots = [edge.node for edge in edges], set[Any](), list[AnySlot]()
    while waiting:
        node: Any = waiting.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        kept = getattr(node, "_tensors_no_vc_check", None)
        if isinstance(kept, list):
            slots += [ListSlot(kept, index) for index, tensor in enumerate(kept) if isinstance(tensor, Tensor)]
        waiting += [following for following, _ in node.next_functions]
    return slots
