"""Score one candidate: simulate its pipeline, add gradient sums and the optimizer, attribute seconds and bytes."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from zeropipe.core.action import B, F, I, Kind, W
from zeropipe.core.packed import is_joined, kind_of, microbatch_of, stage_of
from zeropipe.core.placement import Placement
from zeropipe.core.schedule import Schedule
from zeropipe.core.timeline import Timeline
from zeropipe.errors import ConfigError
from zeropipe.planning.context import PlanContext
from zeropipe.planning.rows import Candidate, PlanRow, RankMemory, StepSeconds
from zeropipe.sim.checkpointing import with_checkpointing
from zeropipe.sim.costs import Costs
from zeropipe.sim.layer_costs import Held, LayerCost, Shards
from zeropipe.sim.offload import with_offload
from zeropipe.sim.simulate import simulate
from zeropipe.sim.slice_costs import SliceCosts

_WORKSPACES = {F: "f_workspace", B: "workspace", I: "i_workspace"}
OPTIMIZER_TRAFFIC = 2.0  # bytes that an optimizer step moves per byte of a parameter's state: read and written


@dataclass(frozen=True)
class Simulation:
    """A candidate's stages and their simulation, with and without gathers and reductions."""

    candidate: Candidate
    counts: tuple[int, ...]  # layers per stage
    stages: list[list[LayerCost]]
    parameters: list[int]  # of each rank
    trained: list[int]  # the parameters of each rank that are not frozen
    experts: list[int]  # those of divided experts
    resident_costs: Costs  # full weights and gradients are resident all the time
    pipeline: Timeline  # with `resident_costs`
    timeline: Timeline  # with gathers and reductions
    costs: Costs | None  # of gathers and reductions; None if stages are not sharded

    def held(self, rank: int) -> Held:
        """The parameters of a rank."""
        trained, experts = self.trained[rank], self.experts[rank]
        return Held(trained - experts, self.parameters[rank] - trained, experts)

    @property
    def shards(self) -> Shards:
        return self.candidate.layout.shards


def simulate_candidate(
    context: PlanContext, candidate: Candidate, schedule: Schedule, counts: Sequence[int]
) -> Simulation:
    """Simulate one candidate; ConfigError if it does not fit with all activations offloaded or F checkpointed."""
    context = context.for_schedule(schedule)
    if candidate.offload:
        schedule = with_offload(schedule, context.stage_costs(candidate, counts, schedule.placement), "fit")
    if candidate.checkpointing and not schedule.checkpointed:
        schedule = with_checkpointing(schedule, context.stage_costs(candidate, counts, schedule.placement))
    resident_costs = context.stage_costs(candidate, counts, schedule.placement, gathers=False)
    pipeline = timeline = simulate(schedule, resident_costs)
    costs = None
    if candidate.layout.num_shards > 1:
        costs = context.stage_costs(candidate, counts, schedule.placement)
        timeline = simulate(schedule, costs)
    stages = context.costs.stage_layers(counts, context.setting(candidate), candidate.ac)
    held = [[layer.parameters for layer in stage] for stage in stages]
    learned = [[layer.num_trained for layer in stage] for stage in stages]
    divided = [[layer.experts for layer in stage] for stage in stages]
    parameters, trained, experts = (
        _count_parameters(each, schedule.placement, schedule.num_ranks, context.costs.tied)
        for each in (held, learned, divided)
    )
    return Simulation(
        candidate, tuple(counts), stages, parameters, trained, experts, resident_costs, pipeline, timeline, costs
    )


def score_candidate(context: PlanContext, candidate: Candidate, schedule: Schedule, counts: Sequence[int]) -> PlanRow:
    """Simulate one candidate and create its row."""
    return create_row(context, simulate_candidate(context, candidate, schedule, counts))


def create_row(context: PlanContext, run: Simulation) -> PlanRow:
    """Attribute the seconds and the memory of a simulated candidate."""
    timeline = run.timeline
    fullest = max(range(timeline.num_ranks), key=lambda rank: timeline.peak_memory[rank])
    return PlanRow(
        run.candidate, run.counts, _attribute_seconds(context, run), attribute_memory(context, run, fullest),
        context.memory_limit, timeline.makespan, timeline.idle_fraction, timeline.bubble,
        own_schedule=timeline.schedule if run.candidate.offload or run.candidate.checkpointing else None,
        host_memory=max(timeline.peak_host_memory),
    )  # fmt: skip


