"""Two computations of a process that take turns: one computes while messages of the other are under way.

Python code of both runs in one thread at a time, and changes from one to the other at the same points in every process.
So the collectives of both have one order everywhere. On a GPU a turn is a point in the order in which kernels are
launched: it waits for nothing, and both computations are on one stream.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Protocol

from zeropipe.engine.backward.turn_times import DISPATCH, TurnTimes

in_graphs = False  # whether collectives of a compiled graph are turns; read while it is traced
_current: Turns | None = None  # not thread-local: on CUDA a backward runs on a thread of autograd


def turn(*, is_waiting: bool = True, message: str = "") -> None:
    """Let the other computation run until its next turn; nothing where there is no other one.

    `is_waiting`: a message of this computation is under way, so that its pending work may run first. `message` says
    which one it is, if `resume` is called when it has arrived.
    """
    if _current is not None:
        _current.turn(is_waiting, message)


def resume(message: str) -> None:
    """The message that a turn waited for has arrived, and this computation goes on with it."""
    if _current is not None:
        _current.times.begin(_current.running, message)


def set_computed(address: int, event: Any) -> None:
    """The rows at this address, which the computation that runs sends next, are computed at this event."""
    if _current is not None:
        _current.computed[_current.running] = address, event


def pop_computed(address: int) -> Any:
    """The event of the rows at this address; None where there is none."""
    if _current is None:
        return None
    (expected, event), _current.computed[_current.running] = _current.computed[_current.running], (0, None)
    return event if expected == address else None


@contextmanager
def taken_in_graphs(taken: bool) -> Iterator[None]:
    """Whether collectives are turns in graphs that are traced inside."""
    global in_graphs
    before, in_graphs = in_graphs, taken
    try:
        yield
    finally:
        in_graphs = before


@contextmanager
def without_turns() -> Iterator[None]:
    """Let the computation that runs go on without turns."""
    turns = _current
    if turns is None:
        yield
        return
    turns.num_holds += 1
    try:
        yield
    finally:
        turns.num_holds -= 1


@contextmanager
def use_waits(run_pending: Callable[[float], None]) -> Iterator[None]:
    """Call `run_pending` at every turn of the computation that runs inside which waits for a message.

    Its argument is the share of the pending work to run then.
    """
    turns = _current
    assert turns is not None
    turns.run_pending[turns.running] = run_pending
    try:
        yield
    finally:
        turns.run_pending[turns.running] = None


def running() -> int | None:
    """Which of two computations runs; None where there is only one."""
    return None if _current is None else _current.running


class Switched(Protocol):
    """State of the process that each of the two computations has for itself."""

    def get(self) -> Any: ...

    def set(self, state: Any) -> None: ...


class Stopped(Exception):
    """Ends a computation whose partner has failed."""


class Turns:
    """Who of two computations runs. Number 0 is the first one."""

    def __init__(self, times: TurnTimes, switched: Sequence[Switched] = ()) -> None:
        self.times = times
        self._locks = (threading.Lock(), threading.Lock())  # a computation acquires its own to run
        for lock in self._locks:
            lock.acquire()
        self._switched = switched
        self._is_alone = self._has_failed = False  # one of them has ended, or failed
        self.running = self.num_holds = 0
        self.run_pending: list[Callable[[float], None] | None] = [None, None]
        self.computed: list[tuple[int, Any]] = [(0, None), (0, None)]  # address of rows, and the event after them

    def turn(self, is_waiting: bool, message: str) -> None:
        """Let the other computation run until its next turn."""
        own = self.running
        self.times.end(own)
        run_pending = self.run_pending[own]
        if is_waiting and run_pending is not None:
            with self.times.measure_weights(message):
                run_pending(1 - self.times.delayed if message == DISPATCH else 1.0)
        if self._is_alone or self.num_holds:
            return self._require_partner()
        state = self.get_state()
        self.running = 1 - own
        self._locks[1 - own].release()
        self._locks[own].acquire()
        self.set_state(state)
        return self._require_partner()

    def _require_partner(self) -> None:
        if self._has_failed:
            raise Stopped

    def get_state(self) -> list[Any]:
        """The switched state of the computation that runs."""
        return [some.get() for some in self._switched]

    def set_state(self, states: Sequence[Any]) -> None:
        """Restore what `get_state` returned."""
        for some, state in zip(self._switched, states):
            some.set(state)

    def wait_for_first(self) -> None:
        """Called by the second computation before it begins."""
        state = self.get_state()
        self._locks[1].acquire()
        self.set_state(state)
        self._require_partner()

    def end(self, number: int, failed: bool) -> None:
        """A computation has ended; the other one goes on alone, or ends at its next turn."""
        self._has_failed |= failed
        if not self._is_alone:
            self._is_alone, self.running = True, 1 - number
            self._locks[1 - number].release()


@contextmanager
def taking(turns: Turns) -> Iterator[None]:
    """Two computations run inside."""
    global _current
    assert _current is None, "two computations take turns already"
    _current = turns
    try:
        yield
    finally:
        _current = None
