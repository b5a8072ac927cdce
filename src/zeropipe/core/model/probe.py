"""What a profile measures: pieces of a model run alone, one after the other, on one rank.

A piece is a stage of its own: the embedding, one layer of each kind, several layers together, the head. What is
measured here, by the engine, becomes costs of layers in `zeropipe.sim.profiled`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
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


def split_schedule(num_stages: int, num_microbatches: int, ahead: int = 0) -> Schedule:
    """Forward through all stages, back with I, then W; and then pairs of microbatches, one for each stage, of which the
    first one's B runs there together with the second one's F.

    The I of a microbatch comes after the F of the next `ahead` ones, and its W half as many microbatches later: what
    they read has left the caches of a CPU by then, as in a pipeline.
    """
    stages = range(num_stages)
    row = _behind_each_other(stages, num_microbatches, {Kind.F: 0, Kind.I: ahead, Kind.W: ahead + ahead // 2})
    first, last = num_microbatches, num_microbatches + max(1, ahead)
    for microbatch in range(first, last):
        row += _through(stages, Kind.F, microbatch)
    for stage in stages:
        back, new = first + stage, last + stage
        row += _through(stages[:stage], Kind.F, new) + _through(stages[stage + 1 :], Kind.B, back)
        row.append(Overlap(Action(stage, Kind.F, new), Action(stage, Kind.B, back)))
        row += _through(stages[:stage], Kind.B, back) + _through(stages[stage + 1 :], Kind.F, new)
    for microbatch in range(first + num_stages, last + num_stages):
        row += _through(stages, Kind.B, microbatch)
    return _on_one_rank(num_stages, last + num_stages, row, "split")


def whole_schedule(num_stages: int, num_microbatches: int, ahead: int = 0) -> Schedule:
    """The same with B, without pairs."""
    row = _behind_each_other(range(num_stages), num_microbatches, {Kind.F: 0, Kind.B: ahead})
    return _on_one_rank(num_stages, num_microbatches, row, "whole")


def _behind_each_other(stages: Sequence[int], num_microbatches: int, behind: Mapping[Kind, int]) -> list[Step]:
    """Every kind of action of every microbatch: in each turn a microbatch of each kind, so many behind the newest."""
    return [
        action
        for turn in range(num_microbatches + max(behind.values()))
        for kind, late in behind.items()
        if 0 <= turn - late < num_microbatches
        for action in _through(stages, kind, turn - late)
    ]


def _through(stages: Sequence[int], kind: Kind, microbatch: int) -> list[Step]:
    """One microbatch through these stages, backward if its kind goes that way."""
    return [Action(stage, kind, microbatch) for stage in (reversed(stages) if kind in (Kind.I, Kind.B) else stages)]


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
