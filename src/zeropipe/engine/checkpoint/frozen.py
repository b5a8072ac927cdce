"""The fingerprint of weights that are not trained, and that a checkpoint may leave out.

Every element is multiplied by a number that depends on its position in the whole tensor, and the products are summed
modulo 2^64. A sum does not depend on which process has which elements, so the fingerprint does not depend on the
layout; the positions make other values, another order and other signs give another sum.
"""

from __future__ import annotations

import hashlib
import math
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import lru_cache, partial
from typing import Any

import torch
from torch import Tensor

from zeropipe.engine.backward.gradients import local
from zeropipe.engine.checkpoint import pieces
from zeropipe.engine.checkpoint.manifest import Manifest
from zeropipe.engine.checkpoint.names import Catalog, Described
from zeropipe.engine.comm.collective import on_all_ranks
from zeropipe.engine.comm.fabric import Fabric
from zeropipe.errors import ConfigError

_PREFIX = "2:"  # a fingerprint without it is of the first form
_CHUNKS = {
    "cpu": 2**17,
    "cuda": 2**23,
}  # elements that are looked at together: what a cache holds, and what fills a GPU
_UNSHARDED = ("pp", "dp_replicate")  # dimensions of a mesh that do not cut tensors

Sum = Callable[[Tensor, Sequence[int]], int]  # of a piece of a tensor that begins at these offsets


def fingerprint(fabric: Fabric, catalog: Catalog) -> str:
    """The same for the same frozen weights, however they are cut and sharded; all ranks call this alike."""
    sums = _sums(fabric, catalog, position_sum)
    names = {catalog.counted(min(group)): min(group) for group in catalog.tied_sets}  # layouts count other ones
    facts = [(names.get(d.name, d.name), d.shape, d.dtype, sums[d.name] % 2**64) for d in _frozen(catalog)]
    return _PREFIX + _digest(facts)


def require_same_frozen(path: object, manifest: Manifest, fabric: Fabric, catalog: Catalog) -> None:
    """ConfigError if a checkpoint was trained beside other frozen weights; all ranks call this alike."""
    saved = manifest.model.get("base")
    if saved is None:
        return
    if saved.startswith(_PREFIX):
        is_same = saved == fingerprint(fabric, catalog)
    else:
        is_same = _is_same_in_first_form(path, manifest, fabric, catalog)
    if not is_same:
        raise ConfigError(
            f"{path} is of other frozen weights than the model's: load it into the model that it was trained on"
        )


def position_sum(piece: Tensor, offsets: Sequence[int]) -> int:
    """Of a piece of a tensor, modulo 2^64: the sums of pieces add up to that of the tensor, whatever the pieces are."""
    if piece.numel() == 0:
        return 0
    total = torch.zeros((), dtype=torch.int64, device=piece.device)
    factors = lru_cache(maxsize=8)(partial(_factors, piece.device))
    for part, starts in _parts(piece.detach(), tuple(offsets), _CHUNKS.get(piece.device.type, 2**20)):
        sums, starts = _words(part, starts)
        for dim in reversed(range(sums.ndim)):  # products and sums wrap around
            sums = sums.mul_(factors(dim, starts[dim], sums.shape[dim])).sum(-1)
        total += sums
    return int(total) % 2**64


def _sums(fabric: Fabric, catalog: Catalog, sum_of: Sum) -> dict[str, int]:
    """Over all ranks, by name; copies of a piece count once."""

    def look() -> dict[tuple[str, tuple[int, ...]], int]:
        plan = pieces.plan_save({name: tensor.detach() for name, tensor in catalog.frozen.items()})
        places = [(item.index.fqn, tuple(item.index.offset or ())) for item in plan.items]
        return {(name, offsets): sum_of(local(catalog.frozen[name]), offsets) for name, offsets in places}

    found = {d.name: 0 for d in _frozen(catalog)}
    _, everyone = on_all_ranks(fabric, look)
    every = {place: value for some in everyone for place, value in some.items()}
    for (name, _), value in every.items():
        found[name] += value
    return found


