"""Shard a stage over `tp` without other GPUs: collectives are recorded, and return shapes only."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor

from zeropipe.engine.backward.linear import find_deferred
from zeropipe.engine.mesh.proof import prove
from zeropipe.engine.mesh.spreading import Sharing
from zeropipe.engine.mesh.talk import Actor, Peers, actors
from zeropipe.engine.mesh.tensor import check_plan, plan_of, spread_stage
from zeropipe.engine.stages.hf import HFStage
from zeropipe.errors import ConfigError
from zeropipe.estimating.count.record import Call, OperatorLog

_GROUP = "counted"


@contextmanager
def shard_alone(stage: HFStage, tp: int, log: OperatorLog) -> Iterator[Sequence[Tensor]]:
    """Shard a stage by its model's own plan; yields the sharded parameters. ConfigError for an invalid `tp`."""
    if tp == 1:
        yield []
        return
    try:
        plan = plan_of(stage)
    except ConfigError:
        kind = stage.full_config.model_type
        raise ConfigError(f"tp={tp}: transformers has no tensor-parallel plan for {kind}; leave out tp") from None
    check_plan(stage, plan, tp)
    prove(stage, plan, False)
    sharing = Sharing(Peers(_GROUP, 0, tp), None)
    spread_stage(stage, plan, sharing, False)
    for layer in find_deferred(stage):
        layer.has_hooks = True  # autograd runs it: deferring needs a device
    actors[_GROUP] = _RecordingGroup(log, tp)
    try:
        yield sharing.pieces()
    finally:
        del actors[_GROUP]


class _RecordingGroup(Actor):
    """Records collectives of the one rank that runs."""

    def __init__(self, log: OperatorLog, size: int) -> None:
        self._log, self._size = log, size

    def everybodys(self, x: Tensor) -> list[Tensor]:
        return [x] * self._size

    def total(self, x: Tensor) -> Tensor:
        with self._log.paused():
            result = torch.empty_like(x)
        self._add(x, result, x.nbytes)
        return result

    def joined(self, x: Tensor, dimension: int) -> Tensor:
        with self._log.paused():
            result = super().joined(x, dimension)
        self._add(x, result, result.nbytes / 2)  # a gather moves half of what a sum moves
        return result

    def _add(self, x: Tensor, result: Tensor, summed: float) -> None:
        self._log.add(Call("sum", self._log.sizes([x]), self._log.sizes([result]), summed=float(summed)))