def _count_parameters(stages: list[list[int]], placement: Placement, num_ranks: int, is_tied: bool) -> list[int]:
    """Parameters of each rank, of all its copies; a tied weight once. `stages` has those of each stage's layers."""
    each = [sum(stage) for stage in stages]
    counts = []
    for rank in range(num_ranks):
        held = placement.stages_of(rank)
        shared = min(stages[0][0], each[-1]) if is_tied and {0, len(stages) - 1} <= set(held) else 0
        counts.append(sum(each[stage] for stage in held) - shared)
    return counts


def _attribute_seconds(context: PlanContext, run: Simulation) -> StepSeconds:
    candidate, pipeline, state = run.candidate, run.pipeline, context.costs.state
    layers = [layer for stage in run.stages for layer in stage]
    work = candidate.num_microbatches * sum(layer.f + layer.full_backward - _part_seconds(layer) for layer in layers)
    marked = _marked_seconds(run)
    again = _recompute_seconds(context, candidate) + marked
    recomputed = again / (work + marked) if work > 0 else 0.0  # a fraction of all work
    mean, busiest = sum(pipeline.busy) / pipeline.num_ranks, max(pipeline.busy)
    stepped = max(run.held(rank).count_stepped(run.shards) for rank in range(pipeline.num_ranks))
    moved = OPTIMIZER_TRAFFIC * stepped * (state.gradients + state.optimizer)
    exposed = _exposed_seconds(run, mean)
    parts = candidate.num_microbatches * sum(map(_part_seconds, layers)) / pipeline.num_ranks
    computing = mean - exposed - parts
    return StepSeconds(
        work=computing * (1 - recomputed), recompute=computing * recomputed, imbalance=busiest - mean,
        exchange=exposed, parts=parts,
        schedule=pipeline.makespan - busiest,
        data=run.timeline.makespan - pipeline.makespan + _sum_seconds(context, run),
        optimizer=moved / context.optimizer_bandwidth if context.optimizer_bandwidth else 0.0,
    )  # fmt: skip


def _part_seconds(layer: LayerCost) -> float:
    """Seconds of the exchanges of attention in an F and an I."""
    return layer.f_exchange + layer.i_exchange


def _exposed_seconds(run: Simulation, busy: float) -> float:
    """The mean over ranks of the time in which they exchange rows of experts and do not compute."""
    layers = [layer for stage in run.stages for layer in stage]
    if not any(layer.exchanging for layer in layers):
        return 0.0
    computing = sum(layer.f + layer.full_backward - layer.exchanging for layer in layers)
    return max(0.0, busy - run.candidate.num_microbatches * computing / run.pipeline.num_ranks)


def _recompute_seconds(context: PlanContext, candidate: Candidate) -> float:
    """Seconds of recomputation of all layers; 0 if the costs have no setting without checkpointing."""
    if candidate.ac == "none":
        return 0.0
    try:
        plain = context.setting(replace(candidate, ac="none"))
    except ConfigError:
        return 0.0
    layers = zip(context.costs.layers, context.decoder_layers(candidate), strict=True)
    return candidate.num_microbatches * sum(
        max(0.0, layer.i - layer.i_exchange - plain.kinds[kind].i + plain.kinds[kind].i_exchange)
        for kind, layer in layers
    )


def _marked_seconds(run: Simulation) -> float:
    """Seconds of recomputation of the F that the schedule marks."""
    schedule, costs, num_stages = run.pipeline.schedule, run.resident_costs, len(run.stages)
    if not schedule.checkpointed:
        return 0.0
    plain, marked = (SliceCosts.of(schedule, one) for one in (costs, costs.with_all_checkpointed(num_stages)))
    times, marked_times = plain.times()[I], marked.times()[I]
    rows = [number % len(plain.shares) * num_stages + stage for stage, number in schedule.checkpointed]
    return sum(marked_times[row] - times[row] for row in rows)


