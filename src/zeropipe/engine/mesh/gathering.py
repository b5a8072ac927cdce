"""When the units of a sharded stage are gathered, and when they are let go."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, Protocol

from zeropipe.core.action import Kind
from zeropipe.core.collectives import AT_ONCE, Collective, gather_order
from zeropipe.engine import fsdp_private
from zeropipe.errors import EngineError

Issue = Callable[[Collective], None]


class GatherWatcher(Protocol):
    """Who is told of the gathering of a stage's units."""

    def gathering(self) -> None: ...
    def begun(self, wait: Callable[[], object]) -> None: ...
    def gathered(self) -> None: ...


class Gathering:
    """Gathers the units of one stage, always all of them and in one order.

    Processes that share the stage must gather the same units in the same order, and their microbatches may use other
    ones. So FSDP's hooks gather nothing: they say when a pass comes to a unit, and when it has left it. With `regather`
    that decides how early the next unit is gathered, and when a unit is let go, which concerns no other process.
    """

    def __init__(self, stage: int, units: Sequence[Any], names: Sequence[str], regather: bool) -> None:
        self._stage, self._names, self._regather = stage, names, regather
        self._units = [
            fsdp_private.WholeWeights(unit, partial(self._entered, number), partial(self._left, number))
            for number, unit in enumerate(units)
        ]
        self._issue: Issue = _anything
        self.watcher: GatherWatcher | None = None
        self._order: list[int] = []  # of the pass that runs, or for which weights were gathered
        self._started = 0  # how many of them are gathered, or being gathered
        self._used = self._backward = False  # whether that pass has begun, and whether it is a backward
        self._latest = -1  # the unit that it came to last
        self._behind: set[int] = set()  # units that it has left and that are still whole
        self._returns: set[int] = set()  # units that passes come back to after other ones
        self._knows_returns = False

    def hold(self, issue: Issue) -> None:
        """For a step: FSDP's hooks gather nothing. `issue` is told each gathering before it is started."""
        self._issue = issue
        for unit in self._units:
            unit.let_go()  # whatever a call outside of a step left whole
            unit.driven = True

    def release(self) -> None:
        """After a step: FSDP's hooks gather again."""
        self._issue = _anything
        for unit in self._units:
            unit.driven = False

    def gather(self, backward: bool) -> None:
        """UNSHARD: start to gather, in the order of a forward or a backward pass.

        Computation waits for weights unit by unit. With `regather` only the first units are started here; within the
        pass the next one is started when a unit is come to, so that two are whole at a time.
        """
        self._order, self._started = gather_order(len(self._units), backward), 0
        self._used, self._backward, self._latest = False, backward, -1
        self._behind.clear()
        self._start_first(AT_ONCE if self._regather else len(self._order))

    @contextmanager
    def passing(self, backward: bool) -> Iterator[None]:
        """Around an F, B or I: with `regather` it gathers every unit once, also those that it does not use."""
        if self._regather:
            if self._used:  # the second action of an Overlap
                self.drop()
                self.gather(backward)
            self._used = True
        yield
        if self._regather:
            for number in self._order[self._started :]:
                self._start_first(self._started + 1)
                self.take(number)
                self._units[number].let_go()
            self._knows_returns = True

    @property
    def is_complete(self) -> bool:
        """Whether the pass that runs will gather nothing more."""
        return self._started == len(self._order)

    def drop(self) -> None:
        """RESHARD: let go of all weights."""
        for number, unit in enumerate(self._units):
            self.take(number)
            unit.let_go()

    def _start_first(self, number: int) -> None:
        """Start the first units of the order, if they are not."""
        for unit in self._order[self._started : number]:
            self._started += 1
            self._start(unit)

    def _start(self, number: int) -> None:
        unit = self._units[number]
        self._issue(Collective(Kind.UNSHARD, self._stage, number))
        if unit.is_empty:
            return
        if unit.is_here:  # torch would gather nothing, and the others would wait
            raise EngineError(f"stage {self._stage}: {self._names[number]} is to be gathered and is whole already")
        if self.watcher is not None:
            self.watcher.gathering()
        waits = unit.start()
        if self.watcher is not None:
            for wait in waits:
                self.watcher.begun(wait)

    def take(self, number: int) -> None:
        """Wait for a unit that is being gathered, if it is."""
        pending = self._units[number].is_pending
        self._units[number].wait()
        if pending and self.watcher is not None:
            self.watcher.gathered()

    # what FSDP's hooks call

    def _entered(self, number: int) -> None:
        """A pass comes to a unit: it needs its weights."""
        if self._regather:
            self._come_to(number)
        if not self._units[number].is_here:
            name = self._names[number]
            raise EngineError(
                f"stage {self._stage} comes back to {name} after other units, and did not in its first pass, so {name} "
                "was let go: leave regather=True out for stages that call their blocks in an order that depends on the "
                "data"
                if self._regather
                else f"stage {self._stage} needs the weights of {name} where its schedule has let go of them: only "
                "F, B and I may use them"
            )
        self.take(number)

    def _come_to(self, number: int) -> None:
        if number in self._behind and number != self._latest:
            self._returns.add(number)
        self._behind.discard(number)
        if self._knows_returns:
            for other in self._behind - self._returns:
                self._units[other].let_go()
            self._behind &= self._returns
        self._latest = number
        self._start_first(self._order.index(number) + AT_ONCE)

    def _left(self, number: int, forward: bool) -> None:
        """A pass is done with a unit; a forward that a backward runs again is not: its backward comes next."""
        if self._regather and not (forward and self._backward):
            self._behind.add(number)


def _anything(collective: Collective) -> None:
    """Outside of a step nobody checks what is gathered."""
