"""Candidates of a plan, and the row of each."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from zeropipe.core.schedule import Schedule
from zeropipe.planning.layouts import Layout
from zeropipe.schedules.registry import build, entries


class Run(NamedTuple):
    """A layout with microbatches and checkpointing: a candidate without its schedule."""

    layout: Layout
    num_microbatches: int
    microbatch_size: int
    ac: str


@dataclass(frozen=True, order=True)
class Candidate:
    """A layout, a schedule, microbatches, checkpointing and a cut."""

    layout: Layout
    schedule: str
    stages_per_rank: int
    num_microbatches: int  # of one pipeline
    microbatch_size: int  # sequences
    ac: str
    cut: str  # "even" or "balanced" layers
    shards: str = "keep"  # how sharded weights are gathered; plans keep them
    gradients: str = "whole"  # when gradients of sharded stages are reduced
    turns: bool = True  # F and B of an Overlap take turns at exchanges of experts
    slices: int = 1  # of each sequence
    slice_sizes: tuple[float, ...] | None = None  # None: so that slices take equal time
    offload: bool = False  # as few activations as keep the memory limit are copied to the host
    checkpointing: bool = False  # the F that the schedule says are checkpointed: as few as keep the memory limit

    @property
    def run(self) -> Run:
        return Run(self.layout, self.num_microbatches, self.microbatch_size, self.ac)

    @property
    def title(self) -> str:
        """The schedule as a command accepts it; without `:v=1` if that is its default."""
        number = self.stages_per_rank
        default = next((entry.stages_per_rank[0] for entry in entries() if entry.name == self.schedule), 1)
        title = self.schedule if number == default == 1 else f"{self.schedule}:v={number}"
        return title if self.slices == 1 else f"{title}:slices={self.slices}"

    def __str__(self) -> str:
        return (
            f"{self.layout}, {self.title}, {self.num_microbatches} microbatches of "
            f"{self.microbatch_size}, ac {self.ac}, {self.cut} layers"
            f"{', regather' if self.shards == 'regather' else ''}"
            f"{'' if self.gradients == 'whole' else f', gradients {self.gradients}'}{', offload' * self.offload}"
            f"{', some F checkpointed' * self.checkpointing}"
        )

    def build_schedule(self) -> Schedule:
        """Build the registered schedule; ConfigError if it does not take these sizes."""
        return build(
            self.schedule, ranks=self.layout.pp, microbatches=self.num_microbatches,
            stages_per_rank=self.stages_per_rank, **({"slices": self.slices} if self.slices > 1 else {}),
        )  # fmt: skip


@dataclass(frozen=True)
class StepSeconds:
    """The seconds of a step by purpose, which add up to it: on the busiest rank, and its idle time."""

    work: float  # F, I and W without recomputation: the mean over ranks
    recompute: float  # for activation checkpointing: the mean over ranks
    imbalance: float  # of the busiest rank, above the mean
    schedule: float  # idle time of the busiest rank without gathers and reductions
    data: float  # exposed gathers and reductions of shards, and sums over copies of a weight
    optimizer: float
    exchange: float = 0.0  # exposed exchanges of rows of experts: the mean over ranks
    parts: float = 0.0  # exchanges of attention over cp: the mean over ranks

    @property
    def total(self) -> float:
        work = self.work + self.recompute + self.exchange + self.parts + self.imbalance
        return work + self.schedule + self.data + self.optimizer


@dataclass(frozen=True)
class RankMemory:
    """Bytes of a rank at its peak by purpose, which add up to it."""

    weights: float
    gradients: float
    optimizer: float
    activations: float
    workspace: float

    @property
    def peak(self) -> float:
        return self.weights + self.gradients + self.optimizer + self.activations + self.workspace


@dataclass(frozen=True)
class PlanRow:
    """The result of a candidate."""

    candidate: Candidate
    counts: tuple[int, ...]  # layers per stage
    seconds: StepSeconds
    memory: RankMemory  # of the fullest rank
    limit: float  # bytes of a rank
    makespan: float
    idle_fraction: float
    bubble: float  # the Zero Bubble paper's rate
    gap: float | None = None  # of the makespan to the lower bound of its placement and costs
    own_schedule: Schedule | None = None  # searched, with copies to the host or checkpointed F: no name builds it
    host_memory: float = 0.0  # bytes of activations that a rank has on its host

    @property
    def step(self) -> float:
        """Seconds of a step."""
        return self.seconds.total

    @property
    def excess(self) -> float:
        """Bytes above the limit; 0 if the candidate fits."""
        return max(0.0, self.memory.peak - self.limit)

    @property
    def fits(self) -> bool:
        return self.excess <= 1e-9 * self.limit

    @property
    def checkpointed(self) -> float:
        """The fraction of F that the schedule checkpoints; those of `candidate.ac` do not count."""
        if self.own_schedule is None or not self.own_schedule.checkpointed:
            return 0.0
        problem = self.own_schedule.problem
        num_forwards = problem.num_stages * problem.num_microbatches * self.own_schedule.num_slices
        return len(self.own_schedule.checkpointed) / num_forwards

    @property
    def schedule(self) -> Schedule:
        """The schedule of its own, or the registered one, built now."""
        return self.own_schedule or self.candidate.build_schedule()
