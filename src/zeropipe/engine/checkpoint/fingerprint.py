"""The fingerprint of frozen weights, which a checkpoint may leave out.

Every element is multiplied by a number that depends on its position in the full tensor, and the products are summed
modulo 2^64. A sum does not depend on which process has which elements, so the fingerprint does not depend on the
layout. The positions make other values, another order and other signs give another sum.
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

from zeropipe.engine.backward.gradients import to_local
from zeropipe.engine.checkpoint.catalog import Catalog, TensorInfo
from zeropipe.engine.checkpoint.manifest import Manifest
from zeropipe.engine.checkpoint.writer import plan_local
from zeropipe.engine.comm.collective import on_all_ranks
from zeropipe.engine.comm.communicator import Communicator
from zeropipe.errors import ConfigError

_PREFIX = "2:"  # a fingerprint without it has the format of version 1
_CHUNK_SIZES = {"cpu": 2**17, "cuda": 2**23}  # elements per kernel: what fits a cache, and what fills a GPU
_UNSHARDED = ("pp", "dp_replicate")  # dimensions of a mesh that do not shard tensors; cp may

SumShard = Callable[[Tensor, Sequence[int]], int]  # of a shard and its offsets in the full tensor


def compute_fingerprint(comm: Communicator, catalog: Catalog) -> str:
    """A digest of the frozen weights, which does not depend on the layout; all ranks call this."""
    sums = _sum_over_ranks(comm, catalog, position_sum)
    names = {catalog.saved_name(min(group)): min(group) for group in catalog.tied_sets}  # not the layout's choice
    return combine_sums([(names.get(t.name, t.name), t.shape, t.dtype, sums[t.name]) for t in _list_frozen(catalog)])


def combine_sums(tensors: Sequence[tuple[str, tuple[int, ...], str, int]]) -> str:
    """The fingerprint of tensors: their names, shapes, dtypes and position sums. Of tied names the smallest counts."""
    return _PREFIX + _digest([(name, shape, dtype, total % 2**64) for name, shape, dtype, total in tensors])


def is_current(fingerprint: str) -> bool:
    """Whether a fingerprint has the format of this version, which does not depend on the layout."""
    return fingerprint.startswith(_PREFIX)


def require_same_frozen(path: object, manifest: Manifest, comm: Communicator, catalog: Catalog) -> None:
    """ConfigError if a checkpoint was trained with other frozen weights; all ranks call this."""
    saved = manifest.model.get("base")
    if saved is None:
        return
    if is_current(saved):
        is_same = saved == compute_fingerprint(comm, catalog)
    else:
        is_same = _is_same_in_version_1(path, manifest, comm, catalog)
    if not is_same:
        raise ConfigError(
            f"{path} has other frozen weights than the model; load it into the model that it was trained with"
        )


def position_sum(shard: Tensor, offsets: Sequence[int]) -> int:
    """A sum modulo 2^64 over the bits of a shard and their positions; sums of shards add up to that of the tensor."""
    if shard.numel() == 0:
        return 0
    total = torch.zeros((), dtype=torch.int64, device=shard.device)
    factors = lru_cache(maxsize=8)(partial(_position_factors, shard.device))
    for chunk, starts in _chunks(shard.detach(), tuple(offsets), _CHUNK_SIZES.get(shard.device.type, 2**20)):
        sums, starts = _to_integers(chunk, starts)
        for dim in reversed(range(sums.ndim)):  # products and sums wrap around
            sums = sums.mul_(factors(dim, starts[dim], sums.shape[dim])).sum(-1)
        total += sums
    return int(total) % 2**64


def _sum_over_ranks(comm: Communicator, catalog: Catalog, sum_shard: SumShard) -> dict[str, int]:
    """The sums of all frozen tensors, by name; replicas of a shard count once."""

    def sum_local() -> dict[tuple[str, tuple[int, ...]], int]:
        plan = plan_local({name: tensor.detach() for name, tensor in catalog.frozen.items()})
        shards = [(item.index.fqn, tuple(item.index.offset or ())) for item in plan.items]
        return {(name, offsets): sum_shard(to_local(catalog.frozen[name]), offsets) for name, offsets in shards}

    sums = {tensor.name: 0 for tensor in _list_frozen(catalog)}
    _, ranks = on_all_ranks(comm, sum_local)
    for (name, _), value in {shard: value for rank in ranks for shard, value in rank.items()}.items():
        sums[name] += value
    return sums


def _list_frozen(catalog: Catalog) -> list[TensorInfo]:
    return [tensor for tensor in catalog.infos.values() if tensor.is_frozen]


def _digest(facts: list[Any]) -> str:
    return hashlib.sha256(repr(sorted(facts)).encode()).hexdigest()[:32]


def _chunks(shard: Tensor, offsets: tuple[int, ...], max_size: int) -> Iterator[tuple[Tensor, tuple[int, ...]]]:
    """Boxes of at most `max_size` elements and their offsets, cut along the first dimension that can be cut."""
    if shard.numel() <= max_size:
        yield shard, offsets
        return
    dim = next(dim for dim, size in enumerate(shard.shape) if size > 1)
    step = max(1, shard.shape[dim] * max_size // shard.numel())
    for number, chunk in enumerate(shard.split(step, dim)):
        yield from _chunks(chunk, (*offsets[:dim], offsets[dim] + number * step, *offsets[dim + 1 :]), max_size)


def _to_integers(chunk: Tensor, starts: tuple[int, ...]) -> tuple[Tensor, tuple[int, ...]]:
    """The bits of elements as integers of at most 16 bits; the last dimension may have several per element."""
    chunk = torch.view_as_real(chunk) if chunk.is_complex() else chunk
    flat = chunk.contiguous() if chunk.ndim else chunk.reshape(1)
    starts = (*starts, *[0] * (flat.ndim - len(starts)))
    integers = flat.view(torch.uint8 if flat.element_size() == 1 else torch.int16)
    return integers.long(), (*starts[:-1], starts[-1] * (integers.shape[-1] // flat.shape[-1]))


def _position_factors(device: torch.device, dim: int, start: int, length: int) -> Tensor:
    """An odd pseudo-random number of 64 bits for each position along a dimension (splitmix64 of the position)."""
    x = (torch.arange(start, start + length, device=device) + (dim << 48)) * -0x61C8864680B583EB
    for shift, factor in ((30, -0x40A7B892E31B1A47), (27, -0x6B2FB644ECCEEE15)):
        x = (x ^ _shift_right(x, shift)) * factor
    return (x ^ _shift_right(x, 31)) | 1


def _shift_right(x: Tensor, bits: int) -> Tensor:
    """A logical shift, which fills with zeros."""
    return (x >> bits) & (2 ** (64 - bits) - 1)


# version 1: a plain sum of the bits, read as integers of 32 bits where the size allows it


def _is_same_in_version_1(path: object, manifest: Manifest, comm: Communicator, catalog: Catalog) -> bool:
    """Compare as older versions did; where the sum depends on the layout, a difference is only a warning."""
    sums = _sum_over_ranks(comm, catalog, lambda shard, _: _sum_bits(shard))
    frozen = _list_frozen(catalog)
    if _digest([(t.name, t.shape, t.dtype, sums[t.name]) for t in frozen]) == manifest.model["base"]:
        return True
    meshes = (manifest.written_by["mesh"], dict(comm.layout.sizes))
    if all(_is_layout_independent(tensor, mesh) for tensor in frozen for mesh in meshes):
        return False
    if comm.rank == 0:
        warnings.warn(
            f"{path} has a fingerprint of frozen weights of an older version, which cannot be compared on this layout: "
            "make sure that the model has the weights that it was trained with",
            stacklevel=2,
        )
    return True


def _sum_bits(shard: Tensor) -> int:
    data = shard.detach().contiguous().reshape(-1).view(torch.uint8)
    size = next(size for size in (4, 2, 1) if data.numel() % size == 0)
    return int(data.view({4: torch.int32, 2: torch.int16, 1: torch.uint8}[size]).sum(dtype=torch.int64))


def _is_layout_independent(tensor: TensorInfo, mesh: Mapping[str, int]) -> bool:
    """Whether version 1 reads elements in the same groups for all shards of a tensor on this mesh."""
    size = getattr(torch, tensor.dtype).itemsize
    num_shards = math.prod(number for dim, number in mesh.items() if dim not in _UNSHARDED)
    is_unsharded = num_shards == 1 or not tensor.shape
    return size >= 4 or is_unsharded or tensor.shape[-1] * size % (4 * num_shards) == 0
