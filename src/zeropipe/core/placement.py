"""Which rank holds a stage, for a microbatch."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cached_property
from operator import index
from typing import SupportsIndex

from zeropipe.core.action import MAX_SLICES, Action, peer_stage
from zeropipe.core.units import count_text
from zeropipe.errors import ConfigError, ScheduleError, short

MAX_WEIGHT_PARTS = 64


@dataclass(frozen=True)
class Problem:
    """The size of a pipeline."""

    num_ranks: int
    num_stages: int
    num_microbatches: int
    num_weight_parts: int = 1  # every W is this number of actions, each an equal part of its work
    num_slices: int = 1  # every microbatch is this number of slices of its sequences, each with actions of its own

    @property
    def total_slices(self) -> int:
        """The number of slices of all microbatches."""
        return self.num_microbatches * self.num_slices

    @property
    def stages_per_rank(self) -> int:
        return self.num_stages // self.num_ranks


@dataclass(frozen=True)
class Placement:
    """The rank of every stage: one table stage -> rank per copy of the model.

    Most placements have one copy. DualPipe and Chimera have two: microbatches from `second_from` on use the second.
    """

    copies: tuple[tuple[int, ...], ...]
    second_from: int | None = None
    name: str = field(default="custom", compare=False)

    def rank_of(self, stage: int, microbatch: int = 0) -> int:
        """The rank that runs `stage` for `microbatch`."""
        return self.copies[self.copy_of(microbatch)][stage]

    def copy_of(self, microbatch: int) -> int:
        """The copy of the model that `microbatch` uses."""
        return 0 if self.second_from is None or microbatch < self.second_from else 1

    def peer_of(self, message: Action) -> int:
        """The rank at the other end of a SEND or RECV."""
        return self.rank_of(peer_stage(message.stage, message.kind), message.microbatch)

    def stages_of(self, rank: int) -> tuple[int, ...]:
        """The stages that `rank` holds, of all copies, in order."""
        return self._stages.get(rank, ())

    @cached_property
    def _stages(self) -> dict[int, tuple[int, ...]]:
        stages: dict[int, set[int]] = {}
        for table in self.copies:
            for stage, rank in enumerate(table):
                stages.setdefault(rank, set()).add(stage)
        return {rank: tuple(sorted(held)) for rank, held in stages.items()}


PlacementRule = Callable[[Problem], Placement]


def linear(problem: Problem) -> Placement:
    """Stage s on rank s."""
    return Placement((tuple(range(problem.num_stages)),), name="linear")


def loop(problem: Problem) -> Placement:
    """Stage s on rank s mod num_ranks."""
    return Placement((tuple(s % problem.num_ranks for s in range(problem.num_stages)),), name="loop")


def vee(problem: Problem) -> Placement:
    """Down the ranks and back up again, repeated for all stages."""
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


def match_placement(copies: tuple[tuple[int, ...], ...], second_from: int | None, problem: Problem) -> Placement:
    """A placement of these tables, named after the rule of PLACEMENTS that gives the same ones, else "custom"."""
    for rule in PLACEMENTS.values():
        if rule in (linear, mirror) and problem.num_stages != problem.num_ranks:
            continue
        candidate = rule(problem)
        if candidate.copies == copies:
            return Placement(copies, second_from, candidate.name)
    return Placement(copies, second_from)


def require_problem(problem: object) -> None:
    """ConfigError unless `problem` is a Problem with integer sizes."""
    if not isinstance(problem, Problem):
        raise ConfigError(f"problem={short(problem)}: must be a zp.Problem, like zp.Problem(4, 8, 16)")
    for name, value in vars(problem).items():
        if not isinstance(value, SupportsIndex) or index(value) < 0:
            raise ConfigError(f"{name}={short(value)}: must be a non-negative integer")
    if not 1 <= problem.num_slices < MAX_SLICES:
        raise ConfigError(f"num_slices={problem.num_slices}: must be from 1 to {MAX_SLICES - 1}")


def require_placement(placement: Placement, problem: Problem) -> None:
    """ConfigError unless the tables place every stage on an existing rank."""
    copies, second = placement.copies, placement.second_from
    if len(copies) != (1 if second is None else 2):
        raise ConfigError(
            f"the placement has {len(copies)} tables: must be 1, or 2 and the first microbatch of the second"
        )
    if second is not None and not (type(second) is int and 0 <= second <= problem.num_microbatches):
        rule = f"must be an integer from 0 to {problem.num_microbatches}"
        raise ConfigError(f"the second copy of the placement starts at microbatch {second!r}: {rule}")
    for table in copies:
        if len(table) != problem.num_stages:
            raise ConfigError(f"the placement has {count_text(len(table), 'stage')}: must be {problem.num_stages}")
        for stage, rank in enumerate(table):
            if not (type(rank) is int and 0 <= rank < problem.num_ranks):
                raise ConfigError(f"stage {stage} is placed on rank {rank!r}: ranks are 0 to {problem.num_ranks - 1}")


def require_num_actions(problem: Problem, num_actions: int) -> None:
    """ScheduleError for a file with too few actions for its sizes, before tables of these sizes are allocated."""
    if problem.num_weight_parts > num_actions:
        raise ScheduleError(f"num_weight_parts is {problem.num_weight_parts}: there are only {num_actions} actions")
    if problem.num_stages * problem.total_slices > num_actions:
        slices, all_of = (f" times {problem.num_slices} slices", "all") if problem.num_slices > 1 else ("", "both")
        raise ScheduleError(
            f"there are fewer actions than {count_text(problem.num_stages, 'stage')} times "
            f"{count_text(problem.num_microbatches, 'microbatch')}{slices}; number {all_of} from 0 without gaps, and "
            "write F and B, or F, I and W, for each stage and microbatch"
        )
