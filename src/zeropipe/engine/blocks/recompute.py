"""The second forward of a checkpointed block: with the inputs and buffers of the first one, or an error."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor, nn

from zeropipe.engine.backward.turns import without_turns
from zeropipe.engine.blocks.state import Entry, State
from zeropipe.engine.torch_private import tensors as torch_tensors
from zeropipe.errors import EngineError


class RecomputableForward:
    """One forward of a block under activation checkpointing, which calls it again in the backward.

    Buffers that the forward modifies have their first values while it is recomputed, and their later values afterwards.
    """

    def __init__(self, block: nn.Module, forward: Callable[..., Any]) -> None:
        self._block, self._forward = block, forward
        self._snapshots: list[_Snapshot] | None = None

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        run = self._run_first if self._snapshots is None else self._recompute
        return run(args, kwargs)

    def _run_first(self, args: Any, kwargs: Any) -> Any:
        buffers = _buffers_of(self._block)
        self._version = torch_tensors.sum_versions(_tensors((args, kwargs)))
        self._snapshots = buffers.take_snapshots()
        output = self._forward(self._block, *args, **kwargs)
        buffers.compare(self._snapshots)
        return output

    def _recompute(self, args: Any, kwargs: Any) -> Any:
        assert self._snapshots is not None
        if torch_tensors.sum_versions(_tensors((args, kwargs))) != self._version:
            raise _refuse(self._block, "an input was modified in place after its forward")
        for snapshot in self._snapshots:
            if not snapshot.is_modified and snapshot.differs():
                raise _refuse(self._block, f"its buffer {snapshot.label} was modified after its forward")
        modified = [snapshot for snapshot in self._snapshots if snapshot.is_modified]
        current = [snapshot.table[snapshot.name] for snapshot in modified]
        version = torch_tensors.sum_versions(current)
        for snapshot in modified:
            snapshot.table[snapshot.name] = snapshot.first_value.clone()
        args, kwargs = torch_tensors.map_tensors(_alias, (args, kwargs))
        # a forward of another microbatch, which may take a turn, must not see first values
        undisturbed = without_turns() if modified else nullcontext()
        try:
            with undisturbed:
                return self._forward(self._block, *args, **kwargs)
        finally:  # also if checkpointing stops it early, with all tensors that it needs
            for snapshot, buffer in zip(modified, current):
                snapshot.table[snapshot.name] = buffer
            if torch_tensors.sum_versions(current) != version:
                raise _refuse(self._block, f"it modifies its buffer {modified[0].label} also under another name")


class _Snapshot:
    """A buffer before a forward; with `copy` its values too."""

    def __init__(self, entry: Entry, copy: bool) -> None:
        self.label, self.table, self.name = entry
        self._buffer = self.table[self.name]
        self._version = torch_tensors.sum_versions([self._buffer])
        self._copy = self._buffer.detach().clone() if copy else None
        self.is_modified = False

    @property
    def first_value(self) -> Tensor:
        """Its value before the forward; valid unless `is_lost`."""
        return self._buffer if self._copy is None else self._copy

    def differs(self) -> bool:
        """Whether it was modified in place, or replaced by another tensor."""
        return self.table.get(self.name) is not self._buffer or not self._has_same_version()

    def compare(self, is_known: bool) -> None:
        """Find out after a forward whether it was modified; `is_known`: earlier forwards have modified it.

        Values are compared where there is a copy: a batch norm modifies its statistics without a new version.
        """
        self.is_modified = is_known or self.differs()
        if not self.is_modified and self._copy is not None:
            self.is_modified = not torch.equal(self._copy, self._buffer)
        if not self.is_modified:
            self._copy = None

    @property
    def is_lost(self) -> bool:
        """Whether it was modified in place and there is no copy of its first value."""
        return self.is_modified and self._copy is None and not self._has_same_version()

    def _has_same_version(self) -> bool:
        return torch_tensors.sum_versions([self._buffer]) == self._version


class _Buffers:
    """The buffers of a block. Its first forward shows which of them it modifies; only those are copied afterwards."""

    def __init__(self, block: nn.Module) -> None:
        self._block, self._state = weakref.ref(block), State(block)
        self._modified: dict[bool, set[str]] = {}  # by training mode

    def take_snapshots(self) -> list[_Snapshot]:
        """Snapshots of all buffers before a forward."""
        modified = self._modified.get(self._block().training)
        return [_Snapshot(entry, modified is None or entry.label in modified) for entry in self._state.entries()]

    def compare(self, snapshots: list[_Snapshot]) -> None:
        """Record which buffers a forward has modified; EngineError if the first value of one of them is lost."""
        block = self._block()
        modified = self._modified.get(block.training, set())
        for snapshot in snapshots:
            snapshot.compare(snapshot.label in modified)
            if snapshot.is_lost:
                raise _refuse(block, f"it modifies its buffer {snapshot.label} in some forwards and not in others")
        self._modified.setdefault(block.training, {snapshot.label for snapshot in snapshots if snapshot.is_modified})


_cache: weakref.WeakKeyDictionary[nn.Module, _Buffers] = weakref.WeakKeyDictionary()


def _buffers_of(block: nn.Module) -> _Buffers:
    if block not in _cache:
        _cache[block] = _Buffers(block)
    return _cache[block]


def _refuse(block: nn.Module, reason: str) -> EngineError:
    name = getattr(type(block), "plain_class", type(block)).__name__
    return EngineError(
        f"activation checkpointing cannot recompute a {name}: {reason}; create a new tensor instead (x = x + 1, not "
        "x.add_(1)), or use ac='none'"
    )


def _alias(tensor: Tensor) -> Tensor:
    """Another tensor with the memory of an input: the input has the hooks of the first forward already."""
    return tensor.detach().requires_grad_() if tensor.requires_grad else tensor


def _tensors(value: Any) -> Iterator[Tensor]:
    """The tensors of nested tuples, lists and dicts."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, tuple | list):
        for item in value:
            yield from _tensors(item)
    elif isinstance(value, dict):
        yield from _tensors(list(value.values()))