def _frozen(catalog: Catalog) -> list[Described]:
    return [d for d in catalog.described.values() if d.is_frozen]


def _digest(facts: list[Any]) -> str:
    return hashlib.sha256(repr(sorted(facts)).encode()).hexdigest()[:32]


def _parts(piece: Tensor, offsets: tuple[int, ...], most: int) -> Iterator[tuple[Tensor, tuple[int, ...]]]:
    """Boxes of at most so many elements, and where they begin; cut along the first dimension that can be cut."""
    if piece.numel() <= most:
        yield piece, offsets
        return
    dim = next(dim for dim, size in enumerate(piece.shape) if size > 1)
    step = max(1, piece.shape[dim] * most // piece.numel())
    for number, part in enumerate(piece.split(step, dim)):
        yield from _parts(part, (*offsets[:dim], offsets[dim] + number * step, *offsets[dim + 1 :]), most)


def _words(part: Tensor, starts: tuple[int, ...]) -> tuple[Tensor, tuple[int, ...]]:
    """The bits of elements as integers of at most 16 bits, of which there may be several along the last dimension."""
    part = torch.view_as_real(part) if part.is_complex() else part
    flat = part.contiguous() if part.ndim else part.reshape(1)
    starts = (*starts, *[0] * (flat.ndim - len(starts)))
    words = flat.view(torch.uint8 if flat.element_size() == 1 else torch.int16)
    return words.long(), (*starts[:-1], starts[-1] * (words.shape[-1] // flat.shape[-1]))


def _factors(device: torch.device, dim: int, start: int, length: int) -> Tensor:
    """An odd pseudo-random number of 64 bits for each position along a dimension (splitmix64 of the position)."""
    x = (torch.arange(start, start + length, device=device) + (dim << 48)) * -0x61C8864680B583EB
    for shift, factor in ((30, -0x40A7B892E31B1A47), (27, -0x6B2FB644ECCEEE15)):
        x = (x ^ _shifted(x, shift)) * factor
    return (x ^ _shifted(x, 31)) | 1


def _shifted(x: Tensor, bits: int) -> Tensor:
    """To the right, filled with zeros."""
    return (x >> bits) & (2 ** (64 - bits) - 1)


# --- the first form: a plain sum of the bits, read as integers of 32 bits where their number allows it


def _is_same_in_first_form(path: object, manifest: Manifest, fabric: Fabric, catalog: Catalog) -> bool:
    """Compare as older versions did. Where that depends on how weights are cut, a difference says nothing."""
    sums = _sums(fabric, catalog, lambda piece, _: _bits(piece))
    facts = [(d.name, d.shape, d.dtype, sums[d.name]) for d in _frozen(catalog)]
    if _digest(facts) == manifest.model["base"]:
        return True
    meshes = (manifest.written_by["mesh"], dict(fabric.layout.sizes))
    if all(_is_independent(d, mesh) for d in _frozen(catalog) for mesh in meshes):
        return False
    if fabric.rank == 0:
        warnings.warn(
            f"{path} has a fingerprint of frozen weights in an older form, which cannot be compared on this layout: "
            "make sure that they are those that it was trained on",
            stacklevel=2,
        )
    return True


def _bits(piece: Tensor) -> int:
    numbers = piece.detach().contiguous().reshape(-1).view(torch.uint8)
    size = next(size for size in (4, 2, 1) if numbers.numel() % size == 0)
    return int(numbers.view({4: torch.int32, 2: torch.int16, 1: torch.uint8}[size]).sum(dtype=torch.int64))


def _is_independent(tensor: Described, mesh: Mapping[str, int]) -> bool:
    """Whether elements are read in the same groups, however this mesh cuts the tensor."""
    size = getattr(torch, tensor.dtype).itemsize
    ways = math.prod(number for dim, number in mesh.items() if dim not in _UNSHARDED)
    is_whole = ways == 1 or not tensor.shape
    return size >= 4 or is_whole or tensor.shape[-1] * size % (4 * ways) == 0
