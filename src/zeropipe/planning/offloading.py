"""Candidates that copy activations to the host: of those that do not fit otherwise, those that may be the fastest."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from math import inf

from zeropipe.planning.candidates import OversizedRun, Variant, list_candidates, lower_bounds
from zeropipe.planning.context import PlanContext
from zeropipe.planning.rows import Candidate, PlanRow

HOST_MEMORY = 128e9  # bytes that the activations of a GPU may have: half of its part of a machine with 2 TB and 8 GPUs
MAX_CANDIDATES = 24  # with offload, the fastest without it: each is simulated several times


def offloaded_candidates(
    context: PlanContext, rows: Sequence[PlanRow], oversized: Sequence[OversizedRun], variants: Sequence[Variant]
) -> list[Candidate]:
    """Candidates that may fit with activations on the host, and then be faster than the best of `rows`.

    Copies only add time. So the step without them, or the least time of a run that was not simulated, is compared with
    the best.
    """
    if not context.has_host_link:
        return []
    best = min((row.step for row in rows if row.fits), default=inf)
    found = [
        (row.step, replace(row.candidate, offload=True))
        for row in rows
        if 0 < row.excess < row.memory.activations and row.step < best and row.candidate.layout.pp > 1
        and row.candidate.slices == 1
    ]  # fmt: skip
    for run in (misfit.run for misfit in oversized if misfit.run.layout.pp > 1):
        seconds, needs = lower_bounds(context, run, offload=True)
        if needs <= context.memory_limit and seconds < best:
            every = list_candidates([run], variants, context.costs.num_layers)
            found += [(seconds, replace(candidate, offload=True)) for candidate in every]
    return list(dict.fromkeys(candidate for _, candidate in sorted(found)))[:MAX_CANDIDATES]
