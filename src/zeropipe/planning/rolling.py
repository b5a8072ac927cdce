"""Candidates with rolling gradients: of runs whose whole gradients do not fit, those that may be the fastest."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from math import inf

from zeropipe.planning.candidates import OversizedRun, Variant, list_candidates, lower_bounds
from zeropipe.planning.context import PlanContext
from zeropipe.planning.rows import Candidate, PlanRow

MAX_CANDIDATES = 120  # with rolling gradients, the fastest with whole ones


def rolling_candidates(
    context: PlanContext, rows: Sequence[PlanRow], oversized: Sequence[OversizedRun], variants: Sequence[Variant]
) -> list[Candidate]:
    """Candidates that may fit with rolling gradients, and then be faster than the best of `rows`.

    Rolling gradients only add time. So the step with whole ones, or the least time of a run that was not simulated, is
    compared with the best.
    """
    best = min((row.step for row in rows if row.fits), default=inf)
    found = [
        (row.step, candidate)
        for row in rows
        if 0 < row.excess < row.memory.gradients and row.step < best and row.candidate.layout.num_shards > 1
        for candidate in _with_policies(row.candidate)
    ]
    for run in (misfit.run for misfit in oversized if misfit.run.layout.num_shards > 1):
        seconds, needs = lower_bounds(context, run, rolling=True)
        if needs <= context.memory_limit and seconds < best:
            every = list_candidates([run], variants, context.costs.num_layers)
            found += [(seconds, replace(candidate, gradients="rolling")) for candidate in every]
    ordered = [candidate for _, candidate in sorted(found)]
    return list(dict.fromkeys(ordered))[:MAX_CANDIDATES]


def _with_policies(candidate: Candidate) -> Iterator[Candidate]:
    """The candidate with rolling gradients; of several stages per rank also with one of them whole."""
    for policy in ("rolling", "rolling:1")[: candidate.stages_per_rank]:
        yield replace(candidate, gradients=policy)
