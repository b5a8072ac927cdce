"""The load-balancing loss of a mixture of experts, summed over stages.

transformers computes it from the router logits of all layers: with c the number of tokens that chose an expert, p the
sum of its probabilities and n the number of tokens, each over all layers, it is E * sum(c / n * p / n) over the E
experts. So c, p and n are all that a stage sends on: a few numbers, through which the gradient comes back.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from zeropipe.engine.transformers_private import router_modules, router_settings


class RouterLoss:
    """Collects the router logits of a stage's layers and adds them to the sums of the stages before."""

    def __init__(self, lm: nn.Module, base: nn.Module, blocks: Sequence[nn.Module]) -> None:
        self.num_experts, self.top_k, self.coefficient = router_settings(lm)
        self.running_state: list[Tensor] | None = None  # the logits
        for module, index in router_modules(base, blocks):
            module.register_forward_hook(_Collect(self, index))

    def zeros(self, device: torch.device) -> Tensor:
        """The sums before the first layer: c and n in the first row, p in the second."""
        return torch.zeros(2, self.num_experts + 1, device=device)

    def start(self) -> None:
        """Collect logits from now on."""
        self.running_state = []

    def stop(self) -> list[Tensor]:
        """Return what was collected; later forwards (activation checkpointing) are not collected."""
        logits, self.running_state = self.running_state or [], None
        return logits

    def collect(self, logits: Tensor) -> None:
        if self.running_state is not None:
            self.running_state.append(logits)

    def add(self, sums: Tensor, logits: Sequence[Tensor], mask: Tensor | None) -> Tensor:
        """The sums with those of some routers, in float32 as in transformers. Padding (0 in `mask`) is left out."""
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
        """The term that is added to the mean loss of the tokens."""
        counts, probabilities = sums[:, :-1] / sums[0, -1]
        return self.coefficient * self.num_experts * (counts * probabilities).sum()


@dataclass(frozen=True)
class _Collect:
    """Forward hook of a module that computes router logits, at `index` of its output."""

    router_loss: RouterLoss
    index: int

    def __call__(self, module: nn.Module, args: Any, output: Any) -> None:
        self.router_loss.collect(output if isinstance(output, Tensor) else output[self.index])
