"""The order in which the FSDP units of a stage are gathered, and when they are freed."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, Protocol

from zeropipe.core.action import Kind
from zeropipe.core.collectives import AT_ONCE, Collective, gather_order
from zeropipe.engine import fsdp_private
from zeropipe.errors import EngineError

CheckCollective = Callable[[Collective], None]  # called with each collective before it is started
OnLeft = Callable[[int, bool], None]  # the unit, and whether it was a forward that left it


class GatherObserver(Protocol):
    """Is called when a unit of a stage is gathered."""

    def on_gather_start(self) -> None: ...
    def on_gather_issued(self, wait: Callable[[], object]) -> None: ...
    def on_gather_end(self) -> None: ...


class UnitGatherer:
    """Gathers the units of one stage, always all of them and in one order.

    Processes that share the stage must gather the same units in the same order, but their microbatches may use
    different ones. So FSDP's hooks gather nothing: they report when a pass enters a unit, and when it has left it. With
    `regather` that decides how early the next unit is gathered, and when a unit is freed, which is local.
    """

    def __init__(self, stage: int, units: Sequence[Any], names: Sequence[str], regather: bool) -> None:
        self._stage, self._names, self._regather = stage, names, regather
        self._units = [
            fsdp_private.UnitWeights(unit, partial(self._on_enter, number), partial(self._on_leave, number))
            for number, unit in enumerate(units)
        ]
        self._check: CheckCollective = _accept
        self.observer: GatherObserver | None = None
        self.on_left: OnLeft = _ignore  # called when a forward or a backward has left a unit
        self._order: list[int] = []  # units, as the pass that runs or comes next gathers them
        self._num_started = 0  # how many of them are gathered, or being gathered
        self._has_begun = self._is_backward = False  # of that pass
        self._last_entered = -1  # unit
        self._left: set[int] = set()  # units that the pass has left and that are still gathered
        self._reentered: set[int] = set()  # units that passes enter again after other units
        self._has_reentered = False  # whether a pass has completed that set

    def begin_step(self, check: CheckCollective) -> None:
        """From now on FSDP's hooks gather nothing. `check` is called with each collective before it is started."""
        self._check = check
        for unit in self._units:
            unit.reshard()  # after a call outside of a step
            unit.is_controlled = True

    def end_step(self) -> None:
        """From now on FSDP's hooks gather again."""
        self._check = _accept
        for unit in self._units:
            unit.is_controlled = False

    def unshard(self, backward: bool) -> None:
        """UNSHARD: start to gather, in the order of a forward or a backward pass.

        Computation waits for weights unit by unit. With `regather` only the first units are started here; within the
        pass the next one is started when a unit is entered, so two are gathered at a time.
        """
        self._order, self._num_started = gather_order(len(self._units), backward), 0
        self._has_begun, self._is_backward, self._last_entered = False, backward, -1
        self._left.clear()
        self._start_until(AT_ONCE if self._regather else len(self._order))

    @contextmanager
    def observed(self, on_left: OnLeft) -> Iterator[None]:
        """Call `on_left` with each unit that a pass inside has left."""
        self.on_left = on_left
        try:
            yield
        finally:
            self.on_left = _ignore

    @contextmanager
    def during_pass(self, backward: bool) -> Iterator[None]:
        """Around an F, B or I: with `regather` it gathers every unit once, also those that it does not use."""
        if self._regather:
            if self._has_begun:  # the second action of an Overlap
                self.reshard()
                self.unshard(backward)
            self._has_begun = True
        yield
        if self._regather:
            for number in self._order[self._num_started :]:
                self._start_until(self._num_started + 1)
                self.wait(number)
                self._units[number].reshard()
            self._has_reentered = True

    @property
    def is_complete(self) -> bool:
        """Whether the pass that runs will gather nothing more."""
        return self._num_started == len(self._order)

    def reshard(self) -> None:
        """RESHARD: free all unsharded weights."""
        for number, unit in enumerate(self._units):
            self.wait(number)
            unit.reshard()

    def wait(self, number: int) -> None:
        """Wait for a unit, if it is being gathered."""
        is_pending = self._units[number].is_pending
        self._units[number].wait()
        if is_pending and self.observer is not None:
            self.observer.on_gather_end()

    def _start_until(self, index: int) -> None:
        """Start those of the first `index` units of the order that are not started."""
        for number in self._order[self._num_started : index]:
            self._num_started += 1
            self._start(number)

    def _start(self, number: int) -> None:
        unit = self._units[number]
        self._check(Collective(Kind.UNSHARD, self._stage, number))
        if unit.is_empty:
            return
        if unit.is_available:  # torch would gather nothing, and the other processes would wait
            raise EngineError(f"stage {self._stage}: {self._names[number]} is gathered twice without a reshard")
        if self.observer is not None:
            self.observer.on_gather_start()
        waits = unit.start()
        if self.observer is not None:
            for wait in waits:
                self.observer.on_gather_issued(wait)

    # called by FSDP's hooks

    def _on_enter(self, number: int) -> None:
        """A pass enters a unit and needs its weights."""
        if self._regather:
            self._free_and_start(number)
        if not self._units[number].is_available:
            name = self._names[number]
            raise EngineError(
                f"stage {self._stage} enters {name} again after other units, and did not in its first pass, so {name} "
                "was resharded; leave out regather=True for stages that call their blocks in an order that depends on "
                "the data"
                if self._regather
                else f"stage {self._stage} needs the weights of {name} where its schedule has resharded them: only "
                "F, B and I may use them"
            )
        self.wait(number)

    def _free_and_start(self, number: int) -> None:
        if number in self._left and number != self._last_entered:
            self._reentered.add(number)
        self._left.discard(number)
        if self._has_reentered:
            for other in self._left - self._reentered:
                self._units[other].reshard()
            self._left &= self._reentered
        self._last_entered = number
        self._start_until(self._order.index(number) + AT_ONCE)

    def _on_leave(self, number: int, is_forward: bool) -> None:
        """A pass leaves a unit, unless a backward recomputes a forward: its own backward comes next."""
        self.on_left(number, is_forward)
        if self._regather and not (is_forward and self._is_backward):
            self._left.add(number)


def _ignore(number: int, is_forward: bool) -> None:
    """Outside of `observed`."""


def _accept(collective: Collective) -> None:
    """Outside of steps collectives are not checked."""
