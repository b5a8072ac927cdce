"""Check that a model computes the same with divided experts, on a small copy; a model that fails is refused.

Threads simulate the processes, on the CPU and without a process group, each with its own tokens.
"""

from __future__ import annotations

import copy
import json
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from zeropipe.engine.mesh.expert_stacks import divide_stacks, find_stacks
from zeropipe.engine.mesh.tp_check import SimulatedTP, take_logits
from zeropipe.engine.mesh.tp_layers import ParameterShards
from zeropipe.engine.stages.families import Family
from zeropipe.engine.stages.hf import HFStage
from zeropipe.engine.stages.verify import (
    build_small_stage,
    format_error,
    is_close,
    isolated_torch_state,
    rounding_error,
)
from zeropipe.errors import ConfigError

LENGTH = 8  # tokens of a sequence

_cache: dict[str, str | None] = {}  # config, as JSON -> the reason why experts cannot be divided


def check_divided_experts(stage: HFStage, once_per_process: bool = False) -> None:
    """ConfigError unless a small copy of the stage's model computes the same with divided experts. Cached."""
    if (reason := explain_undivided(stage.full_config, stage.family, once_per_process)) is not None:
        raise ConfigError(f"model_type={stage.full_config.model_type!r} cannot run with ep: {reason}; leave out ep")


def explain_undivided(config: Any, family: Family, once_per_process: bool = False) -> str | None:
    """Why the experts of a model cannot be divided, in words; None if they can be. Cached."""
    key = json.dumps([config.to_dict(), once_per_process], sort_keys=True, default=str)
    if key not in _cache:
        try:
            small = build_small_stage(config, family, 1)
            with isolated_torch_state():
                _cache[key] = _find_difference(small, once_per_process)
        except ConfigError:
            raise
        except Exception as error:
            _cache[key] = f"a small copy of it does not run ({format_error(error)})"
    return _cache[key]


def _find_difference(small: HFStage, once_per_process: bool) -> str | None:
    """The first difference of copies with divided experts from a model, in words."""
    stacks = find_stacks(copy.deepcopy(small))
    if not stacks:
        return "it has no experts with transformers' common interface"
    num_experts = min(stack.num_experts for stack in stacks.values())
    size = next(size for size in range(2, num_experts + 2) if num_experts % size == 0 or size > num_experts)
    copies = [copy.deepcopy(small) for _ in range(size)]
    vocabulary = small.lm.get_input_embeddings().weight.shape[0]
    batches = [_batch(rank, vocabulary) for rank in range(size)]
    small.tie()
    logits = [take_logits(small(**batch)) for batch in batches]
    gradients = [torch.randn_like(some) for some in logits]
    torch.autograd.backward(logits, gradients)
    simulated = SimulatedTP(size)
    shards = [ParameterShards(_SimulatedGroup(simulated, rank, size, once_per_process), None) for rank in range(size)]
    outputs = simulated.run(_run_copy, list(zip(copies, shards, batches, gradients)))
    if not all(map(is_close, outputs, logits)):
        return "it gives other logits"
    return _compare_gradients(small, copies, shards[0].dimensions)


def _batch(rank: int, vocabulary: int) -> dict[str, Tensor]:
    """The tokens of one process."""
    ids = (torch.arange(2 * LENGTH).view(2, LENGTH) * 7 + 3 * rank) % vocabulary
    return {"input_ids": ids, "position_ids": torch.arange(LENGTH)[None].expand(2, -1)}


def _run_copy(stage: HFStage, shards: ParameterShards, batch: dict[str, Tensor], gradient: Tensor) -> Tensor:
    """Forward and backward of one simulated process."""
    stage.tie()
    divide_stacks(find_stacks(stage), shards)
    logits = take_logits(stage(**batch))
    logits.backward(gradient)
    return logits.detach()


def _compare_gradients(small: HFStage, copies: Sequence[HFStage], divided: Any) -> str | None:
    """The first parameter whose gradients on the copies do not add up to those of the model, in words."""
    rounded = rounding_error(parameter.grad for parameter in small.parameters())
    for name, parameter in small.named_parameters():
        found = [other.get_parameter(name) for other in copies]
        if parameter.grad is None and all(other.grad is None for other in found):
            continue
        gradients = [_gradient(other) for other in found]
        total = torch.cat(gradients) if name in divided else torch.stack(gradients).sum(0)
        if not is_close(total, _gradient(parameter), rounded):
            return f"it gives another gradient of {small.full_names()[name]}"
    return None


def _gradient(parameter: nn.Parameter) -> Tensor:
    return torch.zeros_like(parameter) if parameter.grad is None else parameter.grad


class _SimulatedGroup:
    """The Exchange of one simulated process."""

    def __init__(self, simulated: SimulatedTP, rank: int, size: int, once_per_process: bool) -> None:
        self._simulated, self.rank, self.size, self.once_per_process = simulated, rank, size, once_per_process

    def exchange_counts(self, counts: Tensor, rows: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        everyone = self._simulated.exchange(self.rank, counts)
        arriving = torch.stack([some[self.rank] for some in everyone])
        return arriving, torch.stack([counts[:, 0], arriving[:, 0]]), arriving[:, 1:].sum()

    def exchange_rows(self, x: Tensor, splits: Tensor, num_rows: int | None = None) -> Tensor:
        return _SimulatedExchange.apply(x, splits, num_rows, self)

    def move(self, x: Tensor, splits: Tensor, num_rows: int | None) -> Tensor:
        """The rows that all threads send to this one; then zeros, up to `num_rows`."""
        sent = self._simulated.exchange(self.rank, splits[0])
        everyone = self._simulated.exchange(self.rank, x[: int(splits[0].sum())])
        rows = torch.cat([some.split(split.tolist())[self.rank] for some, split in zip(everyone, sent)])
        return rows if num_rows is None else torch.cat([rows, rows.new_zeros(num_rows - len(rows), *rows.shape[1:])])


class _SimulatedExchange(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, splits: Tensor, num_rows: int | None, group: _SimulatedGroup) -> Tensor:
        ctx.splits, ctx.num_rows, ctx.group = splits, len(x), group
        return group.move(x, splits, num_rows)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, None, None, None]:
        return ctx.group.move(dy, ctx.splits.flip(0), ctx.num_rows), None, None, None
