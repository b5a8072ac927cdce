"""How I and W share a backward pass: three ways with one face."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, Protocol

from torch import Tensor, nn

from zeropipe.engine.backward.autograd import AutogradSplit
from zeropipe.engine.backward.linear import defer
from zeropipe.engine.backward.store import Ran, WeightStore, adding, nobody
from zeropipe.engine.torch_private import autograd as torch_autograd

# called after an I, it gives what runs the weight gradients of that I
BuildWeights = Callable[[], Callable[[], Any]]


class Pass(NamedTuple):
    """The way back through one microbatch in one stage."""

    stage: int
    microbatch: int
    module: nn.Module
    roots: Sequence[Any]  # the loss, or the gradient edges of the outputs; none where nothing needs a gradient
    gradients: Sequence[Tensor] | None  # of the roots; None for a loss
    inputs: Sequence[Tensor]  # those that need a gradient: it is left on them


class Splitter(Protocol):
    """Runs B, I and W."""

    def prepare(self, stage: int, module: nn.Module) -> None:
        """Make a stage ready, once."""

    def whole(self, way: Pass) -> None:
        """B."""

    def inputs(self, way: Pass) -> None:
        """I."""

    def own(self, stage: int, microbatch: int) -> None:
        """After an I of which nothing else is alive: let nobody else write to what waits for its W."""

    def weights(self, stage: int, microbatch: int, part: int, parts: int, ran: Ran = nobody) -> None:
        """W, or piece number `part` of `parts`. `ran` is told each parameter whose share of it is done."""

    def waiting(self, stage: int, microbatch: int) -> list[nn.Parameter]:
        """The parameters that `ran` will be told, each as often."""

    def ahead(self, stage: int, microbatch: int, parts: int, enough: Callable[[], bool]) -> None:
        """Run what waits for a W, piece by piece, until it is `enough`; the W runs the rest."""

    def alive(self, stage: int) -> int:
        """Bytes that wait for the stage's W."""

    def clear(self) -> None:
        """Forget everything, after a step that failed."""


class StoreSplitter:
    """I is one ordinary backward pass that leaves weight-gradient products behind; W runs them."""

    def __init__(self, deferring: bool) -> None:
        self._store, self._deferring = WeightStore(), deferring

    def prepare(self, stage: int, module: nn.Module) -> None:
        if self._deferring:
            defer(module)

    def whole(self, way: Pass) -> None:
        with adding():
            _backward(way)

    def inputs(self, way: Pass) -> None:
        with self._store.collect(way.stage, way.microbatch, own=False):
            _backward(way)

    def own(self, stage: int, microbatch: int) -> None:
        self._store.own(stage, microbatch)

    def weights(self, stage: int, microbatch: int, part: int, parts: int, ran: Ran = nobody) -> None:
        self._store.flush(stage, microbatch, part, parts, ran)

    def waiting(self, stage: int, microbatch: int) -> list[nn.Parameter]:
        return self._store.waiting(stage, microbatch)

    def ahead(self, stage: int, microbatch: int, parts: int, enough: Callable[[], bool]) -> None:
        self._store.run_some(stage, microbatch, parts, enough)

    def alive(self, stage: int) -> int:
        return self._store.alive(stage)

    def clear(self) -> None:
        self._store.clear()


class BuiltSplitter:
    """Stages whose layers put off their weight gradients themselves; `others` does the rest."""

    def __init__(self, others: Splitter, builders: Mapping[int, BuildWeights]) -> None:
        self._others, self._builders, self._built = others, builders, dict[tuple[int, int], Callable[[], Any]]()

    def prepare(self, stage: int, module: nn.Module) -> None:
        if stage not in self._builders:
            self._others.prepare(stage, module)

    def whole(self, way: Pass) -> None:
        if way.stage not in self._builders:
            return self._others.whole(way)
        _backward(way)
        self._builders[way.stage]()()
        return None

    def inputs(self, way: Pass) -> None:
        if way.stage not in self._builders:
            return self._others.inputs(way)
        _backward(way)
        self._built[way.stage, way.microbatch] = self._builders[way.stage]()
        return None

    def own(self, stage: int, microbatch: int) -> None:
        if stage not in self._builders:
            self._others.own(stage, microbatch)

    def weights(self, stage: int, microbatch: int, part: int, parts: int, ran: Ran = nobody) -> None:
        if stage not in self._builders:
            self._others.weights(stage, microbatch, part, parts, ran)
        elif part == 0:  # the owner's W is one: the first part does it all
            self._built.pop((stage, microbatch))()

    def waiting(self, stage: int, microbatch: int) -> list[nn.Parameter]:
        return [] if stage in self._builders else self._others.waiting(stage, microbatch)

    def ahead(self, stage: int, microbatch: int, parts: int, enough: Callable[[], bool]) -> None:
        if stage not in self._builders:
            self._others.ahead(stage, microbatch, parts, enough)

    def alive(self, stage: int) -> int:
        return self._others.alive(stage)

    def clear(self) -> None:
        self._others.clear()
        self._built.clear()


class AutogradSplitter:
    """torch's way: the graph lives on after I, and W walks it again."""

    def __init__(self) -> None:
        self._split = AutogradSplit()

    def prepare(self, stage: int, module: nn.Module) -> None: ...

    def whole(self, way: Pass) -> None:
        _backward(way)

    def inputs(self, way: Pass) -> None:
        self._split.backward_input(way.stage, way.microbatch, way.module, way.roots, way.gradients, way.inputs)

    def own(self, stage: int, microbatch: int) -> None: ...

    def waiting(self, stage: int, microbatch: int) -> list[nn.Parameter]:
        return []

    def ahead(self, stage: int, microbatch: int, parts: int, enough: Callable[[], bool]) -> None: ...

    def weights(self, stage: int, microbatch: int, part: int, parts: int, ran: Ran = nobody) -> None:
        if part == 0:  # torch's W is one: the first part does it all
            self._split.flush(stage, microbatch)

    def alive(self, stage: int) -> int:
        return 0

    def clear(self) -> None:
        self._split.clear()


class WholeSplitter:
    """No split: I is the whole backward and W does nothing."""

    def prepare(self, stage: int, module: nn.Module) -> None: ...

    def whole(self, way: Pass) -> None:
        _backward(way)

    def inputs(self, way: Pass) -> None:
        _backward(way)

    def own(self, stage: int, microbatch: int) -> None: ...

    def weights(self, stage: int, microbatch: int, part: int, parts: int, ran: Ran = nobody) -> None: ...

    def waiting(self, stage: int, microbatch: int) -> list[nn.Parameter]:
        return []

    def ahead(self, stage: int, microbatch: int, parts: int, enough: Callable[[], bool]) -> None: ...

    def alive(self, stage: int) -> int:
        return 0

    def clear(self) -> None: ...


def make_splitter(split: str, deferring: bool, builders: Mapping[int, BuildWeights] | None = None) -> Splitter:
    """The splitter "store", "autograd" or "whole"; `deferring`: whether layers leave weight gradients to the store.

    `builders`: of stages whose layers put off their weight gradients themselves, what makes a W.
    """
    splitter: Splitter = WholeSplitter()
    if split == "store":
        splitter = StoreSplitter(deferring)
    elif split == "autograd":
        splitter = AutogradSplitter()
    return BuiltSplitter(splitter, builders) if builders else splitter


def _backward(way: Pass) -> None:
    if way.roots:
        torch_autograd.backward(way.roots, way.gradients)
