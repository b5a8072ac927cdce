"""What is tried, and what it comes to."""

from __future__ import annotations

from dataclasses import dataclass

from zeropipe.core.schedule import Schedule
from zeropipe.planning.layouts import Layout
from zeropipe.schedules.registry import entries


@dataclass(frozen=True, order=True)
class Candidate:
    """One thing to try."""

    layout: Layout
    schedule: str
    stages_per_rank: int
    num_microbatches: int  # of one pipeline
    microbatch_size: int  # sequences
    ac: str
    cut: str  # "even" or "balanced" layers
    shards: str = "keep"  # how sharded weights are gathered; plans keep them

    @property
    def title(self) -> str:
        """The schedule as a command takes it: with its stages per rank, unless it has one and no other number."""
        number = self.stages_per_rank
        default = next((entry.stages_per_rank[0] for entry in entries() if entry.name == self.schedule), 1)
        return self.schedule if number == default == 1 else f"{self.schedule}:v={number}"

    def __str__(self) -> str:
        return (
            f"{self.layout}, {self.title}, {self.num_microbatches} microbatches of "
            f"{self.microbatch_size}, ac {self.ac}, {self.cut} layers"
        )


@dataclass(frozen=True)
class Parts:
    """Where the seconds of a step go; they add up to it. All of the rank with most work, but for the bubble."""

    work: float  # F, I and W without computing anything again, if all ranks had the same
    recompute: float  # again, for activation checkpointing
    imbalance: float  # more than the mean on the rank with most
    bubble: float  # waiting
    data: float  # gathers and reduces of the shards that nothing hides, sums over copies of a weight
    optimizer: float

    @property
    def step(self) -> float:
        return self.work + self.recompute + self.imbalance + self.bubble + self.data + self.optimizer


@dataclass(frozen=True)
class Memory:
    """What the fullest rank holds at its peak, in bytes; they add up to it."""

    weights: float
    gradients: float
    optimizer: float
    activations: float
    workspace: float

    @property
    def peak(self) -> float:
        return self.weights + self.gradients + self.optimizer + self.activations + self.workspace


@dataclass(frozen=True)
class Row:
    """A candidate's result."""

    candidate: Candidate
    counts: tuple[int, ...]  # layers per stage
    parts: Parts
    memory: Memory
    limit: float  # bytes of a rank
    makespan: float
    bubble: float
    gap: float | None = None  # of the makespan to the bound of its placement and costs
    found: Schedule | None = None  # of a searched one

    @property
    def step(self) -> float:
        """Seconds of a step."""
        return self.parts.step

    @property
    def over(self) -> float:
        """Bytes that are missing; 0 for what fits."""
        return max(0.0, self.memory.peak - self.limit)

    @property
    def fits(self) -> bool:
        return self.over <= 1e-9 * self.limit
