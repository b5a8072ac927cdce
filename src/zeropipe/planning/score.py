"""One schedule under the costs of several candidates: simulated, with what comes around the pipeline."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from math import isfinite

from zeropipe.balancing.balance import alive_of, balance_task, solved
from zeropipe.core.model.layers import layer_counts
from zeropipe.core.placement import Placement
from zeropipe.core.schedule import Schedule
from zeropipe.core.timeline import Timeline
from zeropipe.errors import ConfigError
from zeropipe.planning.rows import Candidate, Memory, Parts, Row
from zeropipe.schedules.registry import build
from zeropipe.schedules.validate import validate_user_schedule
from zeropipe.sim.costs import Costs
from zeropipe.sim.layer_costs import LayerCost, LayerCosts, Setting
from zeropipe.sim.simulate import simulate

RESERVE = 4e9  # bytes of a GPU that CUDA, NCCL and fragmentation take
OPTIMIZER_TRAFFIC = 2.0  # bytes that an optimizer's step moves, over those of a parameter's state: read and written


@dataclass(frozen=True)
class Scene:
    """What all candidates of a plan have in common."""

    costs: LayerCosts
    gpus_per_node: int
    limit: float  # bytes of a GPU that may be used
    bandwidth: float | None  # bytes/s of the GPU's memory, for the optimizer; None: not counted


def score_group(scene: Scene, group: Sequence[Candidate]) -> list[Row]:
    """The results of candidates that differ in costs alone: one schedule, built once. None of it if that cannot be."""
    try:
        schedule = schedule_of(group[0])
    except ConfigError:
        return []
    validate_user_schedule(schedule)
    rows: list[Row] = []
    alive = alive_of(schedule)
    for candidate in group:
        for counts in _cuts(scene, candidate, schedule, alive):
            row = score(scene, candidate, schedule, counts)
            rows.append(row)
            if row.fits:
                break
    return rows


def schedule_of(candidate: Candidate) -> Schedule:
    """The schedule with a name that a candidate runs."""
    return build(
        candidate.schedule, ranks=candidate.layout.pp, microbatches=candidate.num_microbatches,
        stages_per_rank=candidate.stages_per_rank,
    )  # fmt: skip


def setting_of(scene: Scene, candidate: Candidate) -> Setting:
    """How its layers run."""
    return scene.costs.setting(ac=candidate.ac, microbatch_size=candidate.microbatch_size, tp=candidate.layout.tp)


def _cuts(scene: Scene, candidate: Candidate, schedule: Schedule, alive: list[float]) -> Iterator[tuple[int, ...]]:
    """Layers per stage: first without a look at memory, and if that does not fit, the best that should."""
    layers, stages = scene.costs.num_layers, schedule.num_stages
    if candidate.cut == "even":
        if stages <= layers:
            yield layer_counts(layers, stages)
        return
    try:
        task = balance_task(
            scene.costs, schedule.problem, schedule.placement, alive,
            setting=setting_of(scene, candidate), ac=candidate.ac, shards=candidate.layout.dp_shard,
        )  # fmt: skip
    except ConfigError:
        return
    free = solved(task)[0]
    if free is not None and (stages > layers or free != layer_counts(layers, stages)):
        yield free
    if schedule.num_stages == len(task.speed):
        room = tuple(scene.limit for _ in task.memory)
        tight = solved(replace(task, memory=room))[0]
        if tight is not None and tight != free:
            yield tight


def costs_of(
    scene: Scene, candidate: Candidate, counts: Sequence[int], placement: Placement, *, whole: bool = False
) -> Costs:
    """The costs of a candidate's stages. With `whole`, weights and gradients are there all the time, for nothing."""
    shards, limit = candidate.layout.dp_shard, scene.limit if isfinite(scene.limit) else None
    return scene.costs.costs(
        counts, setting_of(scene, candidate), ac=candidate.ac, placement=placement,
        shards=shards, gather=None if whole or shards == 1 else candidate.shards,
        shard_link=candidate.layout.data_link(scene.costs, scene.gpus_per_node),
        node_size=candidate.layout.node_size(scene.gpus_per_node), memory_limit=limit,
    )  # fmt: skip


