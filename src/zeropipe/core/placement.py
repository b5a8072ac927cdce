"""Which rank holds a stage, for a microbatch."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cached_property
from operator import index
from typing import SupportsIndex

from zeropipe.core.action import Action, far_stage
from zeropipe.core.units import count_text
from zeropipe.errors import ConfigError, ScheduleError, short

MAX_WEIGHT_PARTS = 64


@dataclass(frozen=True)
class Problem:
    """The size of a pipeline."""

    num_ranks: int
    num_stages: int
    num_microbatches: int
    num_weight_parts: int = 1  # every W is that many actions, each an equal part of its work

    @property
    def stages_per_rank(self) -> int:
        return self.num_stages // self.num_ranks


@dataclass(frozen=True)
class Placement:
    """Where stages live: one table stage -> rank per copy of the model.

    Almost all placements have one copy. DualPipe and Chimera keep two: microbatches from `second_from` on go through
    the second one.
    """

    copies: tuple[tuple[int, ...], ...]
    second_from: int | None = None
    name: str = field(default="custom", compare=False)

    def rank_of(self, stage: int, microbatch: int = 0) -> int:
        """The rank that runs `stage` for `microbatch`."""
        return self.copies[self.copy_of(microbatch)][stage]

    def copy_of(self, microbatch: int) -> int:
        """Which copy of the model `microbatch` goes through."""
        return 0 if self.second_from is None or microbatch < self.second_from else 1

    def peer_of(self, message: Action) -> int:
        """The rank at the other end of a SEND or RECV."""
        return self.rank_of(far_stage(message.stage, message.kind), message.microbatch)

    def stages_of(self, rank: int) -> tuple[int, ...]:
        """The stages held by `rank` (of all copies), in order, each once."""
        return self._stages.get(rank, ())

    @cached_property
    def _stages(self) -> dict[int, tuple[int, ...]]:
        found: dict[int, set[int]] = {}
        for table in self.copies:
            for stage, rank in enumerate(table):
                found.setdefault(rank, set()).add(stage)
        return {rank: tuple(sorted(stages)) for rank, stages in found.items()}


PlacementRule = Callable[[Problem], Placement]


def linear(problem: Problem) -> Placement:
    """Stage s on rank s."""
    return Placement((tuple(range(problem.num_stages)),), name="linear")


def loop(problem: Problem) -> Placement:
    """Stage s on rank s mod num_ranks."""
    return Placement((tuple(s % problem.num_ranks for s in range(problem.num_stages)),), name="loop")


def vee(problem: Problem) -> Placement:
    """Down the ranks and back up again, as often as there are stages."""
    p = problem.num_ranks
    table = tuple(s % p if s // p % 2 == 0 else p - 1 - s % p for s in range(problem.num_stages))
    return Placement((table,), name="vee")


def mirror(problem: Problem) -> Placement:
    """Two copies of each stage: the first half of the microbatches goes down the ranks, the second half up."""
    down = tuple(range(problem.num_stages))
    if problem.num_ranks == 1 or problem.num_microbatches == 1:
        return Placement((down,), name="mirror")
    return Placement((down, down[::-1]), second_from=(problem.num_microbatches + 1) // 2, name="mirror")


PLACEMENTS: dict[str, PlacementRule] = {rule.__name__: rule for rule in (linear, loop, vee, mirror)}


def recognise(copies: tuple[tuple[int, ...], ...], second_from: int | None, problem: Problem) -> Placement:
    """The named placement these tables are, or a custom one."""
    for rule in PLACEMENTS.values():
        if rule in (linear, mirror) and problem.num_stages != problem.num_ranks:
            continue
        known = rule(problem)
        if known.copies == copies:
            return Placement(copies, second_from, known.name)
    return Placement(copies, second_from)


def require_problem(problem: object) -> None:
    """ConfigError for what is no Problem, and for sizes that are no whole numbers."""
    if not isinstance(problem, Problem):
        raise ConfigError(f"problem={short(problem)}: a zp.Problem is needed, like zp.Problem(4, 8, 16)")
    for name, value in vars(problem).items():
        if not isinstance(value, SupportsIndex) or index(value) < 0:
            raise ConfigError(f"{name}={short(value)}: a whole number is needed")


def require_placement(placement: Placement, problem: Problem) -> None:
    """ConfigError for tables that do not place every stage on a rank that exists."""
    copies, second = placement.copies, placement.second_from
    if len(copies) != (1 if second is None else 2):
        raise ConfigError(
            f"the placement has {len(copies)} tables: one is needed, or two and the first microbatch of the second one"
        )
    if second is not None and not (type(second) is int and 0 <= second <= problem.num_microbatches):
        raise ConfigError(
            f"the placement's second copy begins with microbatch {second!r}: give 0 to {problem.num_microbatches}"
        )
    for table in copies:
        if len(table) != problem.num_stages:
            raise ConfigError(f"the placement places {count_text(len(table), 'stage')}: there are {problem.num_stages}")
        for stage, rank in enumerate(table):
            if not (type(rank) is int and 0 <= rank < problem.num_ranks):
                raise ConfigError(f"stage {stage} is placed on rank {rank!r}: ranks are 0 to {problem.num_ranks - 1}")


def require_actions(problem: Problem, num_actions: int) -> None:
    """ScheduleError for a file with far too few actions, before tables of the size it claims are made."""
    if problem.num_weight_parts > num_actions:
        raise ScheduleError(f"num_weight_parts is {problem.num_weight_parts}: there are only {num_actions} actions")
    if problem.num_stages * problem.num_microbatches > num_actions:
        raise ScheduleError(
            f"there are fewer actions than {count_text(problem.num_stages, 'stage')} times "
            f"{count_text(problem.num_microbatches, 'microbatch')}: number both from 0 without gaps, and give each "
            "stage and microbatch F and B, or F, I and W"
        )
