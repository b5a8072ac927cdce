"""Gradients that belong together on several ranks: the two copies of a mirrored stage, tied embeddings."""

from __future__ import annotations

import zlib
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor, nn

from zeropipe.core.schedule import Schedule
from zeropipe.engine.backward.gradients import gradient, squares
from zeropipe.engine.comm.fabric import Fabric, Summing
from zeropipe.engine.stages.contract import Told

BUCKET = 32 * 2**20  # bytes summed in one message: a copy of all gradients is never made


class Tie(NamedTuple):
    """Two parameters of two stages that must stay equal, as one of its ends sees it."""

    stage: int
    name: str
    other: int
    name_there: str

    @property
    def ends(self) -> tuple[tuple[int, str], tuple[int, str]]:
        """Both ends, in an order that they share."""
        here, there = (self.stage, self.name), (self.other, self.name_there)
        return (here, there) if here < there else (there, here)


class GradientSums:
    """Sums the gradients of parameters that live more than once, after each step."""

    def __init__(self, schedule: Schedule, stages: Mapping[int, Told], fabric: Fabric) -> None:
        self._between: list[tuple[Summing, list[nn.Parameter]]] = []  # a group of ranks, what they sum
        self._names: list[str] = []  # of the entries of _between, the same on all their ranks
        self._within: list[tuple[nn.Parameter, nn.Parameter]] = []  # two tensors of one rank
        self._counted: list[nn.Parameter] = []  # those whose norm this rank accounts for
        modules = {stage: stages[stage].module for stage in sorted(stages)}
        self.all: list[nn.Parameter] = unique(p for module in modules.values() for p in module.parameters())
        rank, copies = fabric.rank, schedule.placement.copies
        for homes, shared in copies_on(schedule, rank):
            parameters = unique(p for stage in shared for p in modules[stage].parameters())
            self._between.append((fabric.summing_group(homes), parameters))
            self._names.append(f"copies on {homes}")
        follower: set[tuple[int, int]] = set()
        for tie in ties(stages):
            parameter = modules[tie.stage].get_parameter(tie.name)
            if tie.other < tie.stage:
                follower.add((tie.stage, id(parameter)))
            if tie.other in stages:
                partner = modules[tie.other].get_parameter(tie.name_there)
                if tie.stage < tie.other and partner is not parameter:
                    self._within.append((parameter, partner))
                continue
            copy = next(c for c, table in enumerate(copies) if table[tie.stage] == rank)
            homes = tuple(sorted((rank, copies[copy][tie.other])))
            self._between.append((fabric.summing_group(homes), [parameter]))
            self._names.append(f"{tie.ends} on {homes}")
        for stage, module in modules.items():
            if copies[0][stage] == rank:
                self._counted += [p for p in module.parameters() if (stage, id(p)) not in follower]
        self._counted = unique(self._counted)
        self.shared = unique([p for _, ps in self._between for p in ps] + [p for pair in self._within for p in pair])

    def run(self) -> None:
        """Add up; afterwards all holders have the same gradient."""
        for group, parameters in self._between:
            _sum_between(group, [gradient(p) for p in parameters if p.requires_grad])
        for one, other in self._within:
            if one.requires_grad and other.requires_grad:
                gradient(other).copy_(gradient(one).add_(gradient(other)))

    def flags(self) -> list[tuple[tuple[str, str], object]]:
        """Which shared parameters need a gradient, in short: their holders must agree, or one would wait for ever."""
        return [
            ((name, "requires_grad"), zlib.crc32(bytes(p.requires_grad for p in parameters)))
            for name, (_, parameters) in zip(self._names, self._between)
        ]

    def close(self) -> None:
        """Let go of the groups."""
        self._between.clear()

    def squares(self) -> float:
        """The squared norm of this rank's gradients, each parameter of the model counted on one rank only."""
        return squares(self._counted)


def copies_on(schedule: Schedule, rank: int) -> list[tuple[tuple[int, ...], list[int]]]:
    """The stages of `rank` that other ranks hold too, by the ranks that hold them, in an order all ranks share."""
    found: dict[tuple[int, ...], list[int]] = {}
    for stage in range(schedule.num_stages):
        homes = tuple(sorted({table[stage] for table in schedule.placement.copies}))
        if len(homes) > 1 and rank in homes:
            found.setdefault(homes, []).append(stage)
    return sorted(found.items())


def unique(parameters: Iterable[nn.Parameter]) -> list[nn.Parameter]:
    """Each parameter once, in order."""
    return list({id(p): p for p in parameters}.values())


def ties(stages: Mapping[int, Told]) -> list[Tie]:
    """All ties of this rank's stages, in an order all ranks share."""
    found = [Tie(stage, *tie) for stage, told in stages.items() for tie in told.ties]
    return sorted(found, key=lambda tie: (tie.ends, tie))


def _sum_between(group: Summing, gradients: Sequence[Tensor]) -> None:
    """Sum over the group, in place, small gradients several at a time."""
    for some in buckets(gradients, BUCKET):
        if len(some) == 1 and some[0].is_contiguous():
            group.add(some[0])
            continue
        flat = torch.cat([tensor.reshape(-1) for tensor in some])
        group.add(flat)
        for tensor, piece in zip(some, flat.split([tensor.numel() for tensor in some])):
            tensor.copy_(piece.view_as(tensor))


def buckets(tensors: Sequence[Tensor], size: int) -> list[list[Tensor]]:
    """Tensors of one dtype together, up to `size` bytes; a larger one alone."""
    made: list[list[Tensor]] = []
    room: dict[torch.dtype, tuple[list[Tensor], int]] = {}
    for tensor in tensors:
        bucket, left = room.get(tensor.dtype, ([], 0))
        if tensor.nbytes > left:
            bucket, left = [], size
            made.append(bucket)
        bucket.append(tensor)
        room[tensor.dtype] = (bucket, left - tensor.nbytes)
    return made
