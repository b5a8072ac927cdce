"""Check a tensor-parallel plan: logits and gradients of a small sharded copy must equal those of the full model.

Two threads simulate the processes, on the CPU and without a process group. A plan that fails is refused.
"""

from __future__ import annotations

import copy
import itertools
import json
import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from zeropipe.engine.mesh.tp_collectives import FakeGroup, TPGroup, fake_groups, take_chunk
from zeropipe.engine.mesh.tp_layers import ParameterShards
from zeropipe.engine.mesh.tp_stage import shard_stage
from zeropipe.engine.stages.hf import HFStage
from zeropipe.engine.stages.verify import (
    build_small_stage,
    format_error,
    is_close,
    isolated_torch_state,
    rounding_error,
)
from zeropipe.errors import ConfigError

TP = 2  # simulated processes: a plan that is right for two is right for more, as long as they divide the heads
LENGTH = 8  # tokens of a sequence
TIMEOUT_S = 20.0  # for a thread whose peer does not call the same collective

_cache: dict[str, str | None] = {}  # config and plan, as JSON -> the reason why the plan is wrong
_counter = itertools.count()


def check_tp_plan(stage: HFStage, plan: Mapping[str, str], sequence: bool) -> None:
    """ConfigError unless this plan shards a small copy of the stage's model correctly. Results are cached."""
    config = stage.full_config
    key = json.dumps([config.to_dict(), dict(plan), sequence], sort_keys=True, default=str)
    if key not in _cache:
        try:
            small = build_small_stage(config, stage.family, TP)
            with isolated_torch_state():
                _cache[key] = _find_difference(small, plan, sequence)
        except ConfigError:
            raise
        except Exception as error:
            _cache[key] = f"a small copy of it does not run ({format_error(error)})"
    if (reason := _cache[key]) is not None:
        option = "sequence_parallel" if sequence and _is_valid(stage, plan) else "tp"
        raise ConfigError(
            f"model_type={config.model_type!r} cannot be sharded over {option} by this plan: {reason}; leave out "
            f"{option}, or pass a plan of your own"
        )


def _is_valid(stage: HFStage, plan: Mapping[str, str]) -> bool:
    """Whether the plan is right without sequence parallelism."""
    try:
        check_tp_plan(stage, plan, False)
    except ConfigError:
        return False
    return True


def _find_difference(small: HFStage, plan: Mapping[str, str], sequence: bool) -> str | None:
    """The first difference of sharded copies from a model, in words."""
    ids = torch.arange(2 * LENGTH).view(2, LENGTH) * 7 % small.lm.get_input_embeddings().weight.shape[0]
    batch = {"input_ids": ids, "position_ids": torch.arange(LENGTH)[None].expand(2, -1)}
    copies = [copy.deepcopy(small) for _ in range(TP)]
    small.tie()
    logits = take_logits(small(**batch))
    gradient = torch.randn_like(logits)
    logits.backward(gradient)
    with SimulatedTP() as simulated:
        shards = [ParameterShards(group, None) for group in simulated.groups]
        outputs = simulated.run(_run_copy, [(*pair, plan, sequence, batch, gradient) for pair in zip(copies, shards)])
    if not is_close(_combine(outputs, -1 if outputs[0].shape != logits.shape else None), logits):
        return "it gives other logits"
    return _compare_gradients(small, copies, shards[0].dimensions)


def _compare_gradients(small: HFStage, copies: Sequence[HFStage], dimensions: Mapping[str, int]) -> str | None:
    """The first parameter whose gradients on the sharded copies are not those of the model, in words."""
    names, rounded = small.full_names(), rounding_error(parameter.grad for parameter in small.parameters())
    for name, parameter in small.named_parameters():
        sharded = [stage.get_parameter(name) for stage in copies]
        if parameter.grad is None and all(shard.grad is None for shard in sharded):
            continue
        gradients = [torch.zeros_like(shard) if shard.grad is None else shard.grad for shard in sharded]
        if name in copies[0].summed_over_tp:
            found: Tensor | None = torch.stack(gradients).sum(0)
        else:
            found = _combine(gradients, dimensions.get(names[name]), rounded)
        if not is_close(found, parameter.grad, rounded):
            return f"it gives another gradient of {names[name]}"
    return None


def _run_copy(
    stage: HFStage, shards: ParameterShards, plan: Mapping[str, str], sequence: bool, batch: dict[str, Tensor],
    gradient: Tensor,
) -> Tensor:  # fmt: skip
    """Forward and backward of one simulated process."""
    stage.tie()
    shard_stage(stage, plan, shards, sequence)
    logits = take_logits(stage(**batch))
    logits.backward(gradient if logits.shape == gradient.shape else take_chunk(gradient, -1, shards.group))
    return logits.detach()


def take_logits(output: Any) -> Tensor:
    """Without the loss of routers, which is computed from replicated tensors."""
    return output[0] if isinstance(output, tuple) else output


def _combine(shards: Sequence[Tensor], dimension: int | None, rounded: float = 0.0) -> Tensor | None:
    """The full tensor of shards along a dimension; without one, of replicas, or None if they differ."""
    if dimension is not None:
        return torch.cat(list(shards), dimension)
    return shards[0] if all(is_close(shard, shards[0], rounded) for shard in shards) else None


class _ThreadGroup(FakeGroup):
    """The group of one thread of a SimulatedTP."""

    def __init__(self, simulated: SimulatedTP, rank: int) -> None:
        self._simulated, self._rank = simulated, rank

    def gather(self, x: Tensor) -> list[Tensor]:
        return self._simulated.exchange(self._rank, x)


class SimulatedTP:
    """Threads of this process in place of `size` processes, such as those of `tp`."""

    def __init__(self, size: int = TP) -> None:
        self._barrier = threading.Barrier(size, timeout=TIMEOUT_S)
        self._slots: list[Tensor] = [torch.empty(0)] * size
        number = next(_counter)
        self.groups = [TPGroup(f"simulated {number}, {rank}", rank, size) for rank in range(size)]

    def __enter__(self) -> SimulatedTP:
        for group in self.groups:
            fake_groups[group.name] = _ThreadGroup(self, group.rank)
        return self

    def __exit__(self, *error: object) -> None:
        for group in self.groups:
            del fake_groups[group.name]

    def exchange(self, rank: int, x: Tensor) -> list[Tensor]:
        """The x of all threads."""
        self._slots[rank] = x.detach()
        self._barrier.wait()
        gathered = list(self._slots)
        self._barrier.wait()
        return gathered

    def run(self, function: Callable[..., Any], calls: Sequence[tuple[Any, ...]]) -> list[Any]:
        """Call a function in a thread for each tuple of arguments; raises the first error of any of them."""
        results: list[Any] = [None] * len(calls)
        errors: list[Exception] = []

        def run(rank: int) -> None:
            try:
                results[rank] = function(*calls[rank])
            except threading.BrokenBarrierError as error:
                errors.append(error)
            except Exception as error:
                errors.insert(0, error)
                self._barrier.abort()

        threads = [threading.Thread(target=run, args=(rank,), daemon=True) for rank in range(len(calls))]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        if errors:
            raise errors[0]
        return results
