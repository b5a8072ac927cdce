"""`zp.balance`: layers to stages, beside the even cut."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import lru_cache
from math import inf

from zeropipe.balancing.exact import num_tried, one_pass, two_passes
from zeropipe.balancing.simple import climb, equal_layers, spread
from zeropipe.balancing.task import BalanceTask
from zeropipe.core.action import B, F, W
from zeropipe.core.jit import Floats, Ints, arrays
from zeropipe.core.model.layers import layer_counts
from zeropipe.core.packed import kind_of, stage_of
from zeropipe.core.placement import Placement, Problem
from zeropipe.core.schedule import Schedule, require_schedule
from zeropipe.core.units import size_text
from zeropipe.errors import ConfigError, short
from zeropipe.sim.layer_costs import LayerCost, LayerCosts, Setting

MOST_TRIED = 3e9  # by an exact cut, which takes some ten seconds for so many


@dataclass(frozen=True)
class Balance:
    """Layers per stage, and what that means for each rank."""

    counts: tuple[int, ...]
    rank_times: tuple[float, ...]  # F, I and W of one microbatch, at the rank's speed
    even: tuple[int, ...] | None  # the even cut, for comparison; None if the stages are more than the layers
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
        raise ConfigError(f"costs={short(costs)}: costs of layers are needed, give zp.estimate(...) or those of a file")
    require_schedule(schedule)
    task = balance_task(
        costs, schedule.problem, schedule.placement, alive_of(schedule),
        setting=setting, ac=ac, speeds=speeds, memory=memory, shards=shards,
    )  # fmt: skip
    counts, exact = solved(task)
    if counts is None:
        _refuse(task)
    assert counts is not None
    even = even_counts(task.num_layers, task.num_stages)
    less = min(_less(task), key=lambda cut: max(task.ranks(cut)[0]), default=None)
    slowest, less_slowest = (inf if cut is None else max(task.ranks(cut)[0]) for cut in (even, less))
    times = task.ranks(counts)[0]
    if len(times) < schedule.num_ranks:  # of each rank and its mirror image
        times += times[::-1][schedule.num_ranks % 2 :]
    return Balance(counts, tuple(times), even, slowest, less, less_slowest, exact)


def even_counts(num_layers: int, num_stages: int) -> tuple[int, ...] | None:
    """The even cut; None where a stage would be empty."""
    return layer_counts(num_layers, num_stages) if num_stages <= num_layers else None


def _less(task: BalanceTask) -> Iterator[tuple[int, ...]]:
    """Even cuts with fewer layers on the first and the last stage."""
    most = -(-task.num_layers // task.num_stages) + 1
    for first in range(most):
        for last in range(most):
            with suppress(ConfigError):  # a stage would have less than nothing
                counts = layer_counts(task.num_layers, task.num_stages, first, last)
                if all(count >= task.least(stage) for stage, count in enumerate(counts)):
                    yield counts


@lru_cache(maxsize=4096)
def solved(task: BalanceTask) -> tuple[tuple[int, ...] | None, bool]:
    """The best cut that is known (None: nothing fits), and whether no cut is better."""
    alike = len(set(zip(task.time, task.fixed, task.held))) == 1
    guess = equal_layers(task) if alike else None
    if guess is not None:
        return guess, True
    if task.num_stages == task.num_ranks:
        return one_pass(task), True
    near = climb(task, spread(task))
    if task.num_stages == 2 * task.num_ranks and _is_regular(task) and num_tried(task) <= MOST_TRIED:
        most = task.value(near)[0] if task.fits(near) else inf
        return two_passes(task, most), True
    bound = (sum(task.time) + sum(task.ends(s)[0] for s in range(task.num_stages))) / sum(task.speed)
    return (near, task.value(near)[0] <= bound * (1 + 1e-9)) if task.fits(near) else (None, False)


def _is_regular(task: BalanceTask) -> bool:
    """Whether both passes visit every rank once, in the same or in the opposite order."""
    first, second = task.table[: task.num_ranks], task.table[task.num_ranks :]
    return len(set(first)) == task.num_ranks and second in (first, first[::-1])


def balanced_counts(
    costs: LayerCosts, problem: Problem, placement: Placement, setting: Setting | None = None, ac: str | None = None
) -> tuple[int, ...]:
    """The cut whose slowest rank is fastest, of whichever schedule: without a look at memory."""
    task = balance_task(costs, problem, placement, [0.0] * problem.num_stages, setting=setting, ac=ac)
    counts = solved(task)[0]
    assert counts is not None  # memory has no end here
    return counts


def balance_task(
    costs: LayerCosts,
    problem: Problem,
    placement: Placement,
    alive: Sequence[float],
    *,
    setting: Setting | None = None,
    ac: str | None = None,
    speeds: Sequence[float] | None = None,
    memory: float | Sequence[float] | None = None,
    shards: int = 1,
) -> BalanceTask:
    """The numbers of a balancing problem; `alive` is what `alive_of` finds in a schedule."""
    chosen = setting or costs.settings[0]
    layers = costs.layer_list(chosen, ac)
    each = costs.state.with_full_weights(shards)
    ends = [[chosen.kinds[kind] for kind in part] for part in (costs.before, costs.after, costs.each)]
    table, pairs = rank_table(placement, problem.num_ranks)
    speed = _per_rank("speeds", speeds, problem.num_ranks, 1.0)
    room = _per_rank("memory", memory, problem.num_ranks, inf)
    workspace = max(layer.workspace for layer in [*layers, *ends[0], *ends[1], *ends[2]])
    return BalanceTask(
        tuple(layer.f + layer.full_backward for layer in layers), tuple(layer.parameters * each for layer in layers),
        tuple(max(layer.activation, layer.stash) for layer in layers), _end(ends[0], each), _end(ends[1], each),
        table, tuple(alive), tuple(len(pair) * min(speed[r] for r in pair) for pair in pairs),
        tuple(max(0.0, min(room[r] for r in pair) - workspace) for pair in pairs), _end(ends[2], each),
    )  # fmt: skip


def _end(parts: Sequence[LayerCost], each: float) -> tuple[float, float, float]:
    return (
        sum(part.f + part.full_backward for part in parts),
        sum(part.parameters for part in parts) * each,
        sum(max(part.activation, part.stash) for part in parts),
    )


def rank_table(placement: Placement, num_ranks: int) -> tuple[tuple[int, ...], list[tuple[int, ...]]]:
    """Who has each stage, and which ranks that is: one, or a rank and its mirror image.

    Of two mirrored copies each runs half of the microbatches, so that a rank and its mirror image have equal work, and
    both hold both of their stages.
    """
    table = placement.copies[0]
    if len(placement.copies) == 1:
        return table, [(rank,) for rank in range(num_ranks)]
    if placement.copies[1] != table[::-1] or table != tuple(range(num_ranks)):
        raise ConfigError(f"placement {placement.name}: two copies that are no mirror images cannot be balanced")
    half = [min(rank, num_ranks - 1 - rank) for rank in range(num_ranks)]
    return tuple(half), [tuple(dict.fromkeys((r, num_ranks - 1 - r))) for r in range((num_ranks + 1) // 2)]


def alive_of(schedule: Schedule) -> list[float]:
    """The most microbatches of each stage for which something is kept at once, from F to B or to the last W."""
    xp = arrays(schedule.num_actions)
    alive, most = xp.full_floats(schedule.num_stages), xp.full_floats(schedule.num_stages)
    xp.call(alive_kernel, xp.ints(schedule.packed.codes), 1 / schedule.problem.num_weight_parts, alive, most)
    return list(map(float, most))


def alive_kernel(codes: Ints, part: float, alive: Floats, most: Floats) -> None:
    """Rank by rank: ranks that hold the same stage come one after the other, and each ends with nothing."""
    for at in range(len(codes)):
        stage, kind = stage_of(codes[at]), kind_of(codes[at])
        if kind == F:
            alive[stage] += 1
            if alive[stage] > most[stage]:
                most[stage] = alive[stage]
        elif kind == B:
            alive[stage] -= 1
        elif kind == W:
            alive[stage] -= part


def _per_rank(name: str, value: float | Sequence[float] | None, ranks: int, default: float) -> tuple[float, ...]:
    if value is None:
        return (default,) * ranks
    if isinstance(value, str) or not isinstance(value, (int, float, Iterable)):
        raise ConfigError(f"{name}={short(value)}: a number is needed, or one for each rank")
    listed = [value] * ranks if isinstance(value, (int, float)) else list(value)
    for one in listed:
        if isinstance(one, bool) or not isinstance(one, (int, float)) or not one > 0:
            raise ConfigError(f"{name} has {short(one)}: a number above 0 is needed")
    if len(listed) != ranks:
        raise ConfigError(f"{name} has {len(listed)} entries: there are {ranks} ranks, give one for each")
    return tuple(map(float, listed))


def _refuse(task: BalanceTask) -> None:
    """ConfigError that says how much is missing, as far as the most even use of memory tells."""
    even = even_counts(task.num_layers, task.num_stages)
    sizes = task.ranks(even)[1] if even else [0.0] * task.num_ranks
    rank = max(range(task.num_ranks), key=lambda r: sizes[r] - task.memory[r])
    raise ConfigError(
        f"memory: {size_text(task.memory[rank], 'B')} beside the workspace is too little for every cut: with even "
        f"layers rank {rank} needs {size_text(sizes[rank], 'B')}; take more ranks, more shards, or activation "
        "checkpointing"
    )
