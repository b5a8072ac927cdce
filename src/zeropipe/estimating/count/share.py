"""Layers shared by the GPUs of `tp`, with nobody to talk to: as the first of them has them."""

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
from zeropipe.estimating.count.watch import Call, Watched

_GROUP = "counted"


@contextmanager
def share(stage: HFStage, tp: int, watched: Watched) -> Iterator[Sequence[Tensor]]:
    """Spread a stage by its model's own plan; gives the parameters that are divided. ConfigError if tp cannot be."""
    if tp == 1:
        yield []
        return
    try:
        plan = plan_of(stage)
    except ConfigError:
        kind = stage.full_config.model_type
        raise ConfigError(f"tp={tp}: transformers has no plan for tensor parallelism of {kind}: leave it out") from None
    check_plan(stage, plan, tp)
    prove(stage, plan, False)
    sharing = Sharing(Peers(_GROUP, 0, tp), None)
    spread_stage(stage, plan, sharing, False)
    for layer in find_deferred(stage):
        layer.has_hooks = True  # autograd runs it: deferring asks what device it is on
    actors[_GROUP] = _Alone(watched, tp)
    try:
        yield sharing.pieces()
    finally:
        del actors[_GROUP]


class _Alone(Actor):
    """Sums are seen, and give what comes in."""

    def __init__(self, watched: Watched, number: int) -> None:
        self._watched, self._number = watched, number

    def everybodys(self, x: Tensor) -> list[Tensor]:
        return [x] * self._number

    def total(self, x: Tensor) -> Tensor:
        with self._watched.away():
            result = torch.empty_like(x)
        self._see(x, result, x.nbytes)
        return result

    def joined(self, x: Tensor, dimension: int) -> Tensor:
        with self._watched.away():
            result = super().joined(x, dimension)
        self._see(x, result, result.nbytes / 2)  # a gathering says half as much as a sum
        return result

    def _see(self, x: Tensor, result: Tensor, summed: float) -> None:
        self._watched.see(Call("sum", self._watched.sizes([x]), self._watched.sizes([result]), summed=float(summed)))
