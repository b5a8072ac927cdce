"""The schedule that a framework's config names: its stages, their placement, and the class that runs them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

from torch import Tensor

from zeropipe.core.action import Kind, actions_of
from zeropipe.core.files import SCHEDULE_SUFFIXES, has_suffix
from zeropipe.core.model.layers import num_stages_for
from zeropipe.core.placement import Placement
from zeropipe.core.schedule import Schedule
from zeropipe.core.units import count_text
from zeropipe.errors import ConfigError
from zeropipe.pipelining.plan import require_one_copy
from zeropipe.pipelining.schedules import PipelineSchedule, get_schedule_class
from zeropipe.schedules.registry import find
from zeropipe.schedules.user import load, named


@cache
def choose_schedule(name: str) -> ScheduleChoice:
    """Find a schedule by its name, torch's or ours, or load it from a CSV or JSON file, which is read once."""
    if not has_suffix(name, *SCHEDULE_SUFFIXES):
        get_schedule_class(named(name).name)  # refuses unknown ones and those with two copies
        return ScheduleChoice(name, None)
    schedule = load(name)
    require_one_copy(schedule)
    return ScheduleChoice(name, schedule)


@dataclass(frozen=True)
class ScheduleChoice:
    """A schedule with one copy of each stage: by name (`schedule` is None), or from a file."""

    name: str
    schedule: Schedule | None

    @property
    def splits_backward(self) -> bool:
        """Whether some backward is split into I and W."""
        if self.schedule is None:
            return find(self.name).splits_backward
        return any(action.kind is Kind.I for row in self.schedule.rows for action in actions_of(row))

    def num_stages(
        self, num_ranks: int, num_layers: int, layers_per_stage: int | None, first_less: int, last_less: int
    ) -> int:
        """The number of stages that the model is cut into."""
        num_stages = None
        if layers_per_stage is not None:
            num_stages = num_stages_for(num_layers, layers_per_stage, num_ranks, first_less, last_less)
        if self.schedule is None:
            num_stages = num_stages or num_ranks * find(self.name).stages_per_rank[0]
        elif num_stages not in (None, self.schedule.num_stages):
            raise ConfigError(
                f"{count_text(layers_per_stage, 'layer')} per stage make {count_text(num_stages, 'stage')}, and "
                f"{self.name} has {self.schedule.num_stages}: leave out the layers per stage"
            )
        else:
            num_stages = self.schedule.num_stages
        self.placement(num_ranks, num_stages)
        return num_stages

    def placement(self, num_ranks: int, num_stages: int) -> Placement:
        """Which rank holds which stage."""
        if self.schedule is None:
            return get_schedule_class(self.name).placement_of(num_ranks, num_stages)
        if (self.schedule.num_ranks, self.schedule.num_stages) != (num_ranks, num_stages):
            raise ConfigError(
                f"{self.name} is for {count_text(self.schedule.num_ranks, 'rank')} and "
                f"{count_text(self.schedule.num_stages, 'stage')}, the model has {count_text(num_stages, 'stage')} on "
                f"{count_text(num_ranks, 'rank')}: build the schedule for them"
            )
        return self.schedule.placement

    def create_runtime(
        self,
        stages: Sequence[Any],
        num_microbatches: int,
        loss_fn: Callable[..., Tensor] | None,
        scale_grads: bool = False,
    ) -> Any:
        """Create the object that runs it on this rank's stages, with torch's interface."""
        options = {"loss_fn": loss_fn, "scale_grads": scale_grads}
        if self.schedule is None:
            return get_schedule_class(self.name)(list(stages), num_microbatches, **options)
        return PipelineSchedule(list(stages), num_microbatches, **options, schedule=self.schedule)
