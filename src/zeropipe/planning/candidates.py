"""The candidates of a plan: every layout, microbatch size and mode that may fit, with every schedule and cut."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from itertools import groupby
from typing import NamedTuple

from zeropipe.errors import ConfigError
from zeropipe.planning.context import PlanContext
from zeropipe.planning.layouts import Layout, max_stages
from zeropipe.planning.rows import Candidate, Run
from zeropipe.schedules.registry import entries, find
from zeropipe.sim.layer_costs import Held, LayerCost

MAX_STAGES_PER_RANK = 4
MAX_ACTIONS = 1_000_000  # of a schedule

Variant = tuple[str, int]  # a schedule and its stages per rank


class OversizedRun(NamedTuple):
    """A run whose weights and one microbatch are over the memory limit."""

    run: Run
    needs: float
    excess: float


def list_runs(
    context: PlanContext, batch: int, layouts: Iterable[Layout], sizes: Sequence[int], modes: Sequence[str]
) -> list[Run]:
    """Every run that divides the batch evenly, is not too large to simulate, and has costs."""
    found = []
    for layout in layouts:
        for size in sizes:
            number, rest = divmod(batch, layout.dp_shard * size)
            if rest or not number or 3 * number * layout.pp * MAX_STAGES_PER_RANK > MAX_ACTIONS:
                continue
            for mode in modes:
                run = Run(layout, number, size, mode)
                try:
                    context.setting(run)
                except ConfigError:
                    continue
                found.append(run)
    return found


def drop_dominated(runs: Sequence[Run], context: PlanContext) -> list[Run]:
    """Of two runs that differ in sequence parallelism only: no run in which every layer costs as much or more."""
    known, found = set(runs), []
    for run in runs:
        is_parallel = run.layout.sequence_parallel
        other = run._replace(layout=replace(run.layout, sequence_parallel=not is_parallel))
        if other not in known or not _is_no_better(context, run, other, is_parallel):
            found.append(run)
    return found


def _is_no_better(context: PlanContext, run: Run, other: Run, on_equal: bool) -> bool:
    """Whether no layer takes less time or memory in `run` than in `other`; `on_equal` if all take the same."""
    both = [context.setting(one).kinds for one in (run, other)]
    pairs = [
        (getattr(both[0][kind], name), getattr(both[1][kind], name))
        for kind in both[0]
        for name in ("f", "i", "w", "full_backward", "activation", "stash", "workspace", "message")
    ]
    return on_equal if all(a == b for a, b in pairs) else all(a >= b for a, b in pairs)


def drop_too_large(context: PlanContext, runs: Sequence[Run]) -> tuple[list[Run], list[OversizedRun]]:
    """Return the runs that may fit, in the order of their least time, and those that no schedule can make fit.

    Those that may fit only if weights are gathered for every microbatch come last.
    """
    possible, oversized = [], []
    for run in runs:
        seconds, needs = lower_bounds(context, run)
        saved = _regathered_bytes(context, run)
        if needs - saved > context.memory_limit:
            oversized.append(OversizedRun(run, needs - saved, needs - saved - context.memory_limit))
        else:
            possible.append((needs > context.memory_limit, seconds, run))
    return [run for *_, run in sorted(possible)], sorted(oversized, key=lambda misfit: misfit.excess)


def least_memory(context: PlanContext, run: Run) -> float:
    """A lower bound of a run's bytes with any schedule."""
    return lower_bounds(context, run)[1] - _regathered_bytes(context, run)


def lower_bounds(
    context: PlanContext, run: Run, rolling: bool = False, slices: int = 1, offload: bool = False
) -> tuple[float, float]:
    """Lower bounds of a run's seconds and bytes: all work, and weights and one microbatch, divided evenly by ranks.

    Weights are gathered once per step. With `rolling` gradients those of sharded stages are not whole. A rank waits for
    the first of `slices` only, and the first backward of a stage needs the activations of all slices. With `offload` a
    rank has those of one of its stages at least.
    """
    costs, kinds, pp = context.costs, context.setting(run).kinds, run.layout.pp
    layers = [*context.decoder_layers(run), *(kinds[kind] for kind in (*costs.before, *costs.after))]
    work, exchanging = (sum(map(time, layers)) for time in (_work, lambda layer: layer.exchanging))
    work, forward = max(work - exchanging, exchanging), sum(layer.f for layer in layers)
    held = Held.sum(layer.held for layer in layers)
    after, full = (sum(kinds[kind].activation for kind in part) for part in (costs.after, costs.after_full))
    least_activations = sum(layer.activation for layer in layers) - (max(0.0, after - full) if costs.after_full else 0)
    if costs.tied:
        shared = kinds[costs.before[0]]
        held = held._replace(
            trained=held.trained - min(shared.num_trained, held.trained),
            frozen=held.frozen - min(shared.num_frozen, held.frozen),
        )
    state, shards = costs.state_of(run.layout.tp), run.layout.shards
    least_state = state.resident(held, shards)
    if rolling:
        whole = held.trained * (1 - 1 / shards.rest) + held.experts * (1 - 1 / shards.experts)
        least_state -= whole * state.gradients
    if slices > 1:
        forward = _first_slice_seconds(context, run, layers, slices)
    if offload:
        least_activations /= MAX_STAGES_PER_RANK
    needs = (least_state + least_activations) / pp
    return (run.num_microbatches * work + (pp - 1) * forward / pp) / pp, needs


