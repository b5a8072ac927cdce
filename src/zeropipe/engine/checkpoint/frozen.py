"""Weights that are not trained, and that a checkpoint may leave out: they are known by their sums."""

from __future__ import annotations

import hashlib

import torch
from torch import Tensor

from zeropipe.engine.backward.gradients import local
from zeropipe.engine.checkpoint import pieces
from zeropipe.engine.checkpoint.names import Catalog
from zeropipe.engine.comm.fabric import Fabric
from zeropipe.engine.setup import agree


def fingerprint(fabric: Fabric, catalog: Catalog) -> str:
    """The same for the same frozen weights, however they are cut, sharded and spread; all ranks call this alike.

    A sum over the bits of all elements does not care which process has which of them.
    """

    def look() -> dict[tuple[str, tuple[int, ...]], int]:
        plan = pieces.plan_save({name: tensor.detach() for name, tensor in catalog.frozen.items()})
        return {
            (item.index.fqn, tuple(item.index.offset or ())): _bits(catalog.frozen[item.index.fqn])
            for item in plan.items
        }

    sums: dict[str, int] = {}
    every = {place: value for found in agree(fabric, look) for place, value in found.items()}  # copies count once
    for (name, _), value in every.items():
        sums[name] = sums.get(name, 0) + value
    facts = [(d.name, d.shape, d.dtype, sums.get(d.name, 0)) for d in catalog.described.values() if d.is_frozen]
    return hashlib.sha256(repr(sorted(facts)).encode()).hexdigest()[:32]


def _bits(tensor: Tensor) -> int:
    """The elements of this process's piece, read as whole numbers and added up."""
    piece = local(tensor.detach()).contiguous().reshape(-1).view(torch.uint8)
    whole = piece.view(torch.int32) if piece.numel() % 4 == 0 else piece.view(torch.int16)
    return int(whole.sum(dtype=torch.int64))
