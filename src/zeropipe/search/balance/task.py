"""A balancing problem as numbers: times and bytes of layers, where stages live, what ranks can do."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate

from zeropipe.core.timeline import ROUNDING
from zeropipe.errors import ConfigError


@dataclass(frozen=True)
class BalanceTask:
    """Layers in order, to be cut into stages.

    A rank's time is that of all its stages, divided by its speed. Its memory is, for each of its stages, the `fixed`
    bytes of the layers and `alive` times their `held` bytes. `first` and `last` are what these stages have beside their
    layers, and `every` what all have: time, fixed and held bytes. Stages in the middle have at least one layer.
    """

    time: tuple[float, ...]
    fixed: tuple[float, ...]
    held: tuple[float, ...]
    first: tuple[float, float, float]
    last: tuple[float, float, float]
    table: tuple[int, ...]  # the rank of each stage
    alive: tuple[float, ...]  # microbatches at once, of each stage
    speed: tuple[float, ...]  # of each rank
    memory: tuple[float, ...]  # of each rank, for all of this
    every: tuple[float, float, float] = (0.0, 0.0, 0.0)  # what every stage has beside its layers

    def __post_init__(self) -> None:
        if len(self.time) < self.num_stages - 2 or (self.num_stages == 1 and not self.time):
            raise ConfigError(
                f"{self.num_stages} stages for {len(self.time)} layers: each stage between the first and the last "
                "needs a layer; take fewer stages"
            )

    @property
    def num_layers(self) -> int:
        return len(self.time)

    @property
    def num_stages(self) -> int:
        return len(self.table)

    @property
    def num_ranks(self) -> int:
        return len(self.speed)

    @cached_property
    def stages_of(self) -> list[list[int]]:
        """The stages of each rank."""
        return [[s for s, owner in enumerate(self.table) if owner == rank] for rank in range(self.num_ranks)]

    @cached_property
    def before(self) -> tuple[list[float], list[float], list[float]]:
        """Sums over the layers before each place: time, fixed and held bytes."""
        columns = (self.time, self.fixed, self.held)
        return tuple([0.0, *accumulate(column)] for column in columns)  # type: ignore[return-value]

    def least(self, stage: int) -> int:
        """How many layers a stage needs."""
        return 0 if stage in (0, self.num_stages - 1) else 1

    def ends(self, stage: int) -> tuple[float, float, float]:
        """What a stage has beside its layers."""
        parts = [self.every, *[self.first] * (stage == 0), *[self.last] * (stage == self.num_stages - 1)]
        return tuple(map(sum, zip(*parts)))  # type: ignore[return-value]

    def stage(self, stage: int, start: int, stop: int) -> tuple[float, float]:
        """Time and bytes of a stage with the layers from `start` to before `stop`."""
        time, fixed, held = (column[stop] - column[start] for column in self.before)
        more = self.ends(stage)
        return time + more[0], fixed + more[1] + self.alive[stage] * (held + more[2])

    def ranks(self, counts: Sequence[int]) -> tuple[list[float], list[float]]:
        """Time (at its speed) and bytes of each rank."""
        time, size, start = [0.0] * self.num_ranks, [0.0] * self.num_ranks, 0
        for stage, count in enumerate(counts):
            own, needs = self.stage(stage, start, start + count)
            rank = self.table[stage]
            time[rank] += own / self.speed[rank]
            size[rank] += needs
            start += count
        return time, size

    def stage_times(self, counts: Sequence[int]) -> list[float]:
        """The time of each stage."""
        stops = list(accumulate(counts))
        return [self.stage(s, stop - count, stop)[0] for s, (count, stop) in enumerate(zip(counts, stops))]

    def fits(self, counts: Sequence[int]) -> bool:
        return all(size <= most * ROUNDING for size, most in zip(self.ranks(counts)[1], self.memory))

    def value(self, counts: Sequence[int]) -> tuple[float, float]:
        """What is minimised: the slowest rank's time; then how unequal stages are."""
        return max(self.ranks(counts)[0]), sum(time**2 for time in self.stage_times(counts))