def _sum_seconds(context: PlanContext, run: Simulation) -> float:
    """Seconds at the end of a step in which ranks with the same weights sum gradients: copies, tied ends, replicas."""
    placement, costs = run.timeline.schedule.placement, context.costs
    last = run.timeline.num_ranks - 1
    pairs: list[tuple[int, int, float]] = []
    if len(placement.copies) > 1:
        pairs = [(rank, last - rank, number) for rank, number in enumerate(run.trained)]
    elif costs.tied:
        pairs = [(placement.rank_of(0), placement.rank_of(len(run.stages) - 1), run.stages[0][0].num_trained)]
    longest = 0.0
    for rank, other, number in pairs:
        bandwidth = run.resident_costs.link(rank, other).bandwidth if rank != other else None
        if bandwidth:
            longest = max(longest, number * costs.state.gradients / bandwidth)
    return longest + _copy_seconds(context, run)


def _copy_seconds(context: PlanContext, run: Simulation) -> float:
    """Seconds of the ring all-reduce over copies of weights, which sends nearly all of a rank's gradients twice."""
    layout = run.candidate.layout
    bandwidth = layout.copy_link(context.costs, context.gpus_per_node).bandwidth
    if layout.num_copies == 1 or not bandwidth:
        return 0.0
    size = max(context.costs.state.sum_bytes(run.held(rank), run.shards) for rank in range(run.pipeline.num_ranks))
    return 2 * (layout.num_copies - 1) / layout.num_copies * size / bandwidth


def attribute_memory(context: PlanContext, run: Simulation, rank: int, has_activations: bool = True) -> RankMemory:
    """Attribute the memory of a rank at its peak; of costs without activations, where its weights and gradients are."""
    shards, held = run.shards, run.held(rank)
    state = context.costs.state_of(run.candidate.layout.tp)
    packed, num_stages = run.timeline.schedule.packed, len(run.stages)
    column = run.resident_costs.column("weights", num_stages)
    constant = sum(column[stage] for stage in run.timeline.schedule.placement.stages_of(rank))
    levels, resident_levels = (_levels(timeline, rank) for timeline in (run.timeline, run.pipeline))
    if has_activations:
        at = levels.index(max(levels))
    else:  # where weights and gradients are largest
        sizes = [one - other for one, other in zip(levels, resident_levels, strict=True)]
        at = max(range(len(sizes)), key=lambda index: (sizes[index], index))
    peak = levels[at]
    step = [packed.row(rank)[at]]
    if is_joined(step[0]):  # an Overlap is at its peak as a whole
        at += 1
        step.append(packed.row(rank)[at])
    missing, freed = _missing_gradients(run, rank, at)
    activations, workspace = resident_levels[at] - (constant - missing), 0.0
    for resident, own, grown in _workspaces(context, run, step):
        activations += min(own, grown) - resident
        workspace += max(0.0, own - grown)
    activations += min(workspace, freed)
    workspace -= min(workspace, freed)
    optimizer = state.optimizer_bytes(held, shards)
    gradients = state.sum_bytes(held, shards) - missing
    if shards.rest > 1:
        gradients += _full_gradients(run, rank, at)
    weights = peak - activations - workspace - optimizer - gradients
    return RankMemory(weights, gradients, optimizer, activations, workspace)


def _workspaces(context: PlanContext, run: Simulation, step: Sequence[int]) -> Iterator[tuple[float, float, float]]:
    """For each action of a step: its workspace with full weights, as they are gathered, and what of it remains in I.

    Where weights are gathered block by block, the second is the workspace at the peak, without weights.
    """
    candidate, schedule = run.candidate, run.timeline.schedule
    both = run.resident_costs, run.costs or run.resident_costs
    plain = [SliceCosts.of(schedule, costs) for costs in both]
    marked = [SliceCosts.of(schedule, costs.with_all_checkpointed(schedule.num_stages)) for costs in both]
    peaks = None
    if run.costs is not None and candidate.shards == "regather":
        setting = context.setting(candidate)
        peaks = context.for_schedule(schedule).costs.gathered_peaks(
            run.counts, setting, candidate.ac, candidate.layout.num_shards, plain[0].shares
        )
    for code in step:
        is_marked = (stage_of(code), microbatch_of(code)) in schedule.checkpointed
        resident, gathering = marked if is_marked else plain
        kind, stage, slice = kind_of(code), stage_of(code), microbatch_of(code) % len(resident.shares)
        if kind == W:
            yield 0.0, 0.0, 0.0
            continue
        row, name = slice * resident.num_stages + stage, _WORKSPACES[kind]
        own = gathering.rows(name)[row]
        if peaks is not None:
            own -= resident.shares[slice] * getattr(peaks[stage], Kind(kind).name.lower()).weights
        grown = max(0.0, resident.rows("stash")[row] - resident.rows("activation")[row]) if kind == I else 0.0
        yield resident.rows(name)[row], own, grown


