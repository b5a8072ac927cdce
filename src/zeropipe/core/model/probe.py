"""The measurements of a profile: groups of layers, each a stage, that run in sequence on one rank.

The groups are the embedding, one layer of each kind, several layers, and the head. The engine runs and records the
schedules of this file; `zeropipe.sim.profile_costs` computes the costs of layers from the recordings.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from zeropipe.core.action import Action, Kind, Overlap, Step
from zeropipe.core.placement import Problem, linear, loop
from zeropipe.core.schedule import Schedule
from zeropipe.core.timeline import Timeline


@dataclass(frozen=True)
class LayerGroup:
    """Layers that run as one stage."""

    kinds: tuple[str, ...]
    parameters: int
    flops: float  # of its forward
    message: float  # bytes of its output


@dataclass(frozen=True)
class Probe:
    """The groups in one setting, with recorded steps of `split_schedule` and `full_schedule`."""

    groups: tuple[LayerGroup, ...]
    split: tuple[Timeline, ...]
    full: tuple[Timeline, ...]
    ac: str = "none"
    microbatch_size: int = 1
    compile: bool = False
    fused_head: bool = False  # whether the head computed its losses in chunks


@dataclass(frozen=True)
class Ping:
    """Recorded steps of `ping_schedule` with messages of one size."""

    message: float  # bytes
    steps: tuple[Timeline, ...]


@dataclass(frozen=True)
class Profile:
    """All measurements of a model. `nodes` has the machine of each rank."""

    model: str
    layers: tuple[str, ...]  # the kind of each decoder layer
    probes: tuple[Probe, ...]
    pings: tuple[Ping, ...]
    nodes: tuple[str, ...]
    tied: bool
    sequence: int
    dtype: str
    bytes_per_number: int
    machine: dict[str, object]
    versions: dict[str, str]
    sample: int | None = None  # tokens of a packed sample
    streams: tuple[Timeline, ...] = ()  # recorded steps of `stream_schedule`; none if ranks spend no time on messages


def split_schedule(num_stages: int, num_microbatches: int, ahead: int = 0) -> Schedule:
    """Microbatches with F, I and W; then one Overlap per stage, of the B of a microbatch and the F of a later one.

    The I of a microbatch runs after the F of the next `ahead` microbatches, and its W after half as many more. By then
    their inputs have left the caches of a CPU, as in a pipeline.
    """
    stages = range(num_stages)
    row = _staggered(stages, num_microbatches, {Kind.F: 0, Kind.I: ahead, Kind.W: ahead + ahead // 2})
    first, last = num_microbatches, num_microbatches + max(1, ahead)
    for microbatch in range(first, last):
        row += _through(stages, Kind.F, microbatch)
    for stage in stages:
        old, new = first + stage, last + stage
        row += _through(stages[:stage], Kind.F, new) + _through(stages[stage + 1 :], Kind.B, old)
        row.append(Overlap(Action(stage, Kind.F, new), Action(stage, Kind.B, old)))
        row += _through(stages[:stage], Kind.B, old) + _through(stages[stage + 1 :], Kind.F, new)
    for microbatch in range(first + num_stages, last + num_stages):
        row += _through(stages, Kind.B, microbatch)
    return _on_one_rank(num_stages, last + num_stages, row, "split")


def full_schedule(num_stages: int, num_microbatches: int, ahead: int = 0) -> Schedule:
    """Microbatches with F and B, the B `ahead` microbatches after the F; without Overlaps."""
    row = _staggered(range(num_stages), num_microbatches, {Kind.F: 0, Kind.B: ahead})
    return _on_one_rank(num_stages, num_microbatches, row, "full")


def _staggered(stages: Sequence[int], num_microbatches: int, lags: Mapping[Kind, int]) -> list[Step]:
    """All microbatches: iteration n has, of each kind, microbatch n - lag through all stages."""
    return [
        action
        for n in range(num_microbatches + max(lags.values()))
        for kind, lag in lags.items()
        if 0 <= n - lag < num_microbatches
        for action in _through(stages, kind, n - lag)
    ]


def _through(stages: Sequence[int], kind: Kind, microbatch: int) -> list[Step]:
    """One microbatch through these stages; in reverse for I and B."""
    return [Action(stage, kind, microbatch) for stage in (reversed(stages) if kind in (Kind.I, Kind.B) else stages)]


def ping_schedule(num_ranks: int, num_microbatches: int) -> Schedule:
    """One microbatch at a time through all ranks and back: every receiver waits for its message."""
    problem = Problem(num_ranks, num_ranks, num_microbatches)
    rows = [
        [Action(rank, kind, microbatch) for microbatch in range(num_microbatches) for kind in (Kind.F, Kind.B)]
        for rank in range(num_ranks)
    ]
    return Schedule.of(problem, linear(problem), rows, "ping")


def stream_schedule(num_ranks: int, num_microbatches: int) -> Schedule:
    """All forwards, then all backwards.

    If each rank is slower than the rank that sends to it, every message but the first arrives before it is needed, and
    the gap between two actions is the time that the rank spends on messages.
    """
    problem = Problem(num_ranks, num_ranks, num_microbatches)
    rows = [
        [Action(rank, kind, microbatch) for kind in (Kind.F, Kind.B) for microbatch in range(num_microbatches)]
        for rank in range(num_ranks)
    ]
    return Schedule.of(problem, linear(problem), rows, "stream")


def _on_one_rank(num_stages: int, num_microbatches: int, row: list[Step], name: str) -> Schedule:
    problem = Problem(1, num_stages, num_microbatches)
    return Schedule.of(problem, loop(problem), [row], name)
