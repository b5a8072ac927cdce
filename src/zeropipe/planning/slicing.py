"""Candidates with slices of sequences: of runs whose costs are known for them, those that may be the fastest."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from math import inf

from zeropipe.planning.candidates import (
    MAX_ACTIONS,
    MAX_STAGES_PER_RANK,
    Variant,
    list_candidates,
    list_variants,
    lower_bounds,
)
from zeropipe.planning.context import PlanContext
from zeropipe.planning.rows import Candidate, PlanRow, Run
from zeropipe.schedules.registry import entries, find

MAX_CANDIDATES = 60  # with slices, those with the least time
MIN_SLICE = 4096  # tokens of a slice on average: products of fewer are slower than a part of the whole


def default_slices(sequence: int, shortest: int) -> list[int]:
    """1, and for sequences of at least `shortest` tokens the powers of two that leave a slice MIN_SLICE of them."""
    longest = min(sequence // MIN_SLICE, 16) if sequence >= shortest else 1
    return [2**n for n in range(longest.bit_length())]


def sliced_variants(names: Sequence[str] | None) -> list[Variant]:
    """The schedules that can have slices, with their stages per rank; of `names`, if there are any."""
    if names is not None:
        return [variant for variant in list_variants(names, has_overlap_costs=True) if find(variant[0]).has_slices]
    return [
        (entry.name, per_rank)
        for entry in entries()
        if entry.is_ours and entry.has_slices
        for per_rank in entry.stages_per_rank
        if per_rank <= MAX_STAGES_PER_RANK and (per_rank > 1 or len(entry.stages_per_rank) == 1)
    ]


def sliced_candidates(
    context: PlanContext, rows: Sequence[PlanRow], runs: Sequence[Run], numbers: Sequence[int],
    names: Sequence[str] | None,
) -> list[Candidate]:  # fmt: skip
    """Candidates with slices that may fit, and then be faster than the best of `rows`, which have none."""
    best, variants = min((row.step for row in rows if row.fits), default=inf), sliced_variants(names)
    found: list[tuple[float, Candidate]] = []
    for run in runs:
        setting = context.setting(run)
        if run.layout.cp > 1 or run.layout.sequence_parallel or not context.costs.has_slices(setting):
            continue
        for slices in numbers:
            stages = run.layout.pp * MAX_STAGES_PER_RANK
            if slices == 1 or 3 * run.num_microbatches * slices * stages > MAX_ACTIONS:
                continue
            seconds, needs = lower_bounds(context, run, slices=slices)
            if seconds < best and needs <= context.memory_limit:
                every = _list_of_run(run, variants, context.costs.num_layers)
                found += [(seconds, replace(candidate, slices=slices)) for candidate in every]
    return [candidate for _, candidate in sorted(found)][:MAX_CANDIDATES]


def _list_of_run(run: Run, variants: Sequence[Variant], num_layers: int) -> list[Candidate]:
    """The candidates of a run; without a pipeline all schedules are equal."""
    if run.layout.pp > 1:
        return list_candidates([run], variants, num_layers)
    return [replace(one, schedule="seq1f1b") for one in list_candidates([run], (), num_layers) if variants]
