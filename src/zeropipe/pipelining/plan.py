"""Which Schedule the stages of a rank run."""

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


def built(entry: Entry, ranks: int, stages: int, microbatches: int, options: Mapping[str, Any]) -> Schedule:
    """The schedule of an entry for any number of microbatches.

    Where its algorithm has no order for that number, it is cut from a larger one.
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


def given(what: Schedule | str, ranks: int, stages: int, microbatches: int) -> Schedule:
    """A Schedule, the text of a CSV, a file that holds one, or a name."""
    if not isinstance(what, Schedule | str):
        raise ConfigError(f"schedule={short(what)}: give a Schedule, the text of a CSV, a file with one, or a name")
    if isinstance(what, Schedule):
        found = what
    elif has_suffix(what, *SCHEDULE_SUFFIXES):
        found = load(what)
    elif "\n" in what or "," in what:
        found = from_csv(what)
    else:
        found = built(named(what), ranks, stages, microbatches, {})
    require_one_copy(found)
    if (found.num_ranks, found.num_stages) != (ranks, stages):
        raise ConfigError(
            f"the schedule {found.name} is for {count_text(found.num_ranks, 'rank')} and "
            f"{count_text(found.num_stages, 'stage')}, these are stages of {stages} on {count_text(ranks, 'rank')}: "
            "build it for them"
        )
    return resize(found, microbatches)


def require_one_copy(schedule: Schedule) -> None:
    """ConfigError for a schedule that keeps each stage twice."""
    if len(schedule.placement.copies) > 1:
        raise ConfigError(
            f"{schedule.name} keeps two copies of each stage on two ranks, and a PipelineStage has one: use a schedule "
            "with one copy (dualpipev instead of dualpipe), or zeropipe.engine.Engine, which runs both copies"
        )


def placement_of(entry: Entry, ranks: int, stages: int) -> Placement:
    """Where an entry puts stages, whatever the number of microbatches."""
    require_positive_integers(num_ranks=ranks, num_stages=stages)
    if stages % ranks or stages // ranks not in entry.stages_per_rank:
        numbers = ", ".join(map(str, sorted(entry.stages_per_rank)))
        raise ConfigError(
            f"{count_text(stages, 'stage')} on {count_text(ranks, 'rank')}: {entry.name} takes {numbers} per rank"
        )
    return entry.placement(Problem(ranks, stages, 2 * stages))


def check_stages(schedule: Schedule, stages: Sequence[Any], name: str) -> None:
    """ConfigError for stages that are not those which the schedule has on this rank."""
    rank = stages[0].group_rank
    wanted, got = list(schedule.placement.stages_of(rank)), sorted(stage.stage_index for stage in stages)
    if wanted != got:
        raise ConfigError(
            f"{name} wants stages {wanted} on rank {rank}, got {got}: its placement is {schedule.placement.name}, ask "
            f"{name}.stages_of(rank, num_ranks, num_stages)"
        )
    for stage in stages:
        stranger = private.stranger(stage)
        if stranger is not None:
            raise ConfigError(
                f"stage {stage.stage_index} takes {stranger}: a stage gets the outputs of the stage before, in their "
                "order; hand everything else on from stage to stage"
            )
