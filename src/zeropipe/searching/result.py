"""The result of a search: a schedule, and its distance from the best possible."""

from __future__ import annotations

import warnings
from dataclasses import dataclass
from typing import Literal

from zeropipe.core.schedule import Schedule
from zeropipe.core.timeline import Timeline
from zeropipe.core.units import count_text
from zeropipe.searching.driver import relative_gap
from zeropipe.searching.task import timeline_value

Objective = Literal["makespan", "span"]


@dataclass(frozen=True)
class SearchResult:
    """The best schedule that was found, and a lower bound: a time that no schedule can beat."""

    schedule: Schedule
    timeline: Timeline
    objective: Objective
    bound: float
    seconds: float
    interrupted: bool = False
    registered: Timeline | None = None  # the best built-in or registered schedule that fits
    placements: tuple[str, ...] = ()  # the names of those that were searched
    slices: tuple[int, ...] = (1,)  # the numbers of slices that were searched
    memory_saving: str = ""  # how they may save memory

    @property
    def value(self) -> float:
        """The makespan, or the longest span: what was minimized."""
        return self.value_of(self.timeline)

    def value_of(self, timeline: Timeline) -> float:
        """Return the same of another timeline."""
        return timeline_value(timeline, self.objective == "span")

    @property
    def gap(self) -> float:
        """How far the value is above the bound: 0.01 is one percent, and 0 proves that nothing is better."""
        return relative_gap(self.value, self.bound)

    @property
    def searched(self) -> str:
        """The schedules that were searched: a gap of 0 proves that none of them is better."""
        number = self.schedule.problem.stages_per_rank
        placed = f" in a {' or '.join(self.placements)}" if number > 1 else ""
        sliced = "" if self.slices == (1,) else f", {' or '.join(map(str, self.slices))} slices"
        saved = f", {self.memory_saving}," if self.memory_saving else ""
        return f"schedules with {count_text(number, 'stage')} per rank{placed}{sliced}{saved} and one copy of the model"

    @property
    def named(self) -> Timeline | None:
        """Deprecated name of `registered`."""
        warnings.warn("SearchResult.named is deprecated: use registered", DeprecationWarning, stacklevel=2)
        return self.registered

    def __str__(self) -> str:
        return f"{self.schedule.name}: {self.objective} {self.value:g}, bound {self.bound:g}, gap {self.gap:.2%}"
