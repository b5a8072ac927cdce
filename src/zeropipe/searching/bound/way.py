"""One microbatch's way through the ranks with the least that everything can cost: what bounds are made of."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from zeropipe.searching.model import Array, Task, alone


class Way(NamedTuple):
    """One microbatch's way with the least that each pass can cost."""

    lasts: Array
    lag: Array
    weight: Array  # of a whole W, per stage
    stash: Array
    head: Array  # when each pass can begin at the earliest
    tail: Array  # the least time from the begin of a pass to the end of everything


def way_of(task: Task) -> Way:
    model, num_stages, costs = task.model, task.num_stages, task.costs
    f, i, w, b, overlap = (np.array(costs.column(name, num_stages)) for name in ("f", "i", "w", "b", "overlap"))
    # a B may be cheaper than I and W; an Overlap of two stages saves half of what each stage's own pair saves
    half = np.maximum(f + b - overlap, 0) / 2
    whole, first = np.minimum(b, i + w), np.minimum(i, b)
    beyond = max(0.0, float((half - f).max()), float((half - first).max()))
    f, i = (np.maximum(0, time - half - np.where(half > 0, beyond, 0)) for time in (f, first))
    w = np.maximum(0, whole - first)
    lasts, lag = np.concatenate([f, i[::-1]]), model.lag
    if model.blocks:  # a message is part of the sender's work
        lasts, lag = lasts + lag, np.zeros_like(lag)
    head = alone(model._replace(lasts=lasts, lag=lag))
    tail = np.zeros(2 * num_stages)
    after = 0.0
    for x in range(2 * num_stages - 1, -1, -1):
        if x >= num_stages:  # its W follows
            after = max(after, float(w[2 * num_stages - 1 - x]))
        tail[x] = after = after + lasts[x]
        if x:
            after += lag[x - 1]
    stash = np.minimum(costs.column("stash", num_stages), costs.column("activation", num_stages))
    return Way(lasts, lag, w, stash, head, tail)


def blocked_after(task: Task) -> float:
    """How much of a blocked sender's work may come after the end."""
    return float(task.model.lag.max()) if task.model.blocks else 0.0
