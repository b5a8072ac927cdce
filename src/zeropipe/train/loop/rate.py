"""The learning rate as a function of the step: nothing to save, and the same after a resume."""

from __future__ import annotations

from math import ceil, cos, pi

from zeropipe.train.config.tables import RateTable


def factor(table: RateTable, step: int, num_steps: int) -> float:
    """The part of the highest rate that step `step` (from 0) of `num_steps` has; the last one has `final`.

    >>> [round(factor(RateTable(shape="linear", warmup=2, final=0.0), step, 5), 2) for step in range(5)]
    [0.5, 1.0, 1.0, 0.5, 0.0]
    """
    if step < table.warmup:
        return (step + 1) / table.warmup
    if table.shape == "constant":
        return 1.0
    start = table.warmup
    if table.shape == "wsd":
        start = max(start, num_steps - ceil(table.decay * num_steps))
    if step < start:
        return 1.0
    gone = min(1.0, (step - start) / max(1, num_steps - 1 - start))
    fallen = (1 - cos(pi * gone)) / 2 if table.shape == "cosine" else gone
    return 1.0 - (1.0 - table.final) * fallen
