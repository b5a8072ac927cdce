"""One schedule under the costs of several candidates: simulated, with what comes around the pipeline."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

from zeropipe.core.layers import layer_counts
from zeropipe.core.schedule import Schedule
from zeropipe.core.timeline import Timeline
from zeropipe.errors import ConfigError
from zeropipe.schedules.registry import build
from zeropipe.search.balance.balance import alive_of, balance_task, solved
from zeropipe.search.plan.rows import Candidate, Memory, Parts, Row
from zeropipe.sim.costs import Costs
from zeropipe.sim.layer_costs import LayerCost, LayerCosts, Setting
from zeropipe.sim.simulate import simulate

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
    first = group[0]
    try:
        schedule = build(
            first.schedule,
            ranks=first.layout.pp,
            microbatches=first.num_microbatches,
            stages_per_rank=first.stages_per_rank,
        )
    except ConfigError:
        return []
    rows: list[Row] = []
    alive = alive_of(schedule)
    for candidate in group:
        for counts in _cuts(scene, candidate, schedule, alive):
            row = score(scene, candidate, schedule, counts)
            rows.append(row)
            if row.fits:
                break
    return rows


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
            scene.costs, schedule, setting=setting_of(scene, candidate), ac=candidate.ac,
            shards=candidate.layout.dp_shard, alive=alive,
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


def costs_of(scene: Scene, candidate: Candidate, counts: Sequence[int], schedule: Schedule) -> Costs:
    """The costs of a candidate's stages."""
    return scene.costs.costs(
        counts, setting_of(scene, candidate), ac=candidate.ac, placement=schedule.placement,
        shards=candidate.layout.dp_shard, node_size=candidate.layout.node_size(scene.gpus_per_node),
        memory_limit=scene.limit,
    )  # fmt: skip


def score(scene: Scene, candidate: Candidate, schedule: Schedule, counts: Sequence[int]) -> Row:
    """Simulate one candidate and say where its time and memory go."""
    costs = costs_of(scene, candidate, counts, schedule)
    timeline = simulate(schedule, costs)
    setting = setting_of(scene, candidate)
    stages = scene.costs.stage_layers(counts, setting, candidate.ac)
    parameters = _parameters(scene, stages, schedule)
    return Row(
        candidate, tuple(counts), _parts(scene, candidate, timeline, stages, parameters),
        _memory(scene, candidate, timeline, parameters, costs), scene.limit, timeline.makespan, timeline.bubble,
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
    total = m * sum(layer.f + layer.whole for stage in stages for layer in stage)
    again = m * sum(_again(scene, candidate)) if candidate.ac != "none" else 0.0
    mean, most = sum(timeline.busy) / timeline.num_ranks, max(timeline.busy)
    share = again / total if total > 0 else 0.0
    gather, reduce = _data(scene, candidate, parameters)
    exposed = _exposed(timeline, gather, reduce)
    state = scene.costs.state
    moved = OPTIMIZER_TRAFFIC * max(parameters) * (state.gradients + state.optimizer) / candidate.layout.dp_shard
    return Parts(
        work=mean * (1 - share), recompute=mean * share, imbalance=most - mean, bubble=timeline.makespan - most,
        data=exposed, optimizer=moved / scene.bandwidth if scene.bandwidth else 0.0,
    )  # fmt: skip


def _again(scene: Scene, candidate: Candidate) -> Iterator[float]:
    """Seconds that each layer computes again, where its costs without checkpointing are known."""
    try:
        plain = scene.costs.setting(ac="none", microbatch_size=candidate.microbatch_size, tp=candidate.layout.tp)
    except ConfigError:
        return
    chosen = scene.costs.layer_list(setting_of(scene, candidate), candidate.ac)
    for kind, layer in zip(scene.costs.layers, chosen, strict=True):
        yield max(0.0, layer.i - plain.kinds[kind].i)


def _data(scene: Scene, candidate: Candidate, parameters: list[int]) -> tuple[list[float], list[float]]:
    """Seconds that each rank's gathers and reduces take, one after the other."""
    shards = candidate.layout.dp_shard
    if shards == 1:
        return [0.0] * len(parameters), [0.0] * len(parameters)
    link = candidate.layout.data_link(scene.costs, scene.gpus_per_node)
    share = (shards - 1) / shards / (link.bandwidth or float("inf"))
    state = scene.costs.state
    return [n * state.weights * share for n in parameters], [n * state.gradients * share for n in parameters]


def _exposed(timeline: Timeline, gather: list[float], reduce: list[float]) -> float:
    """Seconds by which gathers and reduces make the step longer.

    A rank gathers from the start of the step on, layer by layer, so what it waits for ends before its first action
    would. The last reduces begin with the rank's last action, unit by unit, and hide behind it.
    """
    if not any(gather):
        return 0.0
    before, latest = 0.0, timeline.first_start + timeline.makespan
    starts, ends = (memoryview(times).cast("d") for times in (timeline.start, timeline.end))
    offsets = timeline.schedule.packed.offsets
    for rank, (begin, stop) in enumerate(pairwise(offsets)):
        before = max(before, gather[rank] - (ends[begin] - timeline.first_start))
        hidden = ends[stop - 1] - starts[stop - 1]
        latest = max(latest, ends[stop - 1] + max(0.0, reduce[rank] - hidden))
    return before + latest - timeline.first_start - timeline.makespan


def _memory(scene: Scene, candidate: Candidate, timeline: Timeline, parameters: list[int], costs: Costs) -> Memory:
    shards, state = candidate.layout.dp_shard, scene.costs.state
    rank = max(range(timeline.num_ranks), key=lambda r: timeline.peak_memory[r])
    column = costs.column("weights", timeline.schedule.num_stages)
    constant = sum(column[s] for s in timeline.schedule.placement.stages_of(rank))
    own = parameters[rank]
    rest = state.of_shards(shards) - state.weights - state.gradients - state.optimizer / shards
    return Memory(
        weights=own * state.weights, gradients=own * (state.gradients + rest), optimizer=own * state.optimizer / shards,
        activations=timeline.peak_memory[rank] - constant, workspace=constant - own * state.of_shards(shards),
    )  # fmt: skip
