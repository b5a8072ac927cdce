"""Candidates from registered schedules, built-in ones and users' own; and the rows that always fit."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from zeropipe.core.schedule import Schedule
from zeropipe.errors import ZeropipeError
from zeropipe.schedules.registry import build_entry, entries
from zeropipe.schedules.validate import validate_user_schedule
from zeropipe.searching.tables import Array
from zeropipe.searching.task import SearchTask


def registered_schedules(task: SearchTask) -> list[Schedule]:
    """Return every valid registered schedule that has the placement of the task."""
    problem, found = task.problem, []
    per_rank = problem.stages_per_rank
    for entry in sorted(entries(), key=lambda entry: entry.stages_per_rank[0] != per_rank):
        if per_rank not in entry.stages_per_rank or entry.sliced:
            continue
        try:
            schedule = build_entry(
                entry, ranks=problem.num_ranks, microbatches=problem.num_microbatches, stages_per_rank=per_rank
            )
            validate_user_schedule(schedule)
        except ZeropipeError:
            continue
        if schedule.placement.copies == task.placement.copies:
            found.append(replace(schedule, placement=task.placement))
    return found


def sequential_rows(task: SearchTask) -> Array:
    """Return rows that run one microbatch after the other: if anything fits, they do."""
    return np.concatenate([np.tile(passes, task.num_microbatches) for passes in task.passes_by_rank])
