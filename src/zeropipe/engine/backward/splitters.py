"""B, I and W as the engine calls them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from torch import Tensor, nn

from zeropipe.engine.backward import turns
from zeropipe.engine.backward.linear import defer
from zeropipe.engine.backward.store import OnProduct, WeightStore, accumulate_at_turns, accumulate_directly
from zeropipe.engine.backward.vectors import VectorGradients
from zeropipe.engine.torch_private import autograd as torch_autograd

# called after an I, it returns the function that computes the weight gradients of that I
BuildWeights = Callable[[], Callable[[], Any]]


class BackwardPass(NamedTuple):
    """The backward pass of one microbatch through one stage."""

    stage: int
    microbatch: int
    module: nn.Module
    roots: Sequence[Any]  # the loss, or the gradient edges of the outputs; none where nothing needs a gradient
    gradients: Sequence[Tensor] | None  # of the roots; None for a loss
    inputs: Sequence[Tensor]  # those that need a gradient, which is left in their `.grad`
    vectors: VectorGradients

    def run(self) -> None:
        if self.roots:
            with self.vectors.collect():
                torch_autograd.backward(self.roots, self.gradients)


class Splitter:
    """Runs B, I and W without a split: I is the full backward and W does nothing."""

    def prepare(self, stage: int, module: nn.Module) -> None:
        """Prepare a stage, once."""

    def backward(self, backward_pass: BackwardPass) -> None:
        """B: the full backward."""
        backward_pass.run()

    def backward_input(self, backward_pass: BackwardPass) -> None:
        """I: the gradients of the inputs."""
        backward_pass.run()

    def copy_shared(self, stage: int, microbatch: int) -> None:
        """Copy tensors that wait for W and whose memory is used elsewhere, once nothing else of the I is live."""

    def backward_weight(
        self, stage: int, microbatch: int, part: int, parts: int, on_product: OnProduct | None = None
    ) -> None:
        """W, or part number `part` of `parts`. `on_product` is called with the parameter of each product that ran."""

    def pending_parameters(self, stage: int, microbatch: int) -> list[nn.Parameter]:
        """The parameters that `on_product` will be called with, one entry for each call."""
        return []

    def run_early(self, stage: int, microbatch: int, parts: int, should_stop: Callable[[], bool]) -> None:
        """Run products of a pending W until `should_stop()`; the W runs the rest."""

    def pending_bytes(self, stage: int) -> int:
        """Bytes that wait for the stage's W."""
        return 0

    def clear(self) -> None:
        """Drop all pending work, after a step that failed."""


class StoreSplitter(Splitter):
    """I is one ordinary backward pass that leaves weight-gradient products behind; W runs them."""

    def __init__(self, deferring: bool) -> None:
        self._store, self._deferring = WeightStore(), deferring

    def prepare(self, stage: int, module: nn.Module) -> None:
        if self._deferring:
            defer(module)

    def backward(self, backward_pass: BackwardPass) -> None:
        with accumulate_directly() if turns.running() is None else accumulate_at_turns():
            backward_pass.run()

    def backward_input(self, backward_pass: BackwardPass) -> None:
        with self._store.collect(backward_pass.stage, backward_pass.microbatch, copy_shared=False):
            backward_pass.run()

    def copy_shared(self, stage: int, microbatch: int) -> None:
        self._store.copy_shared(stage, microbatch)

    def backward_weight(
        self, stage: int, microbatch: int, part: int, parts: int, on_product: OnProduct | None = None
    ) -> None:
        self._store.flush(stage, microbatch, part, parts, on_product)

    def pending_parameters(self, stage: int, microbatch: int) -> list[nn.Parameter]:
        return self._store.pending_parameters(stage, microbatch)

    def run_early(self, stage: int, microbatch: int, parts: int, should_stop: Callable[[], bool]) -> None:
        self._store.run_early(stage, microbatch, parts, should_stop)

    def pending_bytes(self, stage: int) -> int:
        return self._store.pending_bytes(stage)

    def clear(self) -> None:
        self._store.clear()


class CustomSplitter(Splitter):
    """Stages with a `dw_builder`, whose layers defer their weight gradients themselves; `default` runs the others."""

    def __init__(self, default: Splitter, builders: Mapping[int, BuildWeights]) -> None:
        self._default, self._builders, self._pending = default, builders, dict[tuple[int, int], Callable[[], Any]]()

    def prepare(self, stage: int, module: nn.Module) -> None:
        if stage not in self._builders:
            self._default.prepare(stage, module)

    def backward(self, backward_pass: BackwardPass) -> None:
        if backward_pass.stage not in self._builders:
            return self._default.backward(backward_pass)
        backward_pass.run()
        self._builders[backward_pass.stage]()()
        return None

    def backward_input(self, backward_pass: BackwardPass) -> None:
        stage = backward_pass.stage
        if stage not in self._builders:
            return self._default.backward_input(backward_pass)
        backward_pass.run()
        self._pending[stage, backward_pass.microbatch] = self._builders[stage]()
        return None

    def copy_shared(self, stage: int, microbatch: int) -> None:
        if stage not in self._builders:
            self._default.copy_shared(stage, microbatch)

    def backward_weight(
        self, stage: int, microbatch: int, part: int, parts: int, on_product: OnProduct | None = None
    ) -> None:
        if stage not in self._builders:
            self._default.backward_weight(stage, microbatch, part, parts, on_product)
        elif part == 0:  # the built W cannot be divided: the first part runs all of it
            self._pending.pop((stage, microbatch))()

    def pending_parameters(self, stage: int, microbatch: int) -> list[nn.Parameter]:
        return [] if stage in self._builders else self._default.pending_parameters(stage, microbatch)

    def run_early(self, stage: int, microbatch: int, parts: int, should_stop: Callable[[], bool]) -> None:
        if stage not in self._builders:
            self._default.run_early(stage, microbatch, parts, should_stop)

    def pending_bytes(self, stage: int) -> int:
        return self._default.pending_bytes(stage)

    def clear(self) -> None:
        self._default.clear()
        self._pending.clear()


def create_splitter(split: str, deferring: bool, builders: Mapping[int, BuildWeights]) -> Splitter:
    """The splitter of an engine with `split` "store" or "whole".

    `deferring`: whether layers leave weight gradients to the store. `builders`: by stage, for those with a
    `dw_builder`.
    """
    default = StoreSplitter(deferring) if split == "store" else Splitter()
    return CustomSplitter(default, builders) if builders else default
