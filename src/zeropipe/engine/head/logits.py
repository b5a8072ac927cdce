"""What a model does to the products of its head: logits = softcap(scale * products), element by element."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class LogitsRule:
    """Logits of the products of a head. `softcap` c: c * tanh(x / c), as in Gemma 2."""

    scale: float = 1.0
    softcap: float | None = None

    def apply(self, products: Tensor) -> Tensor:
        """The logits."""
        logits = products if self.scale == 1.0 else products * self.scale
        return logits if self.softcap is None else torch.tanh(logits / self.softcap) * self.softcap

    def backward(self, gradient: Tensor, logits: Tensor) -> Tensor:
        """The gradient of the products, of that of the logits."""
        if self.softcap is not None:
            gradient = gradient * (1 - (logits / self.softcap).square())
        return gradient if self.scale == 1.0 else gradient * self.scale
