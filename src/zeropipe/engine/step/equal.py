"""What must be equal on several ranks, and the first thing that is not."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from zeropipe.core.schedule import Schedule
from zeropipe.engine.backward.gradients import to_local
from zeropipe.engine.layout import DATA_DIMENSIONS, Layout
from zeropipe.engine.stages.contract import Microbatch, StageInfo, Tie
from zeropipe.engine.step.sums import copies_on, ties

CHUNK = 2**22  # elements of a tensor that are looked at together

# ((what it is, one of its facts, which ranks are to be compared), the fact): both ends of a tie make the same key
Claims = list[tuple[tuple[str, str, tuple[int, ...]], object]]


def checksum(tensor: Tensor) -> int:
    """A number that other values, or the same values in another order, almost never have; bit for bit."""
    if tensor.is_meta:
        return 0
    flat = _flat(tensor)
    words = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[flat.element_size()]
    total = len(flat)
    for number, piece in enumerate(flat.split(CHUNK)):
        bits = piece.contiguous().view(words).long()
        place = torch.arange(1, len(bits) + 1, device=bits.device)
        total = (31 * total + number + int((bits * (2 * place + 1)).sum())) % 2**61
    return total


@dataclass(frozen=True)
class Sketch:
    """A tensor in two numbers, which rounding hardly changes and other values almost never share."""

    norm: float
    shadow: float  # its product with a fixed direction

    @staticmethod
    def of(tensor: Tensor) -> Sketch:
        squares = shadow = 0.0
        for number, piece in enumerate(_flat(tensor).split(CHUNK)):
            values = piece.double()
            place = torch.arange(len(values), device=values.device, dtype=torch.float64)
            squares += float(values.square().sum())
            shadow += float((values * torch.cos(place * place + number)).sum())
        return Sketch(squares**0.5, shadow)

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Sketch):
            return False
        far = 0.01 * max(self.norm, other.norm)
        return not (abs(self.norm - other.norm) > far or abs(self.shadow - other.shadow) > far)  # a NaN is not told


def shared_weights(schedule: Schedule, stages: Mapping[int, StageInfo], layout: Layout, values: bool) -> Claims:
    """What this rank says of its copies, ties and replicas; with `values` also a checksum of each."""
    claims: Claims = []

    def say(what: str, parameter: Tensor) -> None:
        piece = (*layout.shard_index(parameter), *layout.coordinates_in("tp"))
        claims.append(((what, "shape", piece), (tuple(parameter.shape), str(parameter.dtype))))
        claims.append(((what, "requires_grad", piece), parameter.requires_grad))
        if values:
            claims.append(((what, "values", piece), checksum(to_local(parameter))))

    for stage, info in stages.items():
        for name, parameter in info.module.named_parameters():
            if layout.unsummed_dims(parameter) or layout.is_replicated_over("dp_replicate", parameter):
                say(f"{name} of stage {stage}, of which every replica has a copy,", parameter)
            if values and layout.is_replicated_over("tp", parameter) and not parameter.is_meta:
                # each process of tp adds up a gradient of its own: rounding may part what began equal
                what = f"{name} of stage {stage}, which every process of tp has whole,"
                piece = (*layout.shard_index(parameter), *layout.coordinates_in(*DATA_DIMENSIONS))
                claims.append(((what, "values", piece), Sketch.of(to_local(parameter))))
    for _, shared in copies_on(schedule, layout.pipeline_rank):
        for stage in shared:
            for name, parameter in stages[stage].module.named_parameters():
                say(f"{name} of stage {stage}, of which there are two copies,", parameter)
    for tie in ties(stages):
        (a, name), (b, name_there) = tie.ends
        say(
            f"{name} of stage {a}, tied to {name_there} of stage {b},", stages[tie.stage].module.get_parameter(tie.name)
        )
    return claims


def lonely_tie(tied: Sequence[Iterable[Tie]]) -> str | None:
    """A tie that one stage names and its partner does not: the first would wait for the other for ever."""
    named = {tuple(tie) for some in tied for tie in some}
    for stage, name, other, name_there in sorted(named):
        if (other, name_there, stage, name) not in named:
            return (
                f"stage {stage} ties its {name} to {name_there} of stage {other}, which names no such tie: "
                "both name it in tied_pairs, or neither"
            )
    return None


def microbatch_claims(microbatches: Sequence[Microbatch], layout: Layout) -> Claims:
    """What this rank says of its microbatches: a rank may leave out keys that it does not need."""
    pipeline = layout.coordinates_in(*DATA_DIMENSIONS)
    return [
        ((f"{key!r} of microbatch {index}", "values", pipeline), _digest(value))
        for index, microbatch in enumerate(microbatches)
        for key, value in microbatch.items()
    ]


def difference(claims: Sequence[Claims]) -> str | None:
    """The first thing that two ranks say differently, in words."""
    first: dict[tuple[str, str, tuple[int, ...]], tuple[int, object]] = {}
    for rank, some in enumerate(claims):
        for key, value in some:
            before, wanted = first.setdefault(key, (rank, value))
            if value != wanted:
                what, fact, _ = key
                if fact == "values":
                    return f"{what} has other values on rank {rank} than on rank {before}: give both the same"
                return f"{what} has {fact} {value} on rank {rank} and {wanted} on rank {before}: give both the same"
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