def _levels(timeline: Timeline, rank: int) -> list[float]:
    """The memory of a rank during each of its actions."""
    assert timeline.memory is not None
    begin, end = timeline.schedule.packed.offsets[rank : rank + 2]
    return list(memoryview(timeline.memory.during).cast("d")[begin:end])


def _missing_gradients(run: Simulation, rank: int, at: int) -> tuple[float, float]:
    """Bytes of unsharded gradients that are not there at the peak of action `at` of a rank, the last one of its step.

    The first B or W of a stage is at its peak when it ends, with all gradients, or before it has any, if it frees more.
    Second, what it has freed at its peak.
    """
    schedule, costs, num_stages = run.timeline.schedule, run.resident_costs, len(run.stages)
    row, sliced = schedule.packed.row(rank), SliceCosts.of(schedule, costs)
    size = costs.column("first_gradients", num_stages)
    begin = at - (at > 0 and is_joined(row[at - 1]))
    begun = {stage_of(code) for code in row[:begin] if kind_of(code) in (B, W)}
    first = [code for code in row[begin : at + 1] if kind_of(code) in (B, W) and stage_of(code) not in begun]
    released, stash = sliced.memory()[1], sliced.rows("stash")
    freed = 0.0
    for code in first:
        index = microbatch_of(code) % len(sliced.shares) * num_stages + stage_of(code)
        freed += released[index] if kind_of(code) == B else stash[index] / schedule.problem.num_weight_parts
    if sum(size[stage] for stage in set(map(stage_of, first))) > freed:
        begun.update(map(stage_of, first))
    else:
        freed = 0.0
    return sum(size[stage] for stage in set(schedule.placement.stages_of(rank)) - begun), freed


def _full_gradients(run: Simulation, rank: int, at: int) -> float:
    """Bytes of full gradients during action `at` of a rank with sharded stages: begun, and not reduced yet."""
    timeline, costs = run.timeline, run.costs
    packed, sharding = timeline.schedule.packed, timeline.sharding
    assert costs is not None
    assert sharding is not None
    if costs.gradients != "whole":
        without = replace(costs, full_gradients=0.0, rolling_gradients=0.0)
        return _levels(timeline, rank)[at] - _levels(simulate(timeline.schedule, without), rank)[at]
    begin, event = packed.offsets[rank], sharding.packed.offsets[rank]
    begun = {stage_of(code) for code in packed.row(rank)[: at + 1] if kind_of(code) in (B, W)}
    start, sizes = memoryview(timeline.start).cast("d")[begin + at], memoryview(sharding.size).cast("d")
    return sum(
        sizes[event + index]
        for index, (action, _, end) in enumerate(sharding.events(rank))
        if action.kind is Kind.REDUCE_GRAD and action.stage in begun and end > start
    )


def compute_mfu(context: PlanContext, row: PlanRow) -> float | None:
    """Model FLOPs of F, I and W over the peak FLOPs of the GPUs in a step; None if the peak is not known."""
    costs, candidate = context.costs, row.candidate
    peak = costs.machine.get("peak_flops")
    if not peak:
        return None
    kinds = context.setting(candidate).kinds
    layers = [kinds[kind] for kind in (*costs.layers, *costs.before, *costs.after)]
    flops = sum(3 * layer.flops - layer.frozen_flops for layer in layers)
    per_gpu = flops * candidate.num_microbatches / candidate.layout.pp
    return float(per_gpu / (row.step * peak))
