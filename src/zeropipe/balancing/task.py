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
        return self._ends[stage]

    @cached_property
    def _ends(self) -> list[tuple[float, float, float]]:
        parts = [[self.every] for _ in self.table]
        parts[0].append(self.first)
        parts[-1].append(self.last)
        return [tuple(map(sum, zip(*part))) for part in parts]  # type: ignore[misc]

    def loads(self, counts: Sequence[int]) -> tuple[list[float], list[float], float]:
        """Time (at its speed) and bytes of each rank, and the sum of squares of the stages' times."""
        time, fixed, held = self.before
        times, sizes, squares, start = [0.0] * self.num_ranks, [0.0] * self.num_ranks, 0.0, 0
        for stage, (count, rank, more) in enumerate(zip(counts, self.table, self._ends)):
            stop = start + count
            own = time[stop] - time[start] + more[0]
            times[rank] += own / self.speed[rank]
            kept = held[stop] - held[start] + more[2]
            sizes[rank] += fixed[stop] - fixed[start] + more[1] + self.alive[stage] * kept
            squares += own**2
            start = stop
        return times, sizes, squares

    def ranks(self, counts: Sequence[int]) -> tuple[list[float], list[float]]:
        """Time (at its speed) and bytes of each rank."""
        return self.loads(counts)[:2]

    def fits(self, counts: Sequence[int]) -> bool:
        return all(size <= most * ROUNDING for size, most in zip(self.ranks(counts)[1], self.memory))

    def value(self, counts: Sequence[int]) -> tuple[float, float]:
        """What is minimised: the slowest rank's time; then how unequal stages are."""
        times, _, squares = self.loads(counts)
        return max(times), squares
