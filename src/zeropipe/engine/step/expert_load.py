"""How many rows each expert gets in a step, over all pipelines; balancing by the bias of routers that have one."""

from __future__ import annotations

import math
import weakref
from collections.abc import Mapping
from itertools import count
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from zeropipe.engine.backward.experts import find_routed
from zeropipe.engine.torch_private.autograd import in_backward
from zeropipe.errors import ConfigError

BIAS = "e_score_correction_bias"  # transformers' name of what a router adds to its scores to choose experts


class ExpertLoad(NamedTuple):
    """The rows of each expert of one layer in a step; a token is a row of each expert that it chose."""

    rows: tuple[int, ...]

    @property
    def max_over_mean(self) -> float:
        """The rows of the busiest expert, relative to the mean: 1 if all are equal."""
        return max(self.rows) * len(self.rows) / (sum(self.rows) or 1)

    @property
    def busiest(self) -> float:
        """The share of all rows that the busiest expert gets."""
        return max(self.rows) / (sum(self.rows) or 1)

    @property
    def entropy(self) -> float:
        """The entropy of the shares of all experts, relative to that of equal ones: from 0 (one expert) to 1."""
        total = sum(self.rows) or 1
        shares = [count / total for count in self.rows if count]
        return -sum(share * math.log(share) for share in shares) / math.log(max(2, len(self.rows)))


class ExpertLoads:
    """Counts the rows of the experts of an engine; create it before the first step, on all ranks.

    `rate`: after a step, `balance` adds it to the bias of experts with fewer rows than the mean, and subtracts it from
    that of experts with more. This is how models of DeepSeek-V3's kind are balanced without a loss.
    """

    def __init__(self, engine: Any, rate: float = 0.0) -> None:
        self._engine, self._rate = engine, rate
        self._counters: dict[str, _Counter] = {}
        self._biases: dict[str, Tensor] = {}
        with engine.together("set-up of the counts of experts") as view:
            for info in view.stages.values():
                for name, stack in find_routed(info.module).items():
                    full_name = _full_name(info.module, name)
                    self._counters[full_name] = _Counter(stack)
                    if rate:
                        self._biases[full_name] = _find_bias(info.module, name, stack.num_experts)
            self.has_experts = any(view.comm.exchange(bool(self._counters)))
        if rate and not self.has_experts:
            raise ConfigError(f"rate={rate:g} balances experts: the model has none with transformers' common interface")

    def reset(self) -> None:
        """Forget what was counted, in an evaluation for example."""
        for counter in self._counters.values():
            counter.take()

    def take(self) -> dict[str, ExpertLoad]:
        """The load of every layer of the model since the last call; all ranks call this and get the same."""
        if not self.has_experts:
            return {}
        own = {name: counter.take() for name, counter in self._counters.items()}
        with self._engine.together("the sum of the loads of experts") as view:
            counts_rows = view.comm.layout.counts_losses  # processes that differ in tp only have the same tokens
            total: dict[str, list[int]] = {}
            for loads in view.comm.exchange(own if counts_rows else {}):
                for name, rows in loads.items():
                    total[name] = [a + b for a, b in zip(total.get(name, [0] * len(rows)), rows)]
        return {name: ExpertLoad(tuple(rows)) for name, rows in total.items()}

    def balance(self, loads: Mapping[str, ExpertLoad]) -> None:
        """Update the biases of this rank's routers by the loads of a step."""
        for name, bias in self._biases.items():
            rows = torch.tensor(loads[name].rows, dtype=torch.float64)
            change = self._rate * torch.sign(rows.mean() - rows)
            bias.add_(change.to(bias).view_as(bias))


def _full_name(stage: Any, name: str) -> str:
    """The name in the full model of a module of a stage."""
    return str(stage.full_name(name)) if hasattr(stage, "full_name") else name


def _find_bias(stage: nn.Module, name: str, num_experts: int) -> Tensor:
    """The bias of the router beside a stack of experts."""
    block = stage.get_submodule(name.rpartition(".")[0])
    tensors = [*block.named_buffers(), *block.named_parameters()]
    found = [tensor for key, tensor in tensors if key.split(".")[-1] == BIAS and tensor.numel() == num_experts]
    if len(found) != 1 or found[0].requires_grad or isinstance(found[0], DTensor):
        raise ConfigError(f"{name} has no router with a bias ({BIAS}) that balances its experts; use a router loss")
    return found[0].detach()


# Rows are counted by an operator, so that a compiled block stays one graph. A counter is passed as a tensor with its
# number here: an integer would be a constant, and each layer a graph of its own.
_counters: weakref.WeakValueDictionary[int, _Counter] = weakref.WeakValueDictionary()
_numbers = count()


class _Counter:
    """Counts the rows of the experts of one stack, in forwards that are not recomputed, while its owner keeps it."""

    def __init__(self, stack: Any) -> None:
        self._num_experts = stack.num_experts
        self._counts: Tensor | None = None
        number = next(_numbers)
        _counters[number] = self
        slot = torch.tensor(number, device="cpu")
        hook = stack.register_forward_pre_hook(lambda module, args: (args[0], count_rows(args[1], slot), *args[2:]))
        weakref.finalize(self, hook.remove).atexit = False

    def add(self, index: Tensor) -> None:
        if self._counts is None:
            self._counts = torch.zeros(self._num_experts, dtype=torch.int64, device=index.device)
        rows = index.flatten()
        self._counts.scatter_add_(0, rows.long(), torch.ones_like(rows, dtype=torch.int64))

    def take(self) -> list[int]:
        """The counts, which are zero then."""
        counts, self._counts = self._counts, None
        return [0] * self._num_experts if counts is None else counts.tolist()


@torch.library.custom_op("zeropipe::count_rows", mutates_args=())
def count_rows(index: Tensor, slot: Tensor) -> Tensor:
    """Count the experts of all tokens, and return them: an operator without a result would be left out."""
    counter = None if in_backward() else _counters.get(int(slot.item()))
    if counter is not None:
        counter.add(index)
    return index.clone()


@count_rows.register_fake
def _(index: Tensor, slot: Tensor) -> Tensor:
    return torch.empty_like(index)
