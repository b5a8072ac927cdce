"""Candidates that checkpoint some F: of those that fit with all F checkpointed only, those that may be the fastest."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from math import inf

from zeropipe.planning.rows import Candidate, PlanRow

MAX_CANDIDATES = 24  # with checkpointed F, those that should be the fastest: each is simulated several times


def checkpointed_candidates(rows: Sequence[PlanRow]) -> list[Candidate]:
    """Candidates that may be faster than the best of `rows` if some of their F are checkpointed.

    Each fits with ac full and not with none. Its time is taken to grow evenly from the one to the other as memory
    falls, by as much as must be freed.
    """
    best = min((row.step for row in rows if row.fits), default=inf)
    full: dict[Candidate, PlanRow] = {}
    for row in rows:
        candidate = row.candidate
        if candidate.ac == "full" and row.fits and candidate.layout.pp > 1 and not candidate.offload:
            key = replace(candidate, cut="")
            full[key] = min(full.get(key, row), row, key=lambda one: one.step)
    found = []
    for row in rows:
        checkpointed = full.get(replace(row.candidate, cut="", ac="full"))
        if row.candidate.ac != "none" or row.fits or checkpointed is None:
            continue
        saved = row.memory.peak - checkpointed.memory.peak
        seconds = row.step + row.excess / saved * (checkpointed.step - row.step) if saved > 0 else inf
        if seconds < best:
            found.append((seconds, replace(row.candidate, checkpointing=True)))
    return list(dict.fromkeys(candidate for _, candidate in sorted(found)))[:MAX_CANDIDATES]
