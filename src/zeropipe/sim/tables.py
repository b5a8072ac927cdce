"""A schedule's costs as the flat tables that kernels read."""

from __future__ import annotations

from typing import NamedTuple

from zeropipe.core.jit import Arrays, Floats, Ints
from zeropipe.core.needs import number_edges
from zeropipe.core.schedule import Schedule
from zeropipe.sim.costs import SHARDS, Costs


class Tables(NamedTuple):
    """Times by kind and stage, messages by `message_index`, memory by stage and rank."""

    durations: Floats  # at kind num_stages + stage; of a W: of one part
    saving: Floats  # what an Overlap of a stage's F and B saves
    travel: Floats  # from the end of the sender's action to the arrival, if the edge is free
    occupies: Floats  # how long its edge is taken: without the latency
    edge: Ints
    num_edges: int
    activation: Floats
    stash: Floats
    constant: Floats
    num_weight_parts: int
    second_from: int  # the first microbatch of the placement's second copy


class ShardTables(NamedTuple):
    """What sharded stages take, by stage."""

    unshard: Floats
    reduce: Floats
    gathered: Floats  # memory of weights that are whole at a time
    gradients: Floats  # memory of whole gradients
    home: Ints  # the rank of each stage's first copy
    units: int


def shard_tables_of(xp: Arrays, schedule: Schedule, costs: Costs) -> ShardTables:
    """The tables of `schedule` under `costs` for its UNSHARD and REDUCE_GRAD."""
    unshard, reduce, weights, gradients = (costs.column(name, schedule.num_stages) for name in SHARDS)
    at_once = min(2, costs.units) / costs.units if costs.shards == "regather" else 1.0
    return ShardTables(
        xp.list_floats(unshard), xp.list_floats(reduce), xp.list_floats([at_once * size for size in weights]),
        xp.list_floats(gradients), xp.list_ints(schedule.placement.copies[0]), costs.units,
    )  # fmt: skip


def tables_of(xp: Arrays, schedule: Schedule, costs: Costs) -> Tables:
    """The tables of `schedule` under `costs`."""
    num_weight_parts = schedule.problem.num_weight_parts
    f, b, i, w, overlap, activation, stash = (
        costs.column(name, schedule.num_stages) for name in ("f", "b", "i", "w", "overlap", "activation", "stash")
    )
    costs.require_ranks(schedule.num_ranks)
    travel, occupies, edge, num_edges = _messages(xp, schedule, costs)
    return Tables(
        xp.list_floats([*f, *b, *i, *(time / num_weight_parts for time in w)]),
        xp.list_floats([one + other - both for one, other, both in zip(f, b, overlap, strict=True)]),
        travel, occupies, edge, num_edges,
        xp.list_floats(activation), xp.list_floats(stash), xp.list_floats(_constant_memory(schedule, costs)),
        num_weight_parts, schedule.second_from,
    )  # fmt: skip


def _constant_memory(schedule: Schedule, costs: Costs) -> list[float]:
    """Weights, gradients and optimizer state of each rank."""
    levels = [0.0] * schedule.num_ranks
    for weight, ranks in zip(costs.column("weights", schedule.num_stages), zip(*schedule.placement.copies)):
        for rank in set(ranks):  # where both copies of a stage are on one rank, it has the weights once
            levels[rank] += weight
    return levels


def _messages(xp: Arrays, schedule: Schedule, costs: Costs) -> tuple[Floats, Floats, Ints, int]:
    """How long each message travels and occupies its edge, the number of that edge, and how many edges there are."""
    size = costs.column("message", schedule.num_stages)
    numbers, edges = number_edges(schedule.placement)
    links = [costs.link(*edge) for edge in edges]
    travel, occupies = [0.0] * len(numbers), [0.0] * len(numbers)
    for place, edge in enumerate(numbers):
        if edge >= 0:
            p2p, bandwidth = links[edge]
            # the gradient going back over a boundary is as large as the activation that crossed it
            boundary = place // 2 % schedule.num_stages - place % 2
            occupies[place] = size[boundary] / bandwidth if bandwidth else 0.0
            travel[place] = occupies[place] + (p2p or 0.0)
    return xp.list_floats(travel), xp.list_floats(occupies), xp.list_ints(numbers), len(edges)
