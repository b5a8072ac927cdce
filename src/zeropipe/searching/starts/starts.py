"""Schedules with a name, and the one that always fits, as starts of a search."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from zeropipe.core.action import W
from zeropipe.core.packed import kind_of
from zeropipe.core.schedule import Schedule
from zeropipe.errors import ZeropipeError
from zeropipe.schedules.registry import build_entry, entries
from zeropipe.searching.model import Array, Task, pass_of
from zeropipe.searching.right import require_right


def named(task: Task) -> list[Schedule]:
    """Every right schedule with a name that has this placement."""
    problem, found = task.problem, []
    per_rank = problem.stages_per_rank
    for entry in sorted(entries(), key=lambda entry: entry.stages_per_rank[0] != per_rank):
        if per_rank not in entry.stages_per_rank:
            continue
        try:
            schedule = build_entry(
                entry,
                ranks=problem.num_ranks,
                microbatches=problem.num_microbatches,
                stages_per_rank=per_rank,
            )
            require_right(schedule)
        except ZeropipeError:
            continue
        if schedule.placement.copies == task.placement.copies:
            found.append(replace(schedule, placement=task.placement))
    return found


def passes_of(schedule: Schedule) -> Array:
    """The rows of a schedule as passes: F, and I or B."""
    codes = np.frombuffer(schedule.packed.codes, np.int64)
    return pass_of(codes[kind_of(codes) != W], schedule.num_stages)


def one_by_one(task: Task) -> Array:
    """One microbatch after the other: whatever can fit at all fits so."""
    return np.concatenate([np.tile(passes, task.num_microbatches) for passes in task.passes_by_rank])
