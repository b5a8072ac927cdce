"""Whole weights, one after the other, on the ranks that ask for them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor

from zeropipe.engine.backward.gradients import local
from zeropipe.engine.checkpoint.names import Catalog, Described, Team
from zeropipe.engine.setup import same_everywhere
from zeropipe.engine.torch_private import like
from zeropipe.errors import ConfigError

WHERE = "the stream of weights"
Together = Callable[..., AbstractContextManager[Team]]


def named_weights(together: Together, ranks: Iterable[int] | None) -> Iterator[tuple[str, Tensor]]:
    """(Name, whole tensor), stage by stage. A rank that does not ask gets nothing, and takes part all the same.

    A tensor is gathered when it is its turn, and nobody keeps it: there is never more than one of them. A rank that
    stops in the middle takes part in the rest when its iterator is closed, so that the others are not left alone.
    """
    with together(WHERE) as team:
        catalog = Catalog(team)
        same_everywhere(team.fabric, lambda: {"ranks": _asking(ranks, team.fabric.size)})
        asking = _asking(ranks, team.fabric.size)
    turns = [(stage, tensor) for stage in sorted(catalog.stages) for tensor in catalog.stages[stage]]
    turns = [(stage, tensor) for stage, tensor in turns if tensor.name not in catalog.ties]
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


def _asking(ranks: Iterable[int] | None, size: int) -> tuple[int, ...]:
    found = tuple(range(size)) if ranks is None else tuple(sorted(set(ranks)))
    if any(not isinstance(rank, int) or not 0 <= rank < size for rank in found):
        raise ConfigError(f"ranks={list(found)}: give some of 0 to {size - 1}, or None for all")
    return found


def _whole(team: Team, catalog: Catalog, stage: int, tensor: Described, asking: tuple[int, ...]) -> Tensor | None:
    """One tensor: its owners gather it, and each hands it to those of its own pipeline that ask."""
    fabric, layout = team.fabric, team.fabric.layout
    home = layout.pipeline[team.schedule.placement.rank_of(stage)]
    receivers = tuple(rank for rank in layout.pipeline if rank in asking)
    mine: Tensor | None = None
    if stage in team.stages and home == layout.rank:
        mine = _gathered(catalog.saved[tensor.name], fabric.device, receivers != ())
    members = tuple(sorted({home, *receivers}))
    if layout.rank in members and len(members) > 1:
        if mine is None:
            mine = torch.empty(tensor.shape, dtype=getattr(torch, tensor.dtype), device=fabric.device)
        fabric.hand_out(mine, home, members)
    return mine if layout.rank in receivers else None


def _gathered(tensor: Any, device: torch.device, wanted: bool) -> Tensor | None:
    """A copy of a whole tensor on the engine's device; all processes that have a piece of it come here."""
    piece = local(tensor.detach())
    if hasattr(tensor, "full_tensor"):
        spread = tensor.detach() if piece.device == device else like(tensor, piece.to(device))
        whole = spread.full_tensor()
        return whole.clone() if whole.data_ptr() == piece.data_ptr() else whole.contiguous()
    return piece.to(device, copy=True) if wanted else None
