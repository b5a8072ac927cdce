"""The start of a step: all processes announce what they are about to do, before anything is sent.

A step may have any number of microbatches of any shapes, different ones on each pipeline, and each rank of a pipeline
may hold only what its own stages need. Between steps, weights may be unfrozen and autocast may change, which changes
the outputs of stages. From the announcements both ends of every channel know which message has new shapes, and a loss
knows the number of tokens of all pipelines.
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
from zeropipe.engine.stages.contract import Microbatch, StageInfo
from zeropipe.engine.step.losses import to_count
from zeropipe.errors import ConfigError

OrderDigests = Callable[[int], tuple[int, int]]  # by number of microbatches: see Announcement.order_digests
MAX_SIGNATURE_LENGTH = 64  # longer texts and lists are replaced by a digest


class Announcement(NamedTuple):
    """What one process is about to do."""

    num_microbatches: int
    signatures: tuple[int, ...]  # of the microbatches; one if they are all equal
    count: float | None  # tokens of the step, from the rank with the last stage
    order_digests: tuple[int, int] = (0, 0)  # of collectives: for a uniform number of microbatches, and otherwise


@dataclass(frozen=True)
class AgreedStep:
    """What the announcements of all processes mean for one pipeline."""

    num_microbatches: int
    kinds: tuple[int, ...]  # of each microbatch: those of one kind have the same shapes everywhere in the pipeline
    all_num_microbatches: tuple[int, ...]  # of all processes
    total_count: float | None  # tokens of all pipelines; None if the loss cannot count before it has run
    order_digests: tuple[tuple[int, int], ...]  # of all processes

    @property
    def is_uniform(self) -> bool:
        """Whether all pipelines have the same number of microbatches."""
        return len(set(self.all_num_microbatches)) == 1

    def order_digest(self, rank: int) -> int:
        """The digest of a process's collectives in this step."""
        return self.order_digests[rank][0 if self.is_uniform else 1]


class StepRequest(NamedTuple):
    """What one process passes to a step."""

    stages: Iterable[StageInfo]
    state: int  # of the stages' weights: see `hash_state`
    microbatches: Sequence[Microbatch]
    loss_fn: Any
    counts_tokens: bool  # whether this process counts its pipeline's tokens
    order_digests: OrderDigests
    cut: Callable[[Sequence[Microbatch]], Sequence[Microbatch]]  # the microbatches into slices, if there are any
    refusal: str | None = None  # why this process cannot take part in the step, which all processes raise


def agree_on_step(comm: Communicator, shapes: ShapeCache, request: StepRequest) -> AgreedStep:
    """Exchange announcements; ConfigError on all processes for a step that cannot run."""
    _, everyone = on_all_ranks(comm, lambda: _announce(request))
    layout = comm.layout
    numbers = tuple(announcement.num_microbatches for announcement in everyone)
    for first in range(layout.size):  # every process checks every pipeline, so that all raise the same error
        different = (rank for rank in range(layout.size) if numbers[rank] != numbers[first])
        other = next((rank for rank in different if layout.same_pipeline(first, rank)), None)
        if other is not None:
            raise ConfigError(
                f"rank {first} passes {count_text(numbers[first], 'microbatch')}, rank {other} of the same "
                f"pipeline {numbers[other]}: all ranks of a pipeline must pass the same number"
            )
    pipeline = [everyone[rank].signatures for rank in layout.pipeline]
    own = numbers[layout.rank]
    kinds = shapes.number_kinds([tuple(signatures[i % len(signatures)] for signatures in pipeline) for i in range(own)])
    counts = [announcement.count for announcement in everyone if announcement.count is not None]
    digests = tuple(announcement.order_digests for announcement in everyone)
    return AgreedStep(own, kinds, numbers, sum(counts) if counts else None, digests)


def _announce(request: StepRequest) -> Announcement:
    microbatches, loss_fn = request.microbatches, request.loss_fn
    if request.refusal is not None:
        raise ConfigError(request.refusal)
    _check_microbatches(microbatches)
    for stage in request.stages:
        for microbatch in microbatches:
            if (reason := stage.refusal(microbatch)) is not None:
                raise ConfigError(reason)
    signatures = tuple(
        _hash((request.state, describe_microbatch(microbatch))) for microbatch in request.cut(microbatches)
    )
    if isinstance(loss_fn, type):
        raise ConfigError(f"loss_fn is the class {loss_fn.__name__}: pass an instance, {loss_fn.__name__}()")
    count = None
    if request.counts_tokens and callable(getattr(loss_fn, "count", None)):
        # microbatches may run in any order and on two ranks: all of them count
        count = sum(to_count(loss_fn.count(microbatch)) for microbatch in microbatches)
    if not microbatches:
        raise ConfigError("microbatches is empty: a step must have at least 1")
    short = signatures[:1] if len(set(signatures)) == 1 else signatures
    return Announcement(len(signatures), short, count, request.order_digests(len(signatures)))


def _check_microbatches(microbatches: Sequence[Microbatch]) -> None:
    if isinstance(microbatches, (Mapping, str)) or not hasattr(microbatches, "__len__"):
        kind = type(microbatches).__name__
        raise ConfigError(f"microbatches are a {kind}: must be a list of dicts, like [{{'inputs': x}}]")
    for index, microbatch in enumerate(microbatches):
        if not isinstance(microbatch, Mapping):
            kind = type(microbatch).__name__
            raise ConfigError(f"microbatch {index} is a {kind}: must be a dict, like {{'inputs': x}}")


def describe_microbatch(microbatch: Microbatch) -> tuple[Any, ...]:
    """What messages in a pipeline may depend on: shapes, dtypes, plain values, and which tensors need a gradient."""
    return tuple((key, _describe(microbatch[key])) for key in sorted(microbatch, key=str))


def _describe(value: Any) -> Any:
    if isinstance(value, Tensor):
        return (tuple(value.shape), value.dtype, value.requires_grad)
    if isinstance(value, (bool, int, type(None))):
        return value
    if isinstance(value, str):
        return value if len(value) < MAX_SIGNATURE_LENGTH else _digest(value)
    if isinstance(value, (tuple, list)):
        items = tuple(map(_describe, value))
        return items if len(items) < MAX_SIGNATURE_LENGTH else _digest(repr(items))
    if isinstance(value, Mapping):
        return describe_microbatch(value)
    return type(value).__name__


def _digest(text: str) -> bytes:
    return hashlib.blake2b(text.encode(errors="surrogatepass"), digest_size=16).digest()


def hash_state(parameters: Iterable[Tensor], device: torch.device) -> int:
    """Hash what may change between steps and decides on the dtypes and gradients of stages' outputs."""
    autocast = torch.is_autocast_enabled(device.type) and torch.get_autocast_dtype(device.type)
    return hash((autocast, tuple((parameter.requires_grad, parameter.dtype) for parameter in parameters)))


def _hash(value: tuple[Any, ...]) -> int:
    return int.from_bytes(hashlib.sha256(repr(value).encode()).digest()[:8], "little")