@dataclass(frozen=True)
class Simulated:
    """A candidate's stages and their simulation, with and without gathers and reduces."""

    stages: list[list[LayerCost]]
    parameters: list[int]  # of each rank
    whole: Costs
    pipeline: Timeline  # weights and gradients are there all the time, as in the costs `whole`
    timeline: Timeline


def simulated(scene: Scene, candidate: Candidate, schedule: Schedule, counts: Sequence[int]) -> Simulated:
    """Simulate one candidate."""
    whole = costs_of(scene, candidate, counts, schedule.placement, whole=True)
    pipeline = simulate(schedule, whole)
    sharded = candidate.layout.dp_shard > 1
    timeline = simulate(schedule, costs_of(scene, candidate, counts, schedule.placement)) if sharded else pipeline
    stages = scene.costs.stage_layers(counts, setting_of(scene, candidate), candidate.ac)
    return Simulated(stages, _parameters(scene, stages, schedule), whole, pipeline, timeline)


def score(scene: Scene, candidate: Candidate, schedule: Schedule, counts: Sequence[int]) -> Row:
    """Simulate one candidate and say where its time and memory go."""
    return row_of(scene, candidate, schedule, counts, simulated(scene, candidate, schedule, counts))


def row_of(scene: Scene, candidate: Candidate, schedule: Schedule, counts: Sequence[int], run: Simulated) -> Row:
    """Where the time and memory of a simulated candidate go."""
    timeline = run.timeline
    parts = _parts(scene, candidate, run.pipeline, run.stages, run.parameters)
    data = timeline.makespan - run.pipeline.makespan + _sums(scene, candidate, schedule, run)
    fullest = max(range(timeline.num_ranks), key=lambda rank: timeline.peak_memory[rank])
    return Row(
        candidate, tuple(counts), replace(parts, data=data), memory_of(scene, candidate, run, fullest), scene.limit,
        timeline.makespan, timeline.bubble,
    )  # fmt: skip


def _parameters(scene: Scene, stages: list[list[LayerCost]], schedule: Schedule) -> list[int]:
    """Of each rank, all copies counted, a tied weight once."""
    each = [sum(layer.parameters for layer in stage) for stage in stages]
    held = [sum(each[s] for s in schedule.placement.stages_of(rank)) for rank in range(schedule.num_ranks)]
    if scene.costs.tied:
        shared = min(stages[0][0].parameters, each[-1])
        for rank in range(schedule.num_ranks):
            if {0, len(stages) - 1} <= set(schedule.placement.stages_of(rank)):
                held[rank] -= shared
    return held


def _parts(
    scene: Scene, candidate: Candidate, timeline: Timeline, stages: list[list[LayerCost]], parameters: list[int]
) -> Parts:
    m = candidate.num_microbatches
    total = m * sum(layer.f + layer.full_backward for stage in stages for layer in stage)
    again = m * sum(_again(scene, candidate)) if candidate.ac != "none" else 0.0
    mean, most = sum(timeline.busy) / timeline.num_ranks, max(timeline.busy)
    share = again / total if total > 0 else 0.0
    state = scene.costs.state
    moved = OPTIMIZER_TRAFFIC * max(parameters) * (state.gradients + state.optimizer) / candidate.layout.dp_shard
    return Parts(
        work=mean * (1 - share), recompute=mean * share, imbalance=most - mean, bubble=timeline.makespan - most,
        data=0.0, optimizer=moved / scene.bandwidth if scene.bandwidth else 0.0,
    )  # fmt: skip


