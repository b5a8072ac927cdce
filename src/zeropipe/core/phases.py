"""The phases of a layer with experts: attention, dispatch, experts and combine, each with an F, an I and a W."""

from __future__ import annotations

from typing import NamedTuple

from zeropipe.core.action import Kind

PHASES = ("attention", "dispatch", "experts", "combine")  # in the order of F
EXCHANGES = ("dispatch", "combine")  # rows travel to their experts, and back


class PhaseTimes(NamedTuple):
    """The times of one phase. An exchange has no weights, so its W is 0."""

    f: float = 0.0
    i: float = 0.0
    w: float = 0.0

    def of(self, kind: Kind) -> float:
        """The time of F, I, W, or of B, which is I and W."""
        return {Kind.F: self.f, Kind.I: self.i, Kind.W: self.w, Kind.B: self.i + self.w}[kind]


class LayerPhases(NamedTuple):
    """The phases of one layer. A layer without experts has the whole of its times in `attention`."""

    attention: PhaseTimes = PhaseTimes()
    dispatch: PhaseTimes = PhaseTimes()
    experts: PhaseTimes = PhaseTimes()
    combine: PhaseTimes = PhaseTimes()

    def total(self, kind: Kind) -> float:
        """The time of all phases, one after the other."""
        return sum(times.of(kind) for times in self)


StagePhases = tuple[LayerPhases, ...]  # of the layers of a stage, in order


class Phases(NamedTuple):
    """The phases of the layers of each stage, and the part of a GPU that an exchange under way takes."""

    stages: tuple[StagePhases, ...]
    sm_tax: float = 0.0


class PhaseSpan(NamedTuple):
    """One phase in time, from the start of the step that it belongs to."""

    kind: Kind  # F, I or W
    phase: str
    layer: int  # of its stage
    start: float
    end: float

    @property
    def is_exchange(self) -> bool:
        return self.phase in EXCHANGES

    def __str__(self) -> str:
        return f"{self.phase} {self.kind.name}"
