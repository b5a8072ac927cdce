"""Writes one rank's row and numbers the microbatches by itself, so that a schedule reads as its pattern."""

from __future__ import annotations

from array import array
from collections import deque

from zeropipe.core.action import KIND_SHIFT, MICROBATCH_SHIFT, STAGE_SHIFT, Kind
from zeropipe.core.placement import Placement, Problem

_F, _B, _I, _W = (kind << KIND_SHIFT for kind in (Kind.F, Kind.B, Kind.I, Kind.W))


class Lane:
    """One rank's row in the making. Each call appends the next microbatch of that stage.

    `f`, `b`, `i` take the microbatches of a stage in order; `w` takes the oldest I whose W is still owed. With two
    copies of the model, a stage's microbatches are those of the copy this rank holds (`copy` decides where both are).
    """

    def __init__(self, rank: int, problem: Problem, placement: Placement) -> None:
        self.rank = rank
        self.codes = array("q")
        self._owed: dict[int, deque[int]] = {}
        self._next_f: dict[int, int] = {}
        self._next_b: dict[int, int] = {}
        self._problem, self._placement = problem, placement

    def _begin(self, stage: int, copy: int | None) -> int:
        """The first microbatch of `stage` on this rank."""
        if copy is None:
            copy = next((c for c, table in enumerate(self._placement.copies) if table[stage] == self.rank), 0)
        return 0 if copy == 0 else self._placement.split or 0

    def f(self, stage: int, times: int = 1, copy: int | None = None) -> None:
        """`times` forwards of `stage`."""
        lane = stage if copy is None else (copy + 1 << 16) | stage
        first = self._next_f.get(lane)
        if first is None:
            first = self._begin(stage, copy)
        self._next_f[lane] = first + times
        code = stage << STAGE_SHIFT | _F
        for microbatch in range(first, first + times):
            self.codes.append(microbatch << MICROBATCH_SHIFT | code)

    def b(self, stage: int, times: int = 1, copy: int | None = None) -> None:
        """`times` whole backwards of `stage`."""
        first = self._take_b(stage, times, copy)
        code = stage << STAGE_SHIFT | _B
        for microbatch in range(first, first + times):
            self.codes.append(microbatch << MICROBATCH_SHIFT | code)

    def i(self, stage: int, times: int = 1, copy: int | None = None) -> None:
        """`times` input-gradient backwards of `stage`; each one owes a `w`."""
        first = self._take_b(stage, times, copy)
        owed = self._owed.setdefault(stage, deque())
        code = stage << STAGE_SHIFT | _I
        for microbatch in range(first, first + times):
            self.codes.append(microbatch << MICROBATCH_SHIFT | code)
            owed.append(microbatch)

    def w(self, stage: int, times: int = 1) -> None:
        """`times` weight gradients of `stage`, oldest first."""
        owed = self._owed[stage]
        code = stage << STAGE_SHIFT | _W
        for _ in range(times):
            self.codes.append(owed.popleft() << MICROBATCH_SHIFT | code)

    def overlap(self, forward: int, backward: int) -> None:
        """The next forward of one stage together with the next whole backward of another."""
        self.f(forward)
        self.codes[-1] |= 1
        self.b(backward)

    def owed(self, stage: int) -> int:
        """How many W of `stage` are still to come."""
        return len(self._owed.get(stage, ()))

    def at(self, stage: int, kind: Kind, microbatch: int) -> None:
        """Append one action with its microbatch spelled out, for orders that are not a pattern."""
        self.codes.append(microbatch << MICROBATCH_SHIFT | stage << STAGE_SHIFT | kind << KIND_SHIFT)

    def _take_b(self, stage: int, times: int, copy: int | None) -> int:
        lane = stage if copy is None else (copy + 1 << 16) | stage
        first = self._next_b.get(lane)
        if first is None:
            first = self._begin(stage, copy)
        self._next_b[lane] = first + times
        return first