def _sums(scene: Scene, candidate: Candidate, schedule: Schedule, run: Simulated) -> float:
    """Seconds at the end of a step in which ranks that hold the same weights exchange gradients: copies, tied ends."""
    placement, last = schedule.placement, schedule.num_ranks - 1
    pairs: list[tuple[int, int, float]] = []
    if len(placement.copies) > 1:
        pairs = [(rank, last - rank, number) for rank, number in enumerate(run.parameters)]
    elif scene.costs.tied:
        first = run.stages[0][0].parameters
        pairs = [(placement.rank_of(0), placement.rank_of(schedule.num_stages - 1), first)]
    longest = 0.0
    for rank, other, number in pairs:
        bandwidth = run.whole.link(rank, other).bandwidth if rank != other else None
        if bandwidth:
            longest = max(longest, number * scene.costs.state.gradients / bandwidth)
    return longest + _sums_of_copies(scene, candidate, run)


def _sums_of_copies(scene: Scene, candidate: Candidate, run: Simulated) -> float:
    """Over `dp_replicate`: a ring sends nearly all of a rank's gradients twice."""
    layout = candidate.layout
    bandwidth = layout.copies_link(scene.costs, scene.gpus_per_node).bandwidth
    if layout.dp_replicate == 1 or not bandwidth:
        return 0.0
    size = max(run.parameters) * scene.costs.state.gradients / layout.dp_shard
    return 2 * (layout.dp_replicate - 1) / layout.dp_replicate * size / bandwidth


def _again(scene: Scene, candidate: Candidate) -> Iterator[float]:
    """Seconds that each layer computes again, where its costs without checkpointing are known."""
    try:
        plain = scene.costs.setting(ac="none", microbatch_size=candidate.microbatch_size, tp=candidate.layout.tp)
    except ConfigError:
        return
    chosen = scene.costs.layer_list(setting_of(scene, candidate), candidate.ac)
    for kind, layer in zip(scene.costs.layers, chosen, strict=True):
        yield max(0.0, layer.i - plain.kinds[kind].i)


def memory_of(scene: Scene, candidate: Candidate, run: Simulated, rank: int) -> Memory:
    """What a rank holds at its peak."""
    shards, state, timeline = candidate.layout.dp_shard, scene.costs.state, run.timeline
    column = run.whole.column("weights", timeline.schedule.num_stages)
    constant = sum(column[s] for s in timeline.schedule.placement.stages_of(rank))
    own = run.parameters[rank]
    activations = run.pipeline.peak_memory[rank] - constant
    workspace, optimizer = constant - own * state.with_full_weights(shards), own * state.optimizer / shards
    rest = timeline.peak_memory[rank] - activations - workspace - optimizer  # weights and gradients, as far as whole
    weights = min(own * state.weights, max(0.0, rest))
    return Memory(weights, rest - weights, optimizer, activations, workspace)


def optimizer_bandwidth(costs: LayerCosts) -> float | None:
    """Bytes/s of the GPU's memory that an optimizer reaches; None where they are not known."""
    bandwidth = costs.machine.get("bandwidth")
    efficiency = costs.machine.get("efficiency")
    share = efficiency.get("memory", 1.0) if isinstance(efficiency, Mapping) else 1.0
    return float(bandwidth) * share if isinstance(bandwidth, (int, float)) and bandwidth > 0 else None


def mfu_of(scene: Scene, row: Row) -> float | None:
    """Model FLOPs of F, I and W over the peak FLOPs of the GPUs in a step; None where the peak is not known."""
    costs, candidate = scene.costs, row.candidate
    peak = costs.machine.get("peak_flops")
    if not peak:
        return None
    kinds = setting_of(scene, candidate).kinds
    flops = sum(kinds[kind].flops for kind in (*costs.layers, *costs.before, *costs.after))
    per_gpu = 3 * flops * candidate.num_microbatches / candidate.layout.pp
    return float(per_gpu / (row.step * peak))
