"""Gradients that belong together on several ranks: the two copies of a mirrored stage, tied embeddings."""

from __future__ import annotations

import zlib
from collections.abc import Iterable, Mapping, Sequence

import torch
from torch import Tensor, nn

from zeropipe.core.schedule import Schedule
from zeropipe.engine.backward.gradients import ensure_grad, squared_grad_norm, to_local
from zeropipe.engine.comm.communicator import Communicator, SumGroup
from zeropipe.engine.stages.contract import StageInfo, Tie
from zeropipe.errors import ConfigError

BUCKET = 32 * 2**20  # bytes summed in one message: a copy of all gradients is never made


class GradientSums:
    """Sums the gradients of parameters that live more than once, after each step."""

    def __init__(self, schedule: Schedule, stages: Mapping[int, StageInfo], comm: Communicator) -> None:
        self._layout = layout = comm.layout
        self._between: list[tuple[str, SumGroup, list[nn.Parameter]]] = []  # a name all its ranks share, what they sum
        self._within: list[tuple[nn.Parameter, nn.Parameter]] = []  # two tensors of one rank
        self._counted: list[nn.Parameter] = []  # those whose norm this rank accounts for
        modules = {stage: stages[stage].module for stage in sorted(stages)}
        self.all: list[nn.Parameter] = unique(p for module in modules.values() for p in module.parameters())
        rank, copies = layout.pipeline_rank, schedule.placement.copies
        for homes, shared in copies_on(schedule, rank):
            parameters = unique(p for stage in shared for p in modules[stage].parameters())
            self._share("copies", tuple(layout.pipeline[home] for home in homes), parameters, comm)
        follower: set[tuple[int, int]] = set()
        for tie in ties(stages):
            parameter = modules[tie.stage].get_parameter(tie.name)
            if tie.partner_stage < tie.stage:
                follower.add((tie.stage, id(parameter)))
            if tie.partner_stage in stages:
                partner = modules[tie.partner_stage].get_parameter(tie.partner_name)
                if tie.stage < tie.partner_stage and partner is not parameter:
                    self._within.append((parameter, partner))
                continue
            copy = next(c for c, table in enumerate(copies) if table[tie.stage] == rank)
            homes = tuple(sorted((rank, copies[copy][tie.partner_stage])))
            self._share(str(tie.ends), tuple(sorted(layout.pipeline[home] for home in homes)), [parameter], comm)
        summed = unique(modules[s].get_parameter(name) for s in modules for name in stages[s].summed_over_tp)
        if summed:
            self._share("tensors", layout.ranks_along(["tp"]), summed, comm)
        replicated: dict[tuple[str, ...], list[nn.Parameter]] = {}
        for parameter in self.all:
            if uncovered := layout.unsummed_dims(parameter):
                replicated.setdefault(uncovered, []).append(parameter)
        for dimensions, parameters in sorted(replicated.items()):
            self._share("replicas", layout.ranks_along(dimensions), parameters, comm)
        for stage, module in modules.items():
            if copies[0][stage] == rank:
                self._counted += [p for p in module.parameters() if (stage, id(p)) not in follower]
        self._counted = unique(self._counted)
        self.shared = unique([p for _, _, ps in self._between for p in ps] + [p for pair in self._within for p in pair])

    def _share(self, what: str, ranks: tuple[int, ...], parameters: list[nn.Parameter], comm: Communicator) -> None:
        self._between.append((f"{what} on {ranks}", comm.sum_group(ranks), parameters))

    def run(self) -> None:
        """Add up; afterwards all holders have the same gradient."""
        require_dense(self.shared, "summed over ranks")
        for one, other in self._within:
            if one.requires_grad and other.requires_grad:
                mine, theirs = to_local(ensure_grad(one)), to_local(ensure_grad(other))
                theirs.copy_(mine.add_(theirs))
        for _, group, parameters in self._between:
            _sum_between(group, [to_local(ensure_grad(p)) for p in parameters if p.requires_grad])

    def flags(self) -> list[tuple[tuple[str, str, tuple[int, ...]], object]]:
        """Which shared parameters need a gradient, in short: their holders must agree, or one would wait for ever."""
        return [
            ((name, "requires_grad", ()), zlib.crc32(bytes(p.requires_grad for p in parameters)))
            for name, _, parameters in self._between
        ]

    def close(self) -> None:
        """Let go of the groups."""
        self._between.clear()

    def squares(self) -> float:
        """This rank's share of the squared norm: summed over all ranks, each parameter of the model counts once."""
        require_dense(self._counted, "in a norm")
        by_holders: dict[int, list[nn.Parameter]] = {}
        for parameter in self._counted:
            by_holders.setdefault(self._layout.num_holders(parameter), []).append(parameter)
        return sum(squared_grad_norm(parameters) / holders for holders, parameters in by_holders.items())


def require_dense(parameters: Iterable[nn.Parameter], what: str) -> None:
    """ConfigError for a sparse gradient."""
    for parameter in parameters:
        if parameter.grad is not None and parameter.grad.layout != torch.strided:
            raise ConfigError(
                f"a parameter of shape {list(parameter.shape)} has a sparse gradient, which cannot be {what}: make "
                "its module with sparse=False"
            )


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


def ties(stages: Mapping[int, StageInfo]) -> list[Tie]:
    """All ties of this rank's stages, in an order all ranks share."""
    found = [tie for info in stages.values() for tie in info.ties]
    return sorted(found, key=lambda tie: (tie.ends, tie))


def _sum_between(group: SumGroup, gradients: Sequence[Tensor]) -> None:
    """Sum over the group, in place, small gradients several at a time."""
    for some in buckets(gradients, BUCKET):
        if len(some) == 1 and some[0].is_contiguous():
            group.sum_(some[0])
            continue
        flat = torch.cat([tensor.reshape(-1) for tensor in some])
        group.sum_(flat)
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
