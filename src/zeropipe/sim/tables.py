"""The costs of a schedule as flat arrays, for the kernels of `simulate` and `fill`."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import chain, product
from typing import NamedTuple

from zeropipe.core.action import B, F
from zeropipe.core.gradient_policy import GradientPolicy
from zeropipe.core.jit import Arrays, Floats, Ints
from zeropipe.core.needs import number_edges
from zeropipe.core.overlap import saved_time
from zeropipe.core.packed import kind_of, stage_of
from zeropipe.core.phases import StagePhases
from zeropipe.core.schedule import Schedule
from zeropipe.errors import ConfigError
from zeropipe.sim.costs import OFFLOAD_COLUMNS, SHARD_COLUMNS, WORKSPACES, Costs
from zeropipe.sim.slice_costs import SliceCosts


class CostTables(NamedTuple):
    """Times by kind, slice and stage, messages by slice and `message_index`, memory by slice and stage.

    The index of a slice and stage is their row: slice * num_stages + stage. Where a schedule has checkpointed F, as
    many rows of their costs follow.
    """

    durations: Floats  # at kind * num_rows + row; for W, of one part
    savings: Floats  # the time that an Overlap of a stage's F and B saves
    phase_savings: Floats  # the same of stages with phases: by has B (or I), class of the stage of F, of the other
    phase_class: Ints  # of each stage: stages with equal phases are one class; empty without phases
    num_classes: int
    travel: Floats  # time from the end of the sender's action to the arrival, if the edge is free
    transfer: Floats  # time for which a message occupies its edge: without the latency
    edges: Ints  # the edge of each message
    num_edges: int
    num_messages: int  # of each slice
    serial_links: bool
    activation: Floats  # that an F allocates; that of the first slice with the keys of its microbatch
    released: Floats  # that a B or I frees
    key_gradients: Floats  # that a B or I allocates: that of the last slice
    stash: Floats
    f_workspace: Floats
    workspace: Floats  # of a B
    i_workspace: Floats
    num_rows: int
    checkpointed: Ints  # by stage and microbatch, whether its F is checkpointed; empty if none is
    num_microbatches: int
    first_gradients: Floats  # by stage: that its first B or W allocates
    first_rank: Ints  # by stage: the rank of its first copy
    num_stages: int
    num_slices: int
    num_weight_parts: int
    second_from: int  # the first microbatch of the placement's second copy


class ShardTables(NamedTuple):
    """Costs of sharded stages, by stage."""

    unshard: Floats
    reduce: Floats
    gathered: Floats  # memory of the weights that are gathered at a time, while a stage runs
    started: Floats  # the same before it runs
    gradients: Floats  # memory of full gradients
    rolling: Floats  # the same while a B or W runs that is followed by a reduce; with rolling gradients
    limit: int  # stages of a rank with whole gradients between actions; -1 for any number
    regathers: int  # whether weights are gathered for every microbatch
    units: int


class OffloadTables(NamedTuple):
    """Costs of copies to the host and back, by stage."""

    offload: Floats
    reload: Floats
    size: Floats  # the memory that is copied


def build_cost_tables(xp: Arrays, schedule: Schedule, costs: Costs) -> CostTables:
    """The tables of `schedule` under `costs`."""
    num_stages, num_weight_parts = schedule.num_stages, schedule.problem.num_weight_parts
    both = [costs, *([costs.with_all_checkpointed(num_stages)] if schedule.checkpointed else [])]
    sliced = [SliceCosts.of(schedule, one) for one in both]
    f, b, i, w, overlap = _concatenate(one.times() for one in sliced)
    stash, f_workspace, workspace, i_workspace = _concatenate(
        [one.rows(name) for name in ("stash", *WORKSPACES)] for one in sliced
    )
    activation, released, key_gradients = _concatenate(one.memory() for one in sliced)
    costs.require_ranks(schedule.num_ranks)
    numbers, edges = number_edges(schedule.placement)
    travel, transfer = _message_times(schedule, costs, numbers, edges, sliced[0].shares)
    phase_class, pair_savings = phase_savings(costs, num_stages)
    return CostTables(
        durations=xp.list_floats([*f, *b, *i, *(time / num_weight_parts for time in w)]),
        savings=xp.list_floats([one + other - both for one, other, both in zip(f, b, overlap, strict=True)]),
        phase_savings=xp.list_floats(pair_savings), phase_class=xp.list_ints(phase_class),
        num_classes=max(phase_class, default=-1) + 1,
        travel=xp.list_floats(travel), transfer=xp.list_floats(transfer),
        edges=xp.list_ints(numbers * schedule.num_slices),
        num_edges=len(edges), num_messages=len(numbers), serial_links=costs.serial_links,
        activation=xp.list_floats(activation), released=xp.list_floats(released),
        key_gradients=xp.list_floats(key_gradients), stash=xp.list_floats(stash),
        f_workspace=xp.list_floats(f_workspace), workspace=xp.list_floats(workspace),
        i_workspace=xp.list_floats(i_workspace), num_rows=len(f), checkpointed=_list_marks(xp, schedule),
        first_gradients=xp.list_floats(costs.column("first_gradients", num_stages)),
        first_rank=xp.list_ints(schedule.placement.copies[0]),
        num_microbatches=schedule.problem.total_slices, num_stages=num_stages, num_slices=schedule.num_slices,
        num_weight_parts=num_weight_parts, second_from=schedule.second_slice_from,
    )  # fmt: skip


def _concatenate(parts: Iterable[Sequence[list[float]]]) -> list[list[float]]:
    """The lists of all parts, each followed by the same one of the next part."""
    return [list(chain.from_iterable(lists)) for lists in zip(*parts, strict=True)]


def _list_marks(xp: Arrays, schedule: Schedule) -> Ints:
    """Whether each F is checkpointed, by stage and microbatch; empty if none is."""
    size = schedule.problem.total_slices
    marks = xp.full_ints(schedule.num_stages * size if schedule.checkpointed else 0)
    for stage, number in schedule.checkpointed:
        marks[stage * size + number] = 1
    return marks


def phase_savings(costs: Costs, num_stages: int) -> tuple[list[int], list[float]]:
    """The class of each stage by its phases, and the time that an Overlap saves: with an I, and with a B."""
    if costs.phases is None:
        return [], []
    stages = costs.stage_phases(num_stages)
    numbers: dict[StagePhases, int] = {}
    classes = [numbers.setdefault(stage, len(numbers)) for stage in stages]
    return classes, [
        saved_time(forward, backward, has_w, costs.sm_tax)
        for has_w in (False, True)
        for forward in numbers
        for backward in numbers
    ]


def build_shard_tables(xp: Arrays, schedule: Schedule, costs: Costs) -> ShardTables:
    """The tables of `schedule` under `costs` for its UNSHARD and REDUCE_GRAD."""
    columns = [costs.column(name, schedule.num_stages) for name in SHARD_COLUMNS]
    unshard, reduce, weights, gathered, started, gradients, rolling = columns
    regathers = costs.shards == "regather"
    limit = GradientPolicy.parse(costs.gradients).limit
    return ShardTables(
        unshard=xp.list_floats(unshard), reduce=xp.list_floats(reduce),
        gathered=xp.list_floats(gathered if regathers else weights),
        started=xp.list_floats(started if regathers else weights),
        gradients=xp.list_floats(gradients), rolling=xp.list_floats(rolling), limit=-1 if limit is None else limit,
        regathers=int(regathers), units=costs.units,
    )  # fmt: skip


def build_offload_tables(xp: Arrays, schedule: Schedule, costs: Costs) -> OffloadTables:
    """The tables of `schedule` under `costs` for its OFFLOAD and RELOAD."""
    return OffloadTables(*(xp.list_floats(costs.column(name, schedule.num_stages)) for name in OFFLOAD_COLUMNS))


def phase_saving(costs: CostTables, code: int, other: int) -> float:
    """The time that an Overlap of two actions saves because of their phases."""
    forward, backward = (code, other) if kind_of(code) == F else (other, code)
    row = costs.phase_class[stage_of(forward)] + (costs.num_classes if kind_of(backward) == B else 0)
    saving: float = costs.phase_savings[row * costs.num_classes + costs.phase_class[stage_of(backward)]]
    return saving


def constant_memory(schedule: Schedule, costs: Costs) -> list[float]:
    """Weights, gradients and optimizer state of each rank."""
    return _rank_sums(schedule, costs.column("weights", schedule.num_stages))


def first_memory(schedule: Schedule, costs: Costs) -> list[float]:
    """The same before any gradients are there."""
    weights, gradients = (costs.column(name, schedule.num_stages) for name in ("weights", "first_gradients"))
    for stage, (whole, part) in enumerate(zip(weights, gradients, strict=True)):
        if part > whole:
            raise ConfigError(
                f"first_gradients={part:g} of stage {stage} are part of its weights={whole:g}: must be at most these"
            )
    return _rank_sums(schedule, [whole - part for whole, part in zip(weights, gradients, strict=True)])


def _rank_sums(schedule: Schedule, sizes: Sequence[float]) -> list[float]:
    """The sizes of the stages that each rank holds, added up."""
    levels = [0.0] * schedule.num_ranks
    for size, ranks in zip(sizes, zip(*schedule.placement.copies)):
        for rank in set(ranks):  # a rank with both copies of a stage has its weights once
            levels[rank] += size
    return levels


def _message_times(
    schedule: Schedule, costs: Costs, numbers: list[int], edges: list[tuple[int, int]], shares: Sequence[float]
) -> tuple[list[float], list[float]]:
    """The time that each message travels, and for which it occupies its edge: those of each slice, by its share."""
    size = costs.column("message", schedule.num_stages)
    links = [costs.link(*edge) for edge in edges]
    travel, transfer = [0.0] * len(numbers) * len(shares), [0.0] * len(numbers) * len(shares)
    for at, (share, (index, edge)) in enumerate(product(shares, enumerate(numbers))):
        if edge >= 0:
            p2p, bandwidth = links[edge]
            # the gradient that goes back over a boundary is as large as the activation that crossed it
            boundary = index // 2 % schedule.num_stages - index % 2
            transfer[at] = share * size[boundary] / bandwidth if bandwidth else 0.0
            travel[at] = transfer[at] + (p2p or 0.0)
    return travel, transfer
