"""Comparison of values that must be equal on several ranks: copies, ties and replicas of weights, microbatches."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from zeropipe.core.mesh import DATA_DIMENSIONS
from zeropipe.core.schedule import Schedule
from zeropipe.engine.backward.gradients import to_local
from zeropipe.engine.layout import Layout
from zeropipe.engine.stages.contract import Microbatch, StageInfo, list_ties
from zeropipe.engine.step.sums import find_copies

CHUNK_SIZE = 2**22  # elements

# ((name, fact, ranks with the same tuple are compared), value of the fact); both partners of a tie have the same key
Facts = list[tuple[tuple[str, str, tuple[int, ...]], object]]


def checksum(tensor: Tensor) -> int:
    """A checksum of the bits of a tensor, which depends on their order."""
    if tensor.is_meta:
        return 0
    flat = _flat(tensor)
    integers = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[flat.element_size()]
    total = len(flat)
    for number, chunk in enumerate(flat.split(CHUNK_SIZE)):
        bits = chunk.contiguous().view(integers).long()
        position = torch.arange(1, len(bits) + 1, device=bits.device)
        total = (31 * total + number + int((bits * (2 * position + 1)).sum())) % 2**61
    return total


@dataclass(frozen=True)
class Sketch:
    """Two numbers of a tensor, which rounding hardly changes and other values almost never have."""

    norm: float
    projection: float  # on a fixed direction

    @staticmethod
    def of(tensor: Tensor) -> Sketch:
        squares = projection = 0.0
        for number, chunk in enumerate(_flat(tensor).split(CHUNK_SIZE)):
            values = chunk.double()
            position = torch.arange(len(values), device=values.device, dtype=torch.float64)
            squares += float(values.square().sum())
            projection += float((values * torch.cos(position * position + number)).sum())
        return Sketch(squares**0.5, projection)

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Sketch):
            return False
        tolerance = 0.01 * max(self.norm, other.norm)
        return not (
            abs(self.norm - other.norm) > tolerance or abs(self.projection - other.projection) > tolerance
        )  # NaN compares equal


def describe_ties(stages: Mapping[int, StageInfo], layout: Layout, values: bool) -> Facts:
    """Facts about this rank's ties; with `values` also a checksum of each."""
    facts: Facts = []
    for tie in list_ties(stages):
        (a, name), (b, partner_name) = tie.ends
        what = f"{name} of stage {a}, tied to {partner_name} of stage {b},"
        facts += _describe(what, stages[tie.stage].module.get_parameter(tie.name), layout, values)
    return facts


def _describe(what: str, parameter: Tensor, layout: Layout, values: bool) -> Facts:
    shard = (*layout.shard_index(parameter), *layout.coordinates_in("tp"))
    facts: Facts = [
        ((what, "shape", shard), (tuple(parameter.shape), str(parameter.dtype))),
        ((what, "requires_grad", shard), parameter.requires_grad),
    ]
    return [*facts, ((what, "values", shard), checksum(to_local(parameter)))] if values else facts


def describe_shared_weights(schedule: Schedule, stages: Mapping[int, StageInfo], layout: Layout, values: bool) -> Facts:
    """Facts about this rank's copies, ties and replicas; with `values` also a checksum of each."""
    facts: Facts = []

    def add(what: str, parameter: Tensor) -> None:
        facts.extend(_describe(what, parameter, layout, values))

    for stage, info in stages.items():
        for name, parameter in info.module.named_parameters():
            if layout.unsummed_dims(parameter) or layout.is_replicated_over("dp_replicate", parameter):
                add(f"{name} of stage {stage}, of which every replica has a copy,", parameter)
            if values and layout.is_replicated_over("tp", parameter) and not parameter.is_meta:
                # each process of tp computes a gradient of its own, so rounding may differ
                what = f"{name} of stage {stage}, which is replicated over tp,"
                shard = (*layout.shard_index(parameter), *layout.coordinates_in(*DATA_DIMENSIONS))
                facts.append(((what, "values", shard), Sketch.of(to_local(parameter))))
    for _, shared in find_copies(schedule, layout.pipeline_rank):
        for stage in shared:
            for name, parameter in stages[stage].module.named_parameters():
                add(f"{name} of stage {stage}, of which there are two copies,", parameter)
    return facts + describe_ties(stages, layout, values)


def describe_microbatches(microbatches: Sequence[Microbatch], layout: Layout) -> Facts:
    """Facts about this rank's microbatches: a rank may leave out keys that it does not need."""
    pipeline = layout.coordinates_in(*DATA_DIMENSIONS)
    return [
        ((f"{key!r} of microbatch {index}", "values", pipeline), _digest(value))
        for index, microbatch in enumerate(microbatches)
        for key, value in microbatch.items()
    ]


def find_difference(facts: Sequence[Facts]) -> str | None:
    """The error for the first fact that differs between two ranks; None if there is none."""
    first: dict[tuple[str, str, tuple[int, ...]], tuple[int, object]] = {}
    for rank, some in enumerate(facts):
        for key, value in some:
            first_rank, expected = first.setdefault(key, (rank, value))
            if value != expected:
                what, fact, _ = key
                text = f"{what} has {fact} {value} on rank {rank} and {expected} on rank {first_rank}"
                if fact == "values":
                    text = f"{what} has other values on rank {rank} than on rank {first_rank}"
                return f"{text}: both must be the same"
    return None


def _flat(tensor: Tensor) -> Tensor:
    flat = tensor.detach().reshape(-1)
    return torch.view_as_real(flat).reshape(-1) if flat.is_complex() else flat


def _digest(value: Any) -> object:
    if isinstance(value, Tensor):
        return (tuple(value.shape), str(value.dtype), checksum(value))
    if isinstance(value, tuple | list):
        return tuple(map(_digest, value))
    if isinstance(value, Mapping):
        return tuple((key, _digest(value[key])) for key in sorted(value))
    return hashlib.sha256(repr(value).encode()).hexdigest()[:16]
