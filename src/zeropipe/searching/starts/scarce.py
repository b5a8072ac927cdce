"""How long the memory of each rank is needed: where that takes longest, memory decides."""

from __future__ import annotations

import numpy as np

from zeropipe.searching.model import Array, Task, alone


def in_memory(task: Task) -> tuple[Array, Array]:
    """For each pass and rank what a microbatch needs of the rank's memory from then on, and holds before.

    Both are parts of all its memory; the first is times how long, if nothing is in the microbatch's way.
    """
    model, last, begins = task.model, 2 * task.num_stages - 1, alone(task.model)
    weight, stash = model.weight * model.parts, model.frees * model.parts
    ends = begins + model.lasts
    stays, holds = np.zeros((last + 1, task.num_ranks)), np.zeros((last + 1, task.num_ranks))
    for f in range(task.num_stages):
        rank, size, owed = model.home[f], model.needs[f], stash[f] * weight[f]
        on_the_way = np.arange(f + 1, last - f + 1)
        stays[: f + 1, rank] += size * (ends[last - f] - begins[f]) + owed
        stays[on_the_way, rank] += size * (ends[last - f] - begins[on_the_way]) + owed
        holds[on_the_way, rank] += size
    room = np.clip(model.limit, 1e-290, 1e290)
    return stays / room, holds / room


def of_the_scarcest(task: Task, part: float) -> tuple[Array, Array]:
    """The same of the ranks whose memory is needed for at least that part of the longest time."""
    stays, holds = in_memory(task)
    some = np.flatnonzero(stays[0] >= part * stays[0].max())
    # in the order of memory that the compiled kernel was made for, whatever the number of ranks
    return np.ascontiguousarray(stays[:, some]), np.ascontiguousarray(holds[:, some])
