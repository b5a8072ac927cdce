"""What a profile measures: pieces of a model run alone, one after the other, on one rank.

A piece is a stage of its own: the embedding, one layer of each kind, several layers together, the head. What is
measured here, by the engine, becomes costs of layers in `zeropipe.sim.profiled`.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from zeropipe.core.action import Action, Kind, Overlap, Step
from zeropipe.core.placement import Problem, linear, loop
from zeropipe.core.schedule import Schedule
from zeropipe.core.timeline import Timeline


@dataclass(frozen=True)
class Piece:
    """Some layers, by their kinds."""

    kinds: tuple[str, ...]
    parameters: int
    flops: float  # of its forward
    message: float  # bytes that it hands on


@dataclass(frozen=True)
class Probe:
    """The pieces in one setting. `split` and `whole` are steps of `split_schedule` and `whole_schedule`, recorded."""

    pieces: tuple[Piece, ...]
    split: tuple[Timeline, ...]
    whole: tuple[Timeline, ...]
    ac: str = "none"
    microbatch_size: int = 1
    compile: bool = False


@dataclass(frozen=True)
class Ping:
    """Messages of one size between neighbouring ranks: steps of `ping_schedule`, recorded."""

    message: float
    steps: tuple[Timeline, ...]


@dataclass(frozen=True)
class Profile:
    """All that was measured of a model. `nodes` names the machine of each rank."""

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
    streams: tuple[
        Timeline, ...
    ] = ()  # steps of `stream_schedule`, recorded; none where ranks spend no time on messages


def split_schedule(num_stages: int, num_microbatches: int) -> Schedule:
    """Microbatch by microbatch: forward through all stages, then back with I, then W."""
    row: list[Step] = []
    for microbatch in range(num_microbatches):
        row += [Action(stage, Kind.F, microbatch) for stage in range(num_stages)]
        row += [Action(stage, Kind.I, microbatch) for stage in reversed(range(num_stages))]
        row += [Action(stage, Kind.W, microbatch) for stage in range(num_stages)]
    return _on_one_rank(num_stages, num_microbatches, row, "split")


def whole_schedule(num_stages: int, num_microbatches: int) -> Schedule:
    """The same with B, and then a pair of microbatches for each stage whose F and B run together there."""
    row: list[Step] = []
    for microbatch in range(num_microbatches):
        row += [Action(stage, Kind.F, microbatch) for stage in range(num_stages)]
        row += [Action(stage, Kind.B, microbatch) for stage in reversed(range(num_stages))]
    for stage in range(num_stages):
        row += _pair(stage, num_stages, num_microbatches + 2 * stage)
    return _on_one_rank(num_stages, num_microbatches + 2 * num_stages, row, "whole")


def _pair(stage: int, num_stages: int, first: int) -> Iterator[Step]:
    """Two microbatches, of which one goes back through `stage` while the other comes."""
    second = first + 1
    yield from (Action(s, Kind.F, first) for s in range(num_stages))
    yield from (Action(s, Kind.F, second) for s in range(stage))
    yield from (Action(s, Kind.B, first) for s in reversed(range(stage + 1, num_stages)))
    yield Overlap(Action(stage, Kind.F, second), Action(stage, Kind.B, first))
    yield from (Action(s, Kind.B, first) for s in reversed(range(stage)))
    yield from (Action(s, Kind.F, second) for s in range(stage + 1, num_stages))
    yield from (Action(s, Kind.B, second) for s in reversed(range(num_stages)))


def ping_schedule(num_ranks: int, num_microbatches: int) -> Schedule:
    """One microbatch at a time goes up all ranks and back: every message is waited for."""
    problem = Problem(num_ranks, num_ranks, num_microbatches)
    rows = [
        [Action(rank, kind, microbatch) for microbatch in range(num_microbatches) for kind in (Kind.F, Kind.B)]
        for rank in range(num_ranks)
    ]
    return Schedule.of(problem, linear(problem), rows, "ping")


def stream_schedule(num_ranks: int, num_microbatches: int) -> Schedule:
    """All microbatches go up the ranks, then all come back: where each rank is slower than the one that sends to it,
    every message but the first is there before it is needed, and a gap between two actions is what messages take."""
    problem = Problem(num_ranks, num_ranks, num_microbatches)
    rows = [
        [Action(rank, kind, microbatch) for kind in (Kind.F, Kind.B) for microbatch in range(num_microbatches)]
        for rank in range(num_ranks)
    ]
    return Schedule.of(problem, linear(problem), rows, "stream")


def _on_one_rank(num_stages: int, num_microbatches: int, row: list[Step], name: str) -> Schedule:
    problem = Problem(1, num_stages, num_microbatches)
    return Schedule.of(problem, loop(problem), [row], name)
