"""Watches layers that run without memory: every operator, what it reads and writes, what autograd keeps for it."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks
from torch.nn import functional
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import flop_registry

ATTENTION = "attention"
LONG = 64  # numbers of a row
EXPERTS = ("_grouped_mm", "grouped_linear")  # torch's, and the engine's own


@dataclass(frozen=True)
class Call:
    """One operator that ran. A tensor is known by its memory, so that views of it are the same: bytes by memory."""

    name: str
    reads: dict[int, float]
    writes: dict[int, float]
    flops: float = 0.0
    masked: int = 0  # tokens of which attention computes all pairs, though a mask hides some
    summed: float = 0.0  # bytes that are summed over `tp`
    is_odd: bool = False  # its rows are not aligned
    copied: float = 0.0  # bytes of tensors in which it skips something: compiled, they become tensors of their own


@dataclass
class Watched:
    """What was seen while it was on."""

    calls: list[Call] = field(default_factory=list)
    kept: dict[int, float] = field(default_factory=dict)
    is_on: bool = False
    _alive: list[Tensor] = field(default_factory=list)  # a number of memory that is freed would come up again

    def sizes(self, tensors: Sequence[Tensor]) -> dict[int, float]:
        """Bytes by memory. A tensor that repeats what it has takes no more than that."""
        self._alive += tensors
        found: dict[int, float] = {}
        for tensor in tensors:
            place = memory_of(tensor)
            size = float(min(tensor.numel() * tensor.element_size(), tensor.untyped_storage().nbytes()))
            found[place] = max(size, found.get(place, 0.0))
        return found

    def see(self, call: Call) -> None:
        if self.is_on:
            self.calls.append(call)

    @contextmanager
    def away(self) -> Iterator[None]:
        """Nothing is seen for a while."""
        before, self.is_on = self.is_on, False
        try:
            yield
        finally:
            self.is_on = before

    def keep(self, *tensors: Tensor) -> None:
        for place, size in self.sizes(tensors).items():
            self.kept[place] = max(size, self.kept.get(place, 0.0))


def memory_of(tensor: Tensor) -> int:
    """The number of the memory that a tensor has, or would have."""
    return int(tensor.untyped_storage()._cdata)


@contextmanager
def watching(watched: Watched) -> Iterator[None]:
    """Operators are seen while `watched.is_on`."""

    def pack(tensor: Tensor) -> Tensor:
        if watched.is_on:
            watched.keep(tensor)
        return tensor

    with _Attention(watched), saved_tensors_hooks(pack, lambda tensor: tensor), _Operators(watched):
        yield


class _Operators(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Every operator but views, which cost nothing."""

    def __init__(self, watched: Watched) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.watched = watched

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        result = _grouped(*args) if func is torch.ops.aten._grouped_mm.default else func(*args, **kwargs)
        watched = self.watched
        if watched.is_on:
            reads, writes = watched.sizes(_tensors((args, kwargs))), watched.sizes(_tensors(result))
            if not func.is_view and not (writes.keys() <= reads.keys() and not func._schema.is_mutable):
                flops = _flops(func.overloadpacket, args, kwargs, result)
                copied = sum(tensor.nbytes for tensor in _tensors((args, kwargs)) if flops and _is_odd(tensor))
                is_odd = any(map(_is_odd, _tensors(result)))
                name = func.overloadpacket.__name__
                watched.see(Call(name, reads, writes, flops, is_odd=is_odd, copied=float(copied)))
        return result


class _Attention(TorchFunctionMode):
    """Attention as one operator, which keeps what the flash kernel keeps. Without memory torch would take it apart."""

    def __init__(self, watched: Watched) -> None:
        super().__init__()
        self.watched = watched

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs, watched = kwargs or {}, self.watched
        if func is not functional.scaled_dot_product_attention or not watched.is_on:
            return func(*args, **kwargs)
        named = dict(zip(("query", "key", "value", "attn_mask", "dropout_p", "is_causal"), args)) | kwargs
        query, key, value, mask = named["query"], named["key"], named["value"], named.get("attn_mask")
        with watched.away():
            result = func(*args, **kwargs).transpose(1, 2).contiguous().transpose(1, 2)  # the flash kernel's layout
            sums = torch.empty(query.shape[:-1], dtype=torch.float32, device="meta")
        watched.keep(query, key, value, result, sums)
        rows, columns = query.shape[-2], key.shape[-2]
        flops = 2.0 * math.prod(query.shape[:-1]) * columns * (query.shape[-1] + value.shape[-1])
        if named.get("is_causal"):
            flops *= (rows + 1) / (2 * rows)
        reads = watched.sizes([query, key, value, *([mask] if isinstance(mask, Tensor) else [])])
        masked = rows if mask is not None and rows == columns else 0
        watched.see(Call(ATTENTION, reads, watched.sizes([result, sums]), flops, masked))
        return result


def _grouped(rows: Tensor, weights: Tensor, *_: Any) -> Tensor:
    """What rows of experts become, of any type and size: torch's kernel takes some only, and others are used then."""
    return rows.new_empty(rows.shape[0], weights.shape[-1])


def _is_odd(tensor: Tensor) -> bool:
    """Whether long rows of a tensor begin at places from which a GPU does not read several numbers at once."""
    lengths = sorted(stride for stride, size in zip(tensor.stride(), tensor.shape) if size > 1)
    return len(lengths) > 1 and lengths[0] == 1 and lengths[1] >= LONG and lengths[1] * tensor.element_size() % 16 != 0


def _tensors(values: Any) -> list[Tensor]:
    return [leaf for leaf in tree_leaves(values) if isinstance(leaf, Tensor)]


def _flops(packet: Any, args: Any, kwargs: Any, result: Any) -> float:
    if packet.__name__ in EXPERTS:
        return 2.0 * float(args[0].numel() * result.shape[-1])
    count = flop_registry.get(packet)
    return float(count(*args, **kwargs, out_val=result)) if count else 0.0
