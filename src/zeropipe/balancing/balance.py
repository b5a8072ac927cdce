"""`zp.balance`: layers to stages, beside the even cut."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import lru_cache
from math import inf

from zeropipe.balancing.exact import best_of_one_per_rank, best_of_two_per_rank, num_pairs
from zeropipe.balancing.heuristics import equal_layers, even_start, local_search
from zeropipe.balancing.task import BalanceTask
from zeropipe.core.action import B, F, W
from zeropipe.core.jit import Floats, Ints, arrays
from zeropipe.core.model.layers import layer_counts
from zeropipe.core.packed import kind_of, stage_of
from zeropipe.core.placement import Placement, Problem
from zeropipe.core.schedule import Schedule, require_schedule
from zeropipe.core.units import size_text
from zeropipe.errors import ConfigError, short
from zeropipe.sim.layer_costs import LayerCost, LayerCosts, Setting, Shards

MAX_PAIRS = 3e9  # pairs of stages that an exact cut may try: about ten seconds


@dataclass(frozen=True)
class Balance:
    """Layers per stage, and the time of each rank with them."""

    counts: tuple[int, ...]
    rank_times: tuple[float, ...]  # F, I and W of one microbatch, at the rank's speed
    even: tuple[int, ...] | None  # the even cut, for comparison; None if there are more stages than layers
    even_slowest: float
    less: tuple[int, ...] | None  # the best cut that is even but for fewer layers on the first and the last stage
    less_slowest: float
    exact: bool  # proven: no cut has a faster slowest rank

    @property
    def slowest(self) -> float:
        """The time of the slowest rank."""
        return max(self.rank_times)

    @property
    def gain(self) -> float:
        """How much faster the slowest rank is than with the even cut: 0.1 is ten percent."""
        return self.even_slowest / self.slowest - 1 if self.slowest > 0 else 0.0

    def __str__(self) -> str:
        return (
            f"layers {','.join(map(str, self.counts))}: slowest rank {self.slowest:g}, {self.gain:.1%} faster than even"
        )


def balance(
    costs: LayerCosts,
    schedule: Schedule,
    *,
    setting: Setting | None = None,
    ac: str | None = None,
    speeds: Sequence[float] | None = None,
    memory: float | Sequence[float] | None = None,
    shards: int = 1,
) -> Balance:
    """The cut of a model into the stages of `schedule` whose slowest rank is fastest, within each rank's memory.

    Embedding, head and loss count. `speeds` are factors for ranks with other GPUs (2: twice as fast), `memory` is in
    bytes, one number or one per rank. Exact by dynamic programming with one or two stages per rank (of up to some 200
    layers), and for layers that are all alike; otherwise improved step by step, and `exact` says whether the result is
    at its bound.
    """
    if not isinstance(costs, LayerCosts):
        raise ConfigError(f"costs={short(costs)}: must be costs of layers; use zp.estimate(...) or a file's costs")
    require_schedule(schedule)
    task = balance_task(
        costs.for_schedule(schedule), schedule.problem, schedule.placement, peak_in_flight(schedule),
        setting=setting, ac=ac, speeds=speeds, memory=memory, shards=shards,
    )  # fmt: skip
    counts, exact = best_counts(task)
    if counts is None:
        _raise_too_large(task)
    assert counts is not None
    even = even_counts(task.num_layers, task.num_stages)
    less = min(_fewer_at_ends(task), key=lambda cut: max(task.rank_loads(cut)[0]), default=None)
    slowest, less_slowest = (inf if cut is None else max(task.rank_loads(cut)[0]) for cut in (even, less))
    times = task.rank_loads(counts)[0]
    if len(times) < schedule.num_ranks:  # each is that of a rank and of its mirror image
        times += times[::-1][schedule.num_ranks % 2 :]
    return Balance(counts, tuple(times), even, slowest, less, less_slowest, exact)


def even_counts(num_layers: int, num_stages: int) -> tuple[int, ...] | None:
    """The even cut; None where a stage would be empty."""
    return layer_counts(num_layers, num_stages) if num_stages <= num_layers else None


def _fewer_at_ends(task: BalanceTask) -> Iterator[tuple[int, ...]]:
    """Cuts that are even except for fewer layers on the first and the last stage."""
    most = -(-task.num_layers // task.num_stages) + 1
    for first in range(most):
        for last in range(most):
            with suppress(ConfigError):  # a stage would have fewer than 0 layers
                counts = layer_counts(task.num_layers, task.num_stages, first, last)
                if all(count >= task.min_layers(stage) for stage, count in enumerate(counts)):
                    yield counts


@lru_cache(maxsize=4096)
def best_counts(task: BalanceTask) -> tuple[tuple[int, ...] | None, bool]:
    """The best known cut (None if nothing fits), and whether it is proven optimal."""
    alike = len(set(zip(task.time, task.fixed, task.kept))) == 1
    guess = equal_layers(task) if alike else None
    if guess is not None:
        return guess, True
    if task.num_stages == task.num_ranks:
        return best_of_one_per_rank(task), True
    near = local_search(task, even_start(task))
    if task.num_stages == 2 * task.num_ranks and _is_regular(task) and num_pairs(task) <= MAX_PAIRS:
        most = task.objective(near)[0] if task.fits(near) else inf
        return best_of_two_per_rank(task, most), True
    bound = (sum(task.time) + sum(task.beside_layers(s)[0] for s in range(task.num_stages))) / sum(task.speed)
    return (near, task.objective(near)[0] <= bound * (1 + 1e-9)) if task.fits(near) else (None, False)


def _is_regular(task: BalanceTask) -> bool:
    """Whether both passes visit every rank once, in the same or in the opposite order."""
    first, second = task.table[: task.num_ranks], task.table[task.num_ranks :]
    return len(set(first)) == task.num_ranks and second in (first, first[::-1])


def balanced_counts(
    costs: LayerCosts, problem: Problem, placement: Placement, setting: Setting | None = None, ac: str | None = None
) -> tuple[int, ...]:
    """The cut whose slowest rank is fastest, regardless of schedule and memory."""
    task = balance_task(costs, problem, placement, [0.0] * problem.num_stages, setting=setting, ac=ac)
    counts = best_counts(task)[0]
    assert counts is not None  # memory is unlimited here
    return counts


def balance_task(
    costs: LayerCosts,
    problem: Problem,
    placement: Placement,
    in_flight: Sequence[float],
    *,
    setting: Setting | None = None,
    ac: str | None = None,
    speeds: Sequence[float] | None = None,
    memory: float | Sequence[float] | None = None,
    shards: int = 1,
) -> BalanceTask:
    """The numbers of a balancing problem; `in_flight` is what `peak_in_flight` finds in a schedule."""
    chosen = costs.price_exchanges(setting or costs.settings[0])
    layers = costs.layer_list(chosen, ac)

    def weigh(layer: LayerCost) -> float:
        return costs.state_of(chosen.tp).resident(layer.held, Shards.of(shards, chosen.ep))

    ends = [[chosen.kinds[kind] for kind in part] for part in (costs.before, costs.after, costs.each)]
    table, pairs = rank_table(placement, problem.num_ranks)
    speed = _per_rank("speeds", speeds, problem.num_ranks, 1.0)
    limit = _per_rank("memory", memory, problem.num_ranks, inf)
    workspace = max(max(one.workspace, one.f_workspace) for one in [*layers, *ends[0], *ends[1], *ends[2]])
    return BalanceTask(
        tuple(layer.f + layer.full_backward for layer in layers), tuple(map(weigh, layers)),
        tuple(max(layer.activation, layer.stash) for layer in layers), _end(ends[0], weigh), _end(ends[1], weigh),
        table, tuple(in_flight), tuple(len(pair) * min(speed[r] for r in pair) for pair in pairs),
        tuple(max(0.0, min(limit[r] for r in pair) - workspace) for pair in pairs), _end(ends[2], weigh),
    )  # fmt: skip


def _end(parts: Sequence[LayerCost], weigh: Callable[[LayerCost], float]) -> tuple[float, float, float]:
    return (
        sum(part.f + part.full_backward for part in parts),
        sum(map(weigh, parts)),
        sum(max(part.activation, part.stash) for part in parts),
    )


def rank_table(placement: Placement, num_ranks: int) -> tuple[tuple[int, ...], list[tuple[int, ...]]]:
    """The owner of each stage, and the ranks of each owner: one rank, or a rank and its mirror image.

    Of two mirrored copies each runs half of the microbatches, so that a rank and its mirror image have equal work, and
    both hold both of their stages.
    """
    table = placement.copies[0]
    if len(placement.copies) == 1:
        return table, [(rank,) for rank in range(num_ranks)]
    if placement.copies[1] != table[::-1] or table != tuple(range(num_ranks)):
        raise ConfigError(f"placement {placement.name}: copies must mirror each other to be balanced; use mirror")
    half = [min(rank, num_ranks - 1 - rank) for rank in range(num_ranks)]
    return tuple(half), [tuple(dict.fromkeys((r, num_ranks - 1 - r))) for r in range((num_ranks + 1) // 2)]


def peak_in_flight(schedule: Schedule) -> list[float]:
    """The most microbatches of each stage in flight at once: from F to B, or to the last W.

    A slice counts as its part of a microbatch.
    """
    xp = arrays(schedule.num_actions)
    in_flight, peak = xp.full_floats(schedule.num_stages), xp.full_floats(schedule.num_stages)
    xp.call(in_flight_kernel, xp.ints(schedule.packed.codes), 1 / schedule.problem.num_weight_parts, in_flight, peak)
    return [float(count) / schedule.num_slices for count in peak]


def in_flight_kernel(codes: Ints, part: float, in_flight: Floats, peak: Floats) -> None:
    """Count rank by rank. Ranks with the same stage share its counter, which is back at 0 when a rank ends."""
    for at in range(len(codes)):
        stage, kind = stage_of(codes[at]), kind_of(codes[at])
        if kind == F:
            in_flight[stage] += 1
            if in_flight[stage] > peak[stage]:
                peak[stage] = in_flight[stage]
        elif kind == B:
            in_flight[stage] -= 1
        elif kind == W:
            in_flight[stage] -= part


def _per_rank(name: str, value: float | Sequence[float] | None, ranks: int, default: float) -> tuple[float, ...]:
    if value is None:
        return (default,) * ranks
    if isinstance(value, str) or not isinstance(value, (int, float, Iterable)):
        raise ConfigError(f"{name}={short(value)}: must be a number, or one number per rank")
    listed = [value] * ranks if isinstance(value, (int, float)) else list(value)
    for one in listed:
        if isinstance(one, bool) or not isinstance(one, (int, float)) or not one > 0:
            raise ConfigError(f"{name} has {short(one)}: must be a positive number")
    if len(listed) != ranks:
        raise ConfigError(f"{name} has {len(listed)} entries: must have {ranks}, one per rank")
    return tuple(map(float, listed))


def _raise_too_large(task: BalanceTask) -> None:
    """Raise ConfigError with the memory that is missing under the even cut."""
    even = even_counts(task.num_layers, task.num_stages)
    sizes = task.rank_loads(even)[1] if even else [0.0] * task.num_ranks
    rank = max(range(task.num_ranks), key=lambda r: sizes[r] - task.memory[r])
    raise ConfigError(
        f"memory: {size_text(task.memory[rank], 'B')} beside the workspace is too little for every cut: with even "
        f"layers rank {rank} needs {size_text(sizes[rank], 'B')}; take more ranks, more shards, or activation "
        "checkpointing"
    )
