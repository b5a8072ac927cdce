"""Shard a stage over `tp` without other GPUs: collectives are recorded, and return shapes only."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor

from zeropipe.engine.backward.linear import find_deferred
from zeropipe.engine.mesh.tensor_parallel import check_hf_stage, find_plan
from zeropipe.engine.mesh.tp_check import check_tp_plan
from zeropipe.engine.mesh.tp_collectives import FakeGroup, TPGroup, fake_groups, take_chunk
from zeropipe.engine.mesh.tp_layers import ParameterShards
from zeropipe.engine.mesh.tp_stage import shard_stage
from zeropipe.engine.stages.hf import HFStage
from zeropipe.errors import ConfigError
from zeropipe.estimating.count.record import Call, OperatorLog

_GROUP = "counted"


@contextmanager
def shard_alone(stage: HFStage, tp: int, sequence_parallel: bool, log: OperatorLog) -> Iterator[Sequence[Tensor]]:
    """Shard a stage by its model's own plan; yields the sharded parameters. ConfigError for an invalid `tp`."""
    if tp == 1:
        yield []
        return
    try:
        plan = find_plan(stage)
    except ConfigError:
        kind = stage.full_config.model_type
        raise ConfigError(f"tp={tp}: transformers has no tensor-parallel plan for {kind}; leave out tp") from None
    check_hf_stage(stage, plan, tp)
    check_tp_plan(stage, plan, sequence_parallel)
    shards = ParameterShards(TPGroup(_GROUP, 0, tp), None)
    shard_stage(stage, plan, shards, sequence_parallel)
    for layer in find_deferred(stage):
        layer.has_hooks = True  # autograd runs it: deferring needs a device
    fake_groups[_GROUP] = _RecordingGroup(log, tp)
    try:
        yield shards.all_shards()
    finally:
        del fake_groups[_GROUP]


class _RecordingGroup(FakeGroup):
    """Records collectives of the one rank that runs."""

    def __init__(self, log: OperatorLog, size: int) -> None:
        self._log, self._size = log, size

    def gather(self, x: Tensor) -> list[Tensor]:
        return [x] * self._size

    def all_reduce(self, x: Tensor) -> Tensor:
        with self._log.paused():
            result = torch.empty_like(x)
        self._add(x, result, x.nbytes)
        return result

    def all_gather(self, x: Tensor, dimension: int) -> Tensor:
        with self._log.paused():
            gathered = super().all_gather(x, 0)
        self._add(x, gathered, gathered.nbytes / 2)  # a gather moves half of what a sum moves
        return gathered if dimension == 0 else torch.cat(gathered.chunk(self._size), dimension)

    def reduce_scatter(self, x: Tensor, dimension: int, group: TPGroup) -> Tensor:
        x = torch.cat(x.chunk(self._size, dimension))
        with self._log.paused():
            result = take_chunk(x, 0, group)
        self._add(x, result, x.nbytes / 2)
        return result

    def _add(self, x: Tensor, result: Tensor, summed: float) -> None:
        self._log.add(Call("sum", self._log.sizes([x]), self._log.sizes([result]), summed=float(summed)))
