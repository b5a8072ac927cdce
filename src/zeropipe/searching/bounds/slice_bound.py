"""A lower bound of the makespan with slices: by the work of each rank, and the paths of slices to it and from it.

Memory is left out, so the bound holds under every limit, and with activations on the host.

    head    On every stage the first F is one of slice 0. So a rank starts after F of slice 0 on the stages before it.
    tail    On every stage the last B or I is one of slice 0. After a rank's last one, which follows all of its F, those
            of slice 0 run on the stages before it. Meanwhile the rank has at most W to run.
    turn    A rank's first B or I is one of the last slice. It follows F of all slices on the first stage, and the path
            of the last one to the end and back.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import numpy as np

from zeropipe.core.placement import Placement
from zeropipe.core.schedule import Schedule
from zeropipe.errors import ConfigError
from zeropipe.searching.tables import Array
from zeropipe.sim.costs import Costs
from zeropipe.sim.slice_costs import SliceCosts

ROUNDING = 1e-12  # relative, of sums of times


def slice_bound(schedule: Schedule, costs: Costs) -> float:
    """A lower bound of the makespan of every schedule with the slices and the placement of `schedule`."""
    if len(schedule.placement.copies) > 1:
        raise ConfigError(f"{schedule.name} has two copies of the model: bounds are for one")
    sliced = SliceCosts.of(schedule, costs)
    f, first, w = _least_times(sliced, schedule.num_slices)
    lag = _lags(schedule, costs, sliced.shares)
    heads = np.concatenate([[0.0], np.cumsum(f[0] + lag[0])])[:-1]  # F of slice 0 on the stages before
    before = np.concatenate([[0.0], np.cumsum(lag[0] + first[0])])  # B or I of slice 0 from a stage to the first one
    last = f[:, 0].sum() + lag[-1][:-1].sum() + f[-1][1:].sum()  # the end of F of the last slice on the last stage
    turns = last + np.cumsum((first[-1] + np.concatenate([lag[-1][:-1], [0.0]]))[::-1])[::-1]  # ends of its backwards
    return max(
        _rank_bound(schedule.placement, rank, schedule.num_microbatches, (f, first, w), (heads, before, turns))
        for rank in range(schedule.num_ranks)
    ) * (1 - ROUNDING)


def _rank_bound(
    placement: Placement, rank: int, num_microbatches: int, times: tuple[Array, Array, Array],
    paths: tuple[Array, Array, Array],
) -> float:  # fmt: skip
    f, first, w = times
    heads, before, turns = paths
    stages = list(placement.stages_of(rank))
    low, high = stages[0], stages[-1]
    # the chain from the rank's last backward on its first stage, and the W of slice 0 after each link of it
    tail = max(float(before[low] - before[stage] + w[0][stage]) for stage in range(low + 1))
    passes = num_microbatches * float((f[:, stages] + first[:, stages]).sum())
    backwards = num_microbatches * float(first[:, stages].sum()) - float(first[-1][high])
    rest = num_microbatches * float(w[:, stages].sum())
    return max(
        float(heads[low]) + max(passes + tail, passes + rest),
        float(turns[high]) + max(backwards + tail, backwards + rest),
    )


def _least_times(sliced: SliceCosts, num_slices: int) -> tuple[Array, Array, Array]:
    """The least time of F, of the first part of a backward, and of the rest of it, by slice and stage.

    An Overlap of two saves half of what each one's own pair saves, at most.
    """
    f, b, i, w, overlap = (np.array(column).reshape(num_slices, -1) for column in sliced.times())
    saved = np.maximum(f + b - overlap, 0) / 2
    full, first = np.minimum(b, i + w), np.minimum(i, b)
    excess = max(0.0, float((saved - f).max()), float((saved - first).max()))
    less = saved + np.where(saved > 0, excess, 0.0)
    return np.maximum(0, f - less), np.maximum(0, first - less), np.maximum(0, full - first)


def _lags(schedule: Schedule, costs: Costs, shares: Sequence[float]) -> Array:
    """The time of a message of each slice from each stage to the next one; 0 after the last stage."""
    message = costs.column("message", schedule.num_stages)
    lags = np.zeros((len(shares), schedule.num_stages))
    for stage, edge in enumerate(pairwise(schedule.placement.copies[0])):
        if edge[0] != edge[1]:
            link = costs.link(*edge)
            travel = message[stage] / link.bandwidth if link.bandwidth else 0.0
            lags[:, stage] = np.array(shares) * travel + (link.p2p or 0.0)
    return lags
