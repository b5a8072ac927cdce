"""The load-balancing loss of a mixture of experts, added up over stages.

transformers computes it from the routers' logits of all layers: with c the number of tokens that chose an expert, p the
sum of its probabilities and n the number of tokens, each over all layers, it is E * sum(c / n * p / n) over the E
experts. So c, p and n are all that a stage hands on: a few numbers, through which the gradient comes back.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from zeropipe.engine.transformers_private import router_facts, router_outputs


@dataclass(frozen=True)
class Balance:
    """What the loss needs to know of a model."""

    num_experts: int
    top_k: int
    coefficient: float

    @staticmethod
    def of(lm: nn.Module) -> Balance:
        """As a model's own loss has them."""
        return Balance(*router_facts(lm))

    def start(self, device: torch.device) -> Tensor:
        """The sums before the first layer: c and n in the first row, p in the second."""
        return torch.zeros(2, self.num_experts + 1, device=device)

    def add(self, sums: Tensor, logits: Sequence[Tensor], mask: Tensor | None) -> Tensor:
        """The sums after some more routers, in float32 as transformers has them. Padding (0 in `mask`) is left out."""
        for gate in logits:
            probabilities = gate.reshape(-1, self.num_experts).softmax(-1)
            chosen = probabilities.topk(self.top_k, -1).indices
            weights = torch.ones(len(chosen), device=gate.device) if mask is None else mask.reshape(-1).float()
            counts = torch.zeros(self.num_experts, device=gate.device)
            counts = counts.scatter_add(0, chosen.reshape(-1), weights.repeat_interleave(self.top_k))
            sums = sums + torch.stack(
                [
                    torch.cat([counts, weights.sum()[None]]),
                    torch.cat([(probabilities.float() * weights[:, None]).sum(0), weights.new_zeros(1)]),
                ]
            )
        return sums

    def loss(self, sums: Tensor) -> Tensor:
        """What is added to the mean loss of the tokens."""
        counts, probabilities = sums[:, :-1] / sums[0, -1]
        return self.coefficient * self.num_experts * (counts * probabilities).sum()


class Gates:
    """Catches the routers' logits of some layers while their stage runs forward."""

    def __init__(self, base: nn.Module, blocks: Sequence[nn.Module]) -> None:
        self.caught: list[Tensor] | None = None
        for module, index in router_outputs(base, blocks):
            module.register_forward_hook(_Catch(self, index))


@dataclass(frozen=True)
class _Catch:
    gates: Gates
    index: int

    def __call__(self, module: nn.Module, args: Any, output: Any) -> None:
        if self.gates.caught is not None:  # not when activation checkpointing runs the layer again
            self.gates.caught.append(output if isinstance(output, Tensor) else output[self.index])
