"""The schedule that a framework's config asks for: which stages it has, where they belong, what runs them."""

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
def chosen(words: str) -> Chosen:
    """By a name, torch's or ours, or from a CSV or JSON file, which is read once."""
    if not has_suffix(words, *SCHEDULE_SUFFIXES):
        get_schedule_class(named(words).name)  # unknown and mirrored ones are refused here
        return Chosen(words, None)
    schedule = load(words)
    require_one_copy(schedule)
    return Chosen(words, schedule)


@dataclass(frozen=True)
class Chosen:
    """A schedule of one copy, by name (`schedule` is None) or whole."""

    words: str
    schedule: Schedule | None

    @property
    def splits_backward(self) -> bool:
        """Whether some backward is cut into I and W."""
        if self.schedule is None:
            return find(self.words).splits_backward
        return any(action.kind is Kind.I for row in self.schedule.rows for action in actions_of(row))

    def num_stages(
        self, num_ranks: int, num_layers: int, layers_per_stage: int | None, first_less: int, last_less: int
    ) -> int:
        """How many stages the model is cut into."""
        wanted = None
        if layers_per_stage is not None:
            wanted = num_stages_for(num_layers, layers_per_stage, num_ranks, first_less, last_less)
        if self.schedule is None:
            wanted = wanted or num_ranks * find(self.words).stages_per_rank[0]
        elif wanted not in (None, self.schedule.num_stages):
            raise ConfigError(
                f"{count_text(layers_per_stage, 'layer')} per stage make {count_text(wanted, 'stage')}, and "
                f"{self.words} has {self.schedule.num_stages}: leave the layers per stage out"
            )
        else:
            wanted = self.schedule.num_stages
        self.placement(num_ranks, wanted)
        return wanted

    def placement(self, num_ranks: int, num_stages: int) -> Placement:
        """Which rank holds which stage."""
        if self.schedule is None:
            return get_schedule_class(self.words).placement_of(num_ranks, num_stages)
        if (self.schedule.num_ranks, self.schedule.num_stages) != (num_ranks, num_stages):
            raise ConfigError(
                f"{self.words} is for {count_text(self.schedule.num_ranks, 'rank')} and "
                f"{count_text(self.schedule.num_stages, 'stage')}, the model has {count_text(num_stages, 'stage')} on "
                f"{count_text(num_ranks, 'rank')}: build the schedule for them"
            )
        return self.schedule.placement

    def make(self, stages: Sequence[Any], num_microbatches: int, loss_fn: Callable[..., Tensor] | None) -> Any:
        """What runs it on this rank's stages, with torch's interface. Gradients are summed, not averaged."""
        if self.schedule is None:
            return get_schedule_class(self.words)(list(stages), num_microbatches, loss_fn=loss_fn, scale_grads=False)
        return PipelineSchedule(
            list(stages), num_microbatches, loss_fn=loss_fn, scale_grads=False, schedule=self.schedule
        )