def _first_slice_seconds(context: PlanContext, run: Run, layers: Sequence[LayerCost], slices: int) -> float:
    """Seconds of F of the first slice, whose tokens attend to each other only."""
    share = context.slice_shares(run, slices)[0]
    return sum(share * (layer.f - layer.f_attention) + share**2 * layer.f_attention for layer in layers)


def _regathered_bytes(context: PlanContext, run: Run) -> float:
    """Bytes of full weights that a rank need not have all the time, if they may be gathered for every microbatch."""
    if run.layout.num_shards == 1 or "regather" not in context.shard_modes:
        return 0.0
    held = Held.sum(layer.held for layer in context.decoder_layers(run))
    return context.costs.state.full_weights(held.trained, held.frozen) / run.layout.pp


def _work(layer: LayerCost) -> float:
    return layer.f + layer.full_backward


def list_variants(names: Sequence[str] | None, has_overlap_costs: bool) -> list[Variant]:
    """The schedules `names` with their stages per rank; by default all built-in ones.

    Schedules made of Overlaps are a default only if the costs have the time of an Overlap.
    """
    if names is None:
        names = [entry.name for entry in entries() if entry.is_ours and (has_overlap_costs or not entry.overlaps)]
        names = [name for name in names if not find(name).sliced]
    return list(dict.fromkeys(variant for name in names for variant in _parse_variants(name)))


def _parse_variants(name: str) -> list[Variant]:
    """`interleaved` with its stages per rank, or `interleaved:v=3` with 3.

    Schedules that are made for several stages per rank have one only if their name says so: other names are for that.
    """
    base, colon, number = str(name).partition(":v=")
    entry = find(base if number.isdecimal() else name)
    if not colon:
        has_one = entry.stages_per_rank[0] == 1
        return [(entry.name, v) for v in entry.stages_per_rank if (has_one or v > 1) and v <= MAX_STAGES_PER_RANK]
    if int(number) not in entry.stages_per_rank:
        raise ConfigError(f"{name}: {entry.name} has {', '.join(map(str, entry.stages_per_rank))} stages per rank")
    return [(entry.name, int(number))]


def list_candidates(
    runs: Iterable[Run], variants: Sequence[Variant], num_layers: int, for_experts: Sequence[Variant] = ()
) -> list[Candidate]:
    """Every run with every schedule that has no more stages than the layers allow, and every cut.

    Without a pipeline all schedules are equal, so only one is a candidate. Runs with divided experts also have the
    schedules `for_experts`.
    """
    return [
        Candidate(run.layout, name, per_rank, run.num_microbatches, run.microbatch_size, run.ac, cut)
        for run in runs
        for name, per_rank in _choose_variants(run.layout, variants, for_experts)
        for cut in _list_cuts(run.layout.pp * per_rank, num_layers)
    ]


def _choose_variants(layout: Layout, variants: Sequence[Variant], for_experts: Sequence[Variant]) -> Sequence[Variant]:
    if layout.pp == 1:
        return [("1f1b", 1)]
    return list(dict.fromkeys([*variants, *for_experts])) if layout.ep > 1 else variants


def _list_cuts(num_stages: int, num_layers: int) -> Iterator[str]:
    if 1 < num_stages <= max_stages(num_layers):
        yield "balanced"
    if num_stages <= num_layers:
        yield "even"


def group_by_schedule(candidates: Iterable[Candidate]) -> list[list[Candidate]]:
    """Group candidates that run the same schedule."""

    def key(candidate: Candidate) -> tuple[str, int, int, int, int]:
        sizes = candidate.layout.pp, candidate.num_microbatches, candidate.slices
        return candidate.schedule, candidate.stages_per_rank, *sizes

    return [list(group) for _, group in groupby(sorted(dict.fromkeys(candidates), key=key), key)]
