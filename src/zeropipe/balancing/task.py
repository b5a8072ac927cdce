"""A balancing problem as numbers: times and bytes of layers, the rank of each stage, speed and memory of ranks."""

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
    bytes of the layers and `in_flight` times their `kept` bytes. `first` and `last` are what these stages have beside
    their layers, and `every` what each stage has: time, fixed and kept bytes. Stages in the middle have at
    least one layer.
    """

    time: tuple[float, ...]
    fixed: tuple[float, ...]
    kept: tuple[float, ...]
    first: tuple[float, float, float]
    last: tuple[float, float, float]
    table: tuple[int, ...]  # the rank of each stage
    in_flight: tuple[float, ...]  # the most microbatches in flight, of each stage
    speed: tuple[float, ...]  # of each rank
    memory: tuple[float, ...]  # of each rank, in bytes
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
    def prefix_sums(self) -> tuple[list[float], list[float], list[float]]:
        """Sums over the layers before each index: time, fixed and kept bytes."""
        columns = (self.time, self.fixed, self.kept)
        return tuple([0.0, *accumulate(column)] for column in columns)  # type: ignore[return-value]

    def min_layers(self, stage: int) -> int:
        """The fewest layers that a stage may have."""
        return 0 if stage in (0, self.num_stages - 1) else 1

    def beside_layers(self, stage: int) -> tuple[float, float, float]:
        """Time, fixed and kept bytes of a stage beside its layers."""
        return self._beside_layers[stage]

    @cached_property
    def _beside_layers(self) -> list[tuple[float, float, float]]:
        parts = [[self.every] for _ in self.table]
        parts[0].append(self.first)
        parts[-1].append(self.last)
        return [tuple(map(sum, zip(*part))) for part in parts]  # type: ignore[misc]

    def evaluate(self, counts: Sequence[int]) -> tuple[list[float], list[float], float]:
        """Time (at its speed) and bytes of each rank, and the sum of squares of the stages' times."""
        time, fixed, kept = self.prefix_sums
        times, sizes, squares, start = [0.0] * self.num_ranks, [0.0] * self.num_ranks, 0.0, 0
        for stage, (count, rank, more) in enumerate(zip(counts, self.table, self._beside_layers)):
            stop = start + count
            own = time[stop] - time[start] + more[0]
            times[rank] += own / self.speed[rank]
            size = kept[stop] - kept[start] + more[2]
            sizes[rank] += fixed[stop] - fixed[start] + more[1] + self.in_flight[stage] * size
            squares += own**2
            start = stop
        return times, sizes, squares

    def rank_loads(self, counts: Sequence[int]) -> tuple[list[float], list[float]]:
        """Time (at its speed) and bytes of each rank."""
        return self.evaluate(counts)[:2]

    def fits(self, counts: Sequence[int]) -> bool:
        return all(size <= most * ROUNDING for size, most in zip(self.rank_loads(counts)[1], self.memory))

    def objective(self, counts: Sequence[int]) -> tuple[float, float]:
        """The value to minimise: the slowest rank's time, then how unequal stages are."""
        times, _, squares = self.evaluate(counts)
        return max(times), squares
