"""The Schedule that the stages of a rank run."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from zeropipe.core.files import SCHEDULE_SUFFIXES, has_suffix
from zeropipe.core.formats.csv import from_csv
from zeropipe.core.placement import Placement, Problem
from zeropipe.core.resize import resize
from zeropipe.core.schedule import Schedule
from zeropipe.core.units import count_text
from zeropipe.errors import ConfigError, require_positive_integers, short
from zeropipe.pipelining import private
from zeropipe.schedules.registry import Entry, build_entry
from zeropipe.schedules.user import load, named


def build_schedule(entry: Entry, ranks: int, stages: int, microbatches: int, options: Mapping[str, Any]) -> Schedule:
    """Build a registered schedule for any number of microbatches.

    If its algorithm does not support the number, a larger schedule is resized.
    """
    if stages % ranks:
        raise ConfigError(
            f"{count_text(stages, 'stage')} on {count_text(ranks, 'rank')}: {entry.name} needs the same number of "
            "stages on each"
        )
    refusal = None
    for number in range(microbatches, microbatches + 4 * stages + 1):
        try:
            found = build_entry(entry, ranks=ranks, microbatches=number, stages_per_rank=stages // ranks, **options)
        except ConfigError as error:
            refusal = refusal or error
            continue
        require_one_copy(found)
        return resize(found, microbatches)
    assert refusal is not None
    raise refusal


def resolve_schedule(schedule: Schedule | str, ranks: int, stages: int, microbatches: int) -> Schedule:
    """The schedule for a Schedule, the text of a CSV, a file name or the name of a schedule."""
    if not isinstance(schedule, Schedule | str):
        raise ConfigError(
            f"schedule={short(schedule)}: must be a Schedule, the text of a CSV, a file name, or the name of a schedule"
        )
    if isinstance(schedule, Schedule):
        found = schedule
    elif has_suffix(schedule, *SCHEDULE_SUFFIXES):
        found = load(schedule)
    elif "\n" in schedule or "," in schedule:
        found = from_csv(schedule)
    else:
        found = build_schedule(named(schedule), ranks, stages, microbatches, {})
    require_one_copy(found)
    if (found.num_ranks, found.num_stages) != (ranks, stages):
        raise ConfigError(
            f"the schedule {found.name} is for {count_text(found.num_ranks, 'rank')} and "
            f"{count_text(found.num_stages, 'stage')}, these are stages of {stages} on {count_text(ranks, 'rank')}: "
            "build it for them"
        )
    return resize(found, microbatches)


def require_one_copy(schedule: Schedule) -> None:
    """ConfigError for a schedule with two copies of each stage."""
    if len(schedule.placement.copies) > 1:
        raise ConfigError(
            f"{schedule.name} keeps two copies of each stage on two ranks, and a PipelineStage has one: use a schedule "
            "with one copy (dualpipev instead of dualpipe), or zeropipe.engine.Engine, which runs both copies"
        )


def placement_of(entry: Entry, ranks: int, stages: int) -> Placement:
    """The placement of a registered schedule, which does not depend on the number of microbatches."""
    require_positive_integers(num_ranks=ranks, num_stages=stages)
    if stages % ranks or stages // ranks not in entry.stages_per_rank:
        numbers = ", ".join(map(str, sorted(entry.stages_per_rank)))
        raise ConfigError(
            f"{count_text(stages, 'stage')} on {count_text(ranks, 'rank')}: {entry.name} takes {numbers} per rank"
        )
    return entry.placement(Problem(ranks, stages, 2 * stages))


def check_stages(schedule: Schedule, stages: Sequence[Any], name: str) -> None:
    """ConfigError for stages that the schedule does not place on this rank."""
    rank = stages[0].group_rank
    expected, got = list(schedule.placement.stages_of(rank)), sorted(stage.stage_index for stage in stages)
    if expected != got:
        raise ConfigError(
            f"{name} needs stages {expected} on rank {rank}, got {got}: its placement is "
            f"{schedule.placement.name}; see {name}.stages_of(rank, num_ranks, num_stages)"
        )
    for stage in stages:
        source = private.find_foreign_input(stage)
        if source is not None:
            raise ConfigError(
                f"stage {stage.stage_index} takes {source}: a stage gets the outputs of the previous stage, in their "
                "order; pass everything else on from stage to stage"
            )
