"""Gradients that belong together on several ranks: the two copies of a mirrored stage, tied embeddings."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from zeropipe.core.schedule import Schedule
from zeropipe.engine import torch_private
from zeropipe.engine.backward.products import grad_dtype
from zeropipe.engine.comm.fabric import Fabric


class GradientSums:
    """Sums the gradients of parameters that live more than once, after each step.

    A stage names its ties in `tied_pairs`: `(name here, other stage, name there)`.
    """

    def __init__(self, schedule: Schedule, stages: Mapping[int, nn.Module], fabric: Fabric) -> None:
        self._between: list[tuple[Any, list[nn.Parameter]]] = []  # a group of ranks, what they sum
        self._within: list[tuple[nn.Parameter, nn.Parameter]] = []  # two tensors of one rank
        self._counted: list[nn.Parameter] = []  # those whose norm this rank accounts for
        self.all: list[nn.Parameter] = unique(p for s in sorted(stages) for p in stages[s].parameters())
        rank, copies = fabric.rank, schedule.placement.copies
        pairs: dict[tuple[int, ...], list[int]] = {}
        for stage in range(schedule.num_stages):
            homes = tuple(sorted({table[stage] for table in copies}))
            if len(homes) > 1 and rank in homes:
                pairs.setdefault(homes, []).append(stage)
        for homes, shared in sorted(pairs.items()):
            parameters = unique(p for stage in shared for p in stages[stage].parameters())
            self._between.append((fabric.summing_group(homes), parameters))
        follower: set[tuple[int, int]] = set()
        for stage, name, other, name_there in ties(stages):
            parameter = stages[stage].get_parameter(name)
            if other < stage:
                follower.add((stage, id(parameter)))
            if other in stages:
                partner = stages[other].get_parameter(name_there)
                if stage < other and partner is not parameter:
                    self._within.append((parameter, partner))
                continue
            copy = next(c for c, table in enumerate(copies) if table[stage] == rank)
            homes = tuple(sorted((rank, copies[copy][other])))
            self._between.append((fabric.summing_group(homes), [parameter]))
        for stage in sorted(stages):
            if copies[0][stage] == rank:
                self._counted += [p for p in stages[stage].parameters() if (stage, id(p)) not in follower]
        self._counted = unique(self._counted)
        self.shared = unique([p for _, ps in self._between for p in ps] + [p for pair in self._within for p in pair])

    def run(self) -> None:
        """Add up; afterwards all holders have the same gradient."""
        for group, parameters in self._between:
            _sum_between(group, [_gradient(p) for p in parameters if p.requires_grad])
        for one, other in self._within:
            if one.requires_grad and other.requires_grad:
                total = _gradient(one) + _gradient(other)
                one.grad, other.grad = total, total.clone()

    def close(self) -> None:
        """Let go of the groups."""
        self._between.clear()

    def squares(self) -> float:
        """The squared norm of this rank's gradients, each parameter of the model counted on one rank only."""
        gradients = [p.grad for p in self._counted if p.grad is not None]
        return torch_private.squared_norm(gradients) if gradients else 0.0


def unique(parameters: Iterable[nn.Parameter]) -> list[nn.Parameter]:
    """Each parameter once, in order."""
    return list({id(p): p for p in parameters}.values())


def ties(stages: Mapping[int, nn.Module]) -> list[tuple[int, str, int, str]]:
    """All ties of this rank's stages (stage, name, other stage, name there), in an order all ranks share."""
    found = [
        (stage, name, other, name_there)
        for stage in stages
        for name, other, name_there in getattr(stages[stage], "tied_pairs", ())
    ]
    return sorted(found, key=lambda tie: min(tie[:2], tie[2:]) + max(tie[:2], tie[2:]))


def _gradient(parameter: nn.Parameter) -> Tensor:
    if parameter.grad is None:
        parameter.grad = torch.zeros_like(parameter, dtype=grad_dtype(parameter))
    return parameter.grad


def _sum_between(group: Any, gradients: Sequence[Tensor]) -> None:
    by_dtype: dict[torch.dtype, list[Tensor]] = {}
    for gradient in gradients:
        by_dtype.setdefault(gradient.dtype, []).append(gradient)
    for some in by_dtype.values():
        flat = torch.cat([gradient.reshape(-1) for gradient in some])
        torch_private.allreduce_sum(group, flat)
        for gradient, piece in zip(some, flat.split([gradient.numel() for gradient in some])):
            gradient.copy_(piece.view_as(gradient))
