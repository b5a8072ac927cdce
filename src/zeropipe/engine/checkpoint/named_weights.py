"""The full weights of a running engine, one tensor at a time, on the ranks that request them."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, closing
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from zeropipe.engine.backward.gradients import to_local
from zeropipe.engine.checkpoint.catalog import Catalog, EngineView, StageTensor, TensorInfo
from zeropipe.engine.comm.collective import nothing, on_all_ranks, require_same
from zeropipe.engine.stages.hf import HFStage
from zeropipe.engine.stages.save import build_skeleton, layer_prefix
from zeropipe.engine.stages.skeleton import ModelSkeleton
from zeropipe.engine.torch_private.tensors import sharded_like
from zeropipe.engine.transformers_private import to_published
from zeropipe.errors import ConfigError, short

ACTIVITY = "the stream of weights"
Together = Callable[..., AbstractContextManager[EngineView]]  # Engine.together


def named_weights(
    together: Together, ranks: Iterable[int] | None, merge: bool = False, published: bool = False
) -> Iterator[tuple[str, Tensor]]:
    """(Name, full tensor), stage by stage. A rank that does not receive them gets none, but must iterate too.

    A tensor is gathered only when the iterator comes to it and is not kept, so one of them is in memory at a time (the
    tensors of one layer with `published`). A rank that stops early takes part in the rest when its iterator is closed,
    so the other ranks do not wait for it.
    """
    with together(ACTIVITY) as view:
        size = view.comm.size
        require_same(view.comm, lambda: {"ranks": _parse_ranks(ranks, size), "merge": merge, "published": published})
        catalog, receivers = Catalog(view, merge), _parse_ranks(ranks, size)
        model = _find_model(view) if published else None
    tensors = [(stage, tensor) for stage in sorted(catalog.stages) for tensor in catalog.stages[stage]]
    weights = _iterate(together, catalog, [pair for pair in tensors if pair[1].name not in catalog.ties], receivers)
    return weights if model is None else _iterate_published(model, weights)


def _iterate(
    together: Together, catalog: Catalog, tensors: list[tuple[int, TensorInfo]], receivers: tuple[int, ...]
) -> Iterator[tuple[str, Tensor]]:
    remaining = iter(tensors)

    def gather(stage: int, tensor: TensorInfo) -> Tensor | None:
        with together(ACTIVITY, refusing=False) as view:
            return _gather_and_broadcast(view, catalog, stage, tensor, receivers)

    try:
        for stage, tensor in remaining:
            full = gather(stage, tensor)
            if full is not None:
                yield tensor.name, full
            del full
    except GeneratorExit:
        for stage, tensor in remaining:
            gather(stage, tensor)
        raise


def _find_model(view: EngineView) -> ModelSkeleton:
    """The Hugging Face model that the stages are cut from; ConfigError on all ranks if there is none."""

    def find() -> ModelSkeleton:
        module = next(iter(view.stages.values())).module
        if not isinstance(module, HFStage):
            raise ConfigError(f"published=True with a {type(module).__name__}: must be a stage of hf_stages")
        return build_skeleton(module)

    return on_all_ranks(view.comm, find, share=nothing)[0]


def _iterate_published(model: ModelSkeleton, weights: Iterator[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
    """The weights under the names and in the shapes in which their model family is published, layer by layer."""
    with closing(weights):  # type: ignore[type-var]
        for _, layer in itertools.groupby(weights, key=lambda item: layer_prefix(item[0])):
            yield from to_published(model.model, dict(layer)).items()


def _parse_ranks(ranks: Iterable[int] | None, size: int) -> tuple[int, ...]:
    if ranks is None:
        return tuple(range(size))
    found = list(ranks) if isinstance(ranks, Iterable) else ranks
    if not isinstance(found, list) or any(not isinstance(rank, int) or not 0 <= rank < size for rank in found):
        raise ConfigError(f"ranks={short(found)}: must be a list of ranks from 0 to {size - 1}, or None for all")
    return tuple(sorted(set(found)))


def _gather_and_broadcast(
    view: EngineView, catalog: Catalog, stage: int, tensor: TensorInfo, receivers: tuple[int, ...]
) -> Tensor | None:
    """One full tensor: its owners gather it, and each broadcasts it to the receivers of its own pipeline."""
    comm, layout = view.comm, view.comm.layout
    owner = layout.pipeline[view.schedule.placement.rank_of(stage)]
    receivers = tuple(rank for rank in layout.pipeline if rank in receivers)
    full: Tensor | None = None
    if stage in view.stages and owner == layout.rank:
        full = _gather(catalog.find(tensor.name), comm.device, is_needed=receivers != ())
    members = tuple(sorted({owner, *receivers}))
    if layout.rank in members and len(members) > 1:
        if full is None:
            full = torch.empty(tensor.shape, dtype=getattr(torch, tensor.dtype), device=comm.device)
        comm.broadcast_among(full, owner, members)
    return full if layout.rank in receivers else None


def _gather(own: StageTensor, device: torch.device, is_needed: bool) -> Tensor | None:
    """A copy of a full tensor on the engine's device; all processes that have a shard of it call this."""
    if own.merge is not None:
        return own.merge().detach().to(device) if is_needed else None
    tensor = own.tensor.detach()
    shard = to_local(tensor)
    if isinstance(tensor, DTensor):
        on_device: Any = tensor if shard.device == device else sharded_like(own.tensor, shard.to(device))
        full = on_device.full_tensor()
        return full.clone() if full.data_ptr() == shard.data_ptr() else full.contiguous()
    return shard.to(device, copy=True).contiguous() if is_needed else None
