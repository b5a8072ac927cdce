"""Sums of gradients over ranks: the two copies of a mirrored stage, tied weights, replicas."""

from __future__ import annotations

import zlib
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor, nn

from zeropipe.core.schedule import Schedule
from zeropipe.engine.backward.gradients import ensure_grad, squared_grad_norm, to_local
from zeropipe.engine.comm.communicator import Communicator, SumGroup
from zeropipe.engine.stages.contract import StageInfo, list_ties
from zeropipe.errors import ConfigError

BUCKET_BYTES = 32 * 2**20  # summed in one message


class _Shared(NamedTuple):
    """Parameters of which every rank of a group has a copy."""

    name: str  # the same on all ranks of the group
    group: SumGroup
    parameters: list[nn.Parameter]
    are_tied: bool


class GradientSums:
    """Sums the gradients of parameters of which there are several copies, after each step."""

    def __init__(self, schedule: Schedule, stages: Mapping[int, StageInfo], comm: Communicator) -> None:
        self._layout = layout = comm.layout
        self._between: list[_Shared] = []
        self._within: list[tuple[nn.Parameter, nn.Parameter]] = []  # tied tensors of one rank
        self._normed: list[nn.Parameter] = []  # this rank counts them in the norm
        modules = {stage: stages[stage].module for stage in sorted(stages)}
        self.all: list[nn.Parameter] = unique(p for module in modules.values() for p in module.parameters())
        rank, copies = layout.pipeline_rank, schedule.placement.copies
        for ranks, shared in find_copies(schedule, rank):
            parameters = unique(p for stage in shared for p in modules[stage].parameters())
            self._add("copies", tuple(layout.pipeline[r] for r in ranks), parameters, comm)
        follower: set[tuple[int, int]] = set()
        for tie in list_ties(stages):
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
            ends = tuple(sorted(layout.pipeline[home] for home in homes))
            self._add(str(tie.ends), ends, [parameter], comm, are_tied=True)
        summed = unique(modules[s].get_parameter(name) for s in modules for name in stages[s].summed_over_tp)
        if summed:
            self._add("tensors", layout.ranks_along(["tp"]), summed, comm)
        replicated: dict[tuple[str, ...], list[nn.Parameter]] = {}
        for parameter in self.all:
            if dims := layout.unsummed_dims(parameter):
                replicated.setdefault(dims, []).append(parameter)
        for dims, parameters in sorted(replicated.items()):
            self._add("replicas", layout.ranks_along(dims), parameters, comm)
        for stage, module in modules.items():
            if copies[0][stage] == rank:
                self._normed += [p for p in module.parameters() if (stage, id(p)) not in follower]
        self._normed = unique(self._normed)
        within = [p for pair in self._within for p in pair]
        self.shared = unique([p for shared in self._between for p in shared.parameters] + within)
        self.tied = unique([p for shared in self._between if shared.are_tied for p in shared.parameters] + within)

    def _add(
        self,
        what: str,
        ranks: tuple[int, ...],
        parameters: list[nn.Parameter],
        comm: Communicator,
        are_tied: bool = False,
    ) -> None:
        self._between.append(_Shared(f"{what} on {ranks}", comm.sum_group(ranks), parameters, are_tied))

    def run(self, ties_only: bool = False) -> None:
        """Sum; afterwards all copies have the same gradient."""
        require_dense(self.tied if ties_only else self.shared, "summed over ranks")
        for one, other in self._within:
            if one.requires_grad and other.requires_grad:
                mine, theirs = to_local(ensure_grad(one)), to_local(ensure_grad(other))
                theirs.copy_(mine.add_(theirs))
        for shared in self._between:
            if shared.are_tied or not ties_only:
                _sum_between(shared.group, [to_local(ensure_grad(p)) for p in shared.parameters if p.requires_grad])

    def flags(self) -> list[tuple[tuple[str, str, tuple[int, ...]], object]]:
        """A checksum of which shared parameters need a gradient: it must be the same on all ranks of a group."""
        return [
            ((shared.name, "requires_grad", ()), zlib.crc32(bytes(p.requires_grad for p in shared.parameters)))
            for shared in self._between
        ]

    def close(self) -> None:
        """Release the groups."""
        self._between.clear()

    def squared_norm(self) -> float:
        """This rank's part of the squared norm: summed over all ranks, each parameter of the model counts once."""
        require_dense(self._normed, "in a norm")
        by_holders: dict[int, list[nn.Parameter]] = {}
        for parameter in self._normed:
            by_holders.setdefault(self._layout.num_holders(parameter), []).append(parameter)
        return sum(squared_grad_norm(parameters) / holders for holders, parameters in by_holders.items())


def require_dense(parameters: Iterable[nn.Parameter], what: str) -> None:
    """ConfigError for a sparse gradient."""
    for parameter in parameters:
        if parameter.grad is not None and parameter.grad.layout != torch.strided:
            raise ConfigError(
                f"a parameter of shape {list(parameter.shape)} has a sparse gradient, which cannot be {what}: "
                "create its module with sparse=False"
            )


def find_copies(schedule: Schedule, rank: int) -> list[tuple[tuple[int, ...], list[int]]]:
    """The stages of `rank` that other ranks hold too, by the ranks that hold them; in the same order on all ranks."""
    found: dict[tuple[int, ...], list[int]] = {}
    for stage in range(schedule.num_stages):
        ranks = tuple(sorted({table[stage] for table in schedule.placement.copies}))
        if len(ranks) > 1 and rank in ranks:
            found.setdefault(ranks, []).append(stage)
    return sorted(found.items())


def unique(parameters: Iterable[nn.Parameter]) -> list[nn.Parameter]:
    """Each parameter once, in order."""
    return list({id(p): p for p in parameters}.values())


def _sum_between(group: SumGroup, gradients: Sequence[Tensor]) -> None:
    """Sum over the group, in place, several small gradients at a time."""
    for bucket in make_buckets(gradients, BUCKET_BYTES):
        if len(bucket) == 1 and bucket[0].is_contiguous():
            group.sum_(bucket[0])
            continue
        flat = torch.cat([tensor.reshape(-1) for tensor in bucket])
        group.sum_(flat)
        for tensor, summed in zip(bucket, flat.split([tensor.numel() for tensor in bucket])):
            tensor.copy_(summed.view_as(tensor))


def make_buckets(tensors: Sequence[Tensor], size: int) -> list[list[Tensor]]:
    """Group tensors of one dtype, up to `size` bytes; a larger one is alone."""
    found: list[list[Tensor]] = []
    open_buckets: dict[torch.dtype, tuple[list[Tensor], int]] = {}
    for tensor in tensors:
        bucket, left = open_buckets.get(tensor.dtype, ([], 0))
        if tensor.nbytes > left:
            bucket, left = [], size
            found.append(bucket)
        bucket.append(tensor)
        open_buckets[tensor.dtype] = (bucket, left - tensor.nbytes)
    return found
