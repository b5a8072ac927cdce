"""The first word of a step: what every process is about to do, told to all.

A step may have any number of microbatches of any shapes, other ones on each pipeline, and each rank of a pipeline may
hold only what its own stages need. Weights may thaw and autocast may come and go between steps, which changes what
stages hand on. So before anything is sent, all tell each other. From then on both ends of every edge know alike which
message has shapes that are new, and a loss knows the number of tokens of all pipelines.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from zeropipe.core.units import count_text
from zeropipe.engine.comm.collective import on_all_ranks
from zeropipe.engine.comm.communicator import Communicator
from zeropipe.engine.comm.messages import ShapeCache
from zeropipe.engine.layout import Layout
from zeropipe.engine.stages.contract import Microbatch, StageInfo
from zeropipe.engine.step.cells import signature
from zeropipe.engine.step.losses import number_of
from zeropipe.errors import ConfigError

Orders = Callable[[int], tuple[int, int]]  # from a number of microbatches: see Word.orders


class Word(NamedTuple):
    """What one process says."""

    number: int  # of microbatches
    signatures: tuple[int, ...]  # of the microbatches; one where they are all alike
    count: float | None  # tokens of the step, from the rank with the last stage
    orders: tuple[int, int] = (0, 0)  # of collectives: if all pipelines have its number of microbatches, and if not


@dataclass(frozen=True)
class Opened:
    """What follows from all words, for one pipeline."""

    number: int  # of microbatches
    kinds: tuple[int, ...]  # of each microbatch: those of one kind have the same shapes everywhere in the pipeline
    numbers: tuple[int, ...]  # of microbatches, of all processes
    total: float | None  # tokens of all pipelines; None if the loss cannot tell before it has run
    orders: tuple[tuple[int, int], ...]  # of collectives, of all processes

    @property
    def alike(self) -> bool:
        """Whether all pipelines have the same number of microbatches."""
        return len(set(self.numbers)) == 1

    def order_of(self, rank: int) -> int:
        """What stands for the collectives of a process in this step: equal for equal ones."""
        return self.orders[rank][0 if self.alike else 1]


def open_step(
    comm: Communicator,
    layout: Layout,
    shapes: ShapeCache,
    stages: Iterable[StageInfo],
    state: int,
    microbatches: Sequence[Microbatch],
    loss_fn: Any,
    counting: bool,
    orders: Orders,
    refusal: str | None = None,
) -> Opened:
    """Tell and hear. `state`: of the stages' weights. `counting`: whether this process counts its pipeline's tokens.

    `refusal`: why this process cannot take part in the step, which all raise.
    """

    def word() -> Word:
        if refusal is not None:
            raise ConfigError(refusal)
        return _word(stages, state, microbatches, loss_fn, counting, orders)

    _, words = on_all_ranks(comm, word)
    for first in range(layout.size):  # every process looks at every pipeline, so that all raise alike
        peers = [rank for rank in range(layout.size) if words[rank].number != words[first].number]
        other = next((rank for rank in peers if layout.same_pipeline(first, rank)), None)
        if other is not None:
            raise ConfigError(
                f"rank {first} passes {count_text(words[first].number, 'microbatch')}, rank {other} of the same "
                f"pipeline {words[other].number}: give all ranks of a pipeline the same number"
            )
    number = words[layout.rank].number
    mine = [words[rank] for rank in layout.pipeline]
    kinds = shapes.number_kinds([tuple(_at(word.signatures, index) for word in mine) for index in range(number)])
    counts = [word.count for word in words if word.count is not None]
    numbers, all_orders = (tuple(column) for column in zip(*((word.number, word.orders) for word in words)))
    return Opened(number, kinds, numbers, sum(counts) if counts else None, all_orders)


def _word(
    stages: Iterable[StageInfo],
    state: int,
    microbatches: Sequence[Microbatch],
    loss_fn: Any,
    counting: bool,
    orders: Orders,
) -> Word:
    if isinstance(microbatches, (Mapping, str)) or not hasattr(microbatches, "__len__"):
        kind = type(microbatches).__name__
        raise ConfigError(f"microbatches are a {kind}: give a list of them, each a dict, like [{{'inputs': x}}]")
    for index, microbatch in enumerate(microbatches):
        if not isinstance(microbatch, Mapping):
            kind = type(microbatch).__name__
            raise ConfigError(f"microbatch {index} is a {kind}: each is a dict, like {{'inputs': x}}")
    for stage in stages:
        for microbatch in microbatches:
            if (reason := stage.refusal(microbatch)) is not None:
                raise ConfigError(reason)
    signatures = tuple(_hash((state, signature(microbatch))) for microbatch in microbatches)
    if isinstance(loss_fn, type):
        raise ConfigError(f"loss_fn is the class {loss_fn.__name__}: give one of its objects, {loss_fn.__name__}()")
    count = None
    if counting and callable(getattr(loss_fn, "count", None)):
        # microbatches may come in any order and through two ranks: all of them count
        count = sum(number_of(loss_fn.count(microbatch)) for microbatch in microbatches)
    if not microbatches:
        raise ConfigError("no microbatches were given: a step has at least 1")
    short = signatures[:1] if len(set(signatures)) == 1 else signatures
    return Word(len(signatures), short, count, orders(len(microbatches)))


def state_of(parameters: Iterable[Tensor], device: torch.device) -> int:
    """What may change between steps and decides on the dtypes and the gradients of what stages hand on."""
    autocast = torch.is_autocast_enabled(device.type) and torch.get_autocast_dtype(device.type)
    return hash((autocast, tuple((parameter.requires_grad, parameter.dtype) for parameter in parameters)))


def _hash(signed: tuple[Any, ...]) -> int:
    return int.from_bytes(hashlib.sha256(repr(signed).encode()).digest()[:8], "little")


def _at(signatures: tuple[int, ...], index: int) -> int:
    return signatures[0] if len(signatures) == 1 else signatures[index]
