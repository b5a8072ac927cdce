"""Whole weights, one after the other, on the ranks that ask for them."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, closing
from typing import Any

import torch
from torch import Tensor

from zeropipe.engine.backward.gradients import local
from zeropipe.engine.checkpoint.names import Catalog, Described, Own, Team
from zeropipe.engine.comm.collective import nothing, on_all_ranks, require_same
from zeropipe.engine.stages.hf import HFStage
from zeropipe.engine.stages.save import layer_of, whole_of
from zeropipe.engine.stages.whole import Whole
from zeropipe.engine.torch_private.tensors import like
from zeropipe.engine.transformers_private import published as published_form
from zeropipe.errors import ConfigError, short

WHERE = "the stream of weights"
Together = Callable[..., AbstractContextManager[Team]]


def named_weights(
    together: Together, ranks: Iterable[int] | None, merge: bool = False, published: bool = False
) -> Iterator[tuple[str, Tensor]]:
    """(Name, whole tensor), stage by stage. A rank that does not ask gets nothing, and takes part all the same.

    A tensor is gathered when it is its turn, and nobody keeps it: there is never more than one of them (of a layer, if
    they are to be as they are published). A rank that stops in the middle takes part in the rest when its iterator is
    closed, so that the others are not left alone.
    """
    with together(WHERE) as team:
        size = team.fabric.size
        require_same(team.fabric, lambda: {"ranks": _asking(ranks, size), "merge": merge, "published": published})
        catalog, asking = Catalog(team, merge), _asking(ranks, size)
        whole = _published_as(team) if published else None
    turns = [(stage, tensor) for stage in sorted(catalog.stages) for tensor in catalog.stages[stage]]
    weights = _weights(together, catalog, [turn for turn in turns if turn[1].name not in catalog.ties], asking)
    return weights if whole is None else _published(whole, weights)


def _weights(
    together: Together, catalog: Catalog, turns: list[tuple[int, Described]], asking: tuple[int, ...]
) -> Iterator[tuple[str, Tensor]]:
    waiting = iter(turns)

    def take(stage: int, tensor: Described) -> Tensor | None:
        with together(WHERE, refusing=False) as team:
            return _whole(team, catalog, stage, tensor, asking)

    try:
        for stage, tensor in waiting:
            whole = take(stage, tensor)
            if whole is not None:
                yield tensor.name, whole
            del whole
    except GeneratorExit:
        for stage, tensor in waiting:
            take(stage, tensor)
        raise


def _published_as(team: Team) -> Whole:
    """The model that the stages are of."""

    def look() -> Whole:
        module = next(iter(team.stages.values())).module
        if not isinstance(module, HFStage):
            raise ConfigError(f"published=True with a {type(module).__name__}: it is for stages of hf_stages")
        return whole_of(module)

    return on_all_ranks(team.fabric, look, share=nothing)[0]


def _published(whole: Whole, weights: Iterator[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
    """A layer at a time, under the names and in the shapes in which its family is published."""
    with closing(weights):  # type: ignore[type-var]
        for _, layer in itertools.groupby(weights, key=lambda item: layer_of(item[0])):
            yield from published_form(whole.model, dict(layer)).items()


def _asking(ranks: Iterable[int] | None, size: int) -> tuple[int, ...]:
    if ranks is None:
        return tuple(range(size))
    given = list(ranks) if isinstance(ranks, Iterable) else ranks
    if not isinstance(given, list) or any(not isinstance(rank, int) or not 0 <= rank < size for rank in given):
        raise ConfigError(f"ranks={short(given)}: give a list with some of 0 to {size - 1}, or None for all")
    return tuple(sorted(set(given)))


def _whole(team: Team, catalog: Catalog, stage: int, tensor: Described, asking: tuple[int, ...]) -> Tensor | None:
    """One tensor: its owners gather it, and each hands it to those of its own pipeline that ask."""
    fabric, layout = team.fabric, team.fabric.layout
    home = layout.pipeline[team.schedule.placement.rank_of(stage)]
    receivers = tuple(rank for rank in layout.pipeline if rank in asking)
    mine: Tensor | None = None
    if stage in team.stages and home == layout.rank:
        mine = _gathered(catalog.owner(tensor.name), fabric.device, receivers != ())
    members = tuple(sorted({home, *receivers}))
    if layout.rank in members and len(members) > 1:
        if mine is None:
            mine = torch.empty(tensor.shape, dtype=getattr(torch, tensor.dtype), device=fabric.device)
        fabric.hand_out(mine, home, members)
    return mine if layout.rank in receivers else None


def _gathered(own: Own, device: torch.device, wanted: bool) -> Tensor | None:
    """A copy of a whole tensor on the engine's device; all processes that have a piece of it come here."""
    if own.merged is not None:
        return own.merged().detach().to(device) if wanted else None
    tensor: Any = own.tensor
    piece = local(tensor.detach())
    if hasattr(tensor, "full_tensor"):
        spread = tensor.detach() if piece.device == device else like(tensor, piece.to(device))
        whole = spread.full_tensor()
        return whole.clone() if whole.data_ptr() == piece.data_ptr() else whole.contiguous()
    return piece.to(device, copy=True).contiguous() if wanted else None
