"""A block's forward that can run a second time: on the inputs and buffers of the first time, or it is refused."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

from zeropipe.engine.blocks.state import Entry, State
from zeropipe.engine.torch_private import tensors as torch_tensors
from zeropipe.errors import EngineError


class Again:
    """One forward of a block under activation checkpointing, which calls it a second time in the backward.

    Buffers that the forward modifies have their first values while it runs again, and then what they had become.
    """

    def __init__(self, block: nn.Module, forward: Callable[..., Any]) -> None:
        self._block, self._forward = block, forward
        self._seen: list[_Seen] | None = None

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        run = self._first if self._seen is None else self._again
        return run(args, kwargs)

    def _first(self, args: Any, kwargs: Any) -> Any:
        buffers = _buffers_of(self._block)
        self._version = torch_tensors.sum_versions(_tensors((args, kwargs)))
        self._seen = buffers.see()
        output = self._forward(self._block, *args, **kwargs)
        buffers.learn(self._seen)
        return output

    def _again(self, args: Any, kwargs: Any) -> Any:
        assert self._seen is not None
        if torch_tensors.sum_versions(_tensors((args, kwargs))) != self._version:
            raise _refusal(self._block, "a tensor that it was given was modified in place after its forward")
        for seen in self._seen:
            if not seen.modified and seen.differs():
                raise _refusal(self._block, f"its buffer {seen.label} was modified after its forward")
        modified = [seen for seen in self._seen if seen.modified]
        now = [seen.table[seen.name] for seen in modified]
        version = torch_tensors.sum_versions(now)
        for seen in modified:
            seen.table[seen.name] = seen.first.clone()
        args, kwargs = torch_tensors.mapped(_alias, (args, kwargs))
        try:
            return self._forward(self._block, *args, **kwargs)
        finally:  # also where checkpointing stops it, when it has all that it needs
            for seen, buffer in zip(modified, now):
                seen.table[seen.name] = buffer
            if torch_tensors.sum_versions(now) != version:
                raise _refusal(self._block, f"it modifies its buffer {modified[0].label} under another name, too")


class _Seen:
    """A buffer before a forward."""

    def __init__(self, entry: Entry, copy: bool) -> None:
        self.label, self.table, self.name = entry
        self._buffer = self.table[self.name]
        self._version = torch_tensors.sum_versions([self._buffer])
        self._copy = self._buffer.detach().clone() if copy else None
        self.modified = False

    @property
    def first(self) -> Tensor:
        """What it was, where that is known."""
        return self._buffer if self._copy is None else self._copy

    def differs(self) -> bool:
        """Whether it was modified, or another tensor has taken its place."""
        return self.table.get(self.name) is not self._buffer or not self._is_untouched()

    def learn(self, known: bool) -> None:
        """After a forward. A batch norm modifies its statistics without a new version: the values tell it, once."""
        self.modified = known or self.differs()
        if not self.modified and self._copy is not None:
            self.modified = not torch.equal(self._copy, self._buffer)
        if not self.modified:
            self._copy = None

    @property
    def is_lost(self) -> bool:
        """Whether nobody knows what it was."""
        return self.modified and self._copy is None and not self._is_untouched()

    def _is_untouched(self) -> bool:
        return torch_tensors.sum_versions([self._buffer]) == self._version


class _Buffers:
    """The buffers of a block. The first forward shows which of them it modifies; only those are copied from then on."""

    def __init__(self, block: nn.Module) -> None:
        self._block, self._state = weakref.ref(block), State(block)
        self._modified: dict[bool, set[str]] = {}  # in training, and in evaluation mode

    def see(self) -> list[_Seen]:
        """All of them, before a forward."""
        modified = self._modified.get(self._block().training)
        return [_Seen(entry, modified is None or entry.label in modified) for entry in self._state.entries()]

    def learn(self, all_seen: list[_Seen]) -> None:
        """After a forward; EngineError if it modified a buffer for the first time."""
        block = self._block()
        modified = self._modified.get(block.training, set())
        for seen in all_seen:
            seen.learn(seen.label in modified)
            if seen.is_lost:
                raise _refusal(block, f"it modifies its buffer {seen.label} in some forwards and not in others")
        self._modified.setdefault(block.training, {seen.label for seen in all_seen if seen.modified})


_known: weakref.WeakKeyDictionary[nn.Module, _Buffers] = weakref.WeakKeyDictionary()


def _buffers_of(block: nn.Module) -> _Buffers:
    if block not in _known:
        _known[block] = _Buffers(block)
    return _known[block]


def _refusal(block: nn.Module, why: str) -> EngineError:
    name = getattr(type(block), "plain_kind", type(block)).__name__
    return EngineError(
        f"activation checkpointing cannot run a {name} again: {why}; "
        "make a new tensor instead (x = x + 1, not x.add_(1)), or give ac='none'"
    )


def _alias(tensor: Tensor) -> Tensor:
    """The same input as another tensor: hooks that the forward puts on its inputs are there already."""
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
