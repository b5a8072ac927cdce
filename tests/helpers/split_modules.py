"""Modules of the tests of the split backward, and a counter of matrix products."""

import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

import zeropipe.integrations.experts  # noqa: F401  it registers torchtitan's experts, of which there is a copy below


class Changing(nn.Module):
    """A block that modifies the outputs of its layers in place."""

    def __init__(self, bias) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(8, 8, bias), nn.Linear(8, 8, bias)

    def forward(self, x):
        y = self.first(x)
        y *= 2
        return self.last(y.sin_()).mul_(y.mean())


class Count(TorchDispatchMode):
    """Counts calls of matrix products."""

    def __init__(self):
        super().__init__()
        self.products = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name = func.overloadpacket.__name__
        self.products += name in ("mm", "addmm", "addmm_", "bmm", "_grouped_mm")
        return func(*args, **(kwargs or {}))


class GroupedExperts(nn.Module):
    """A copy of torchtitan's; the original is tested in tests/integrations."""

    __module__ = "torchtitan.models.common.moe"
    names = ("w1_EFD", "w2_EDF", "w3_EFD")

    def __init__(self) -> None:
        super().__init__()
        for name, shape in zip(self.names, ((3, 16, 8), (3, 8, 16), (3, 16, 8))):
            self.register_parameter(name, nn.Parameter(torch.randn(shape) / 4))

    def forward(self, x, counts):
        made = []
        for expert, rows in enumerate(x.bfloat16().split(counts.tolist())):
            w1, w2, w3 = (getattr(self, name)[expert].bfloat16().t() for name in self.names)
            made.append((nn.functional.silu(rows @ w1) * (rows @ w3)) @ w2)
        return torch.cat(made).type_as(x)
