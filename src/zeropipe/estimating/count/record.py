"""Record what layers run on the meta device: every operator with its reads and writes, and what autograd saves."""

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
from torch.utils.flop_counter import flop_registry

from zeropipe.estimating.count.meta_private import TorchDispatchMode, list_tensors, storage_id

ATTENTION = "attention"
MIN_ALIGNED_ROW = 64  # elements: shorter rows need no alignment
EXPERTS = ("_grouped_mm", "grouped_linear")  # torch's operator, and the engine's


@dataclass(frozen=True)
class Call:
    """One operator that ran. Tensors are identified by storage, so a view is the tensor that it views."""

    name: str
    reads: dict[int, float]  # storage -> bytes
    writes: dict[int, float]
    flops: float = 0.0
    masked: int = 0  # tokens of which attention computes all pairs, although a mask hides some
    summed: float = 0.0  # bytes all-reduced over `tp`
    is_unaligned: bool = False  # a result has unaligned rows
    copied: float = 0.0  # bytes of unaligned inputs, which a compiler copies


@dataclass
class OperatorLog:
    """The operators that ran while recording was on."""

    calls: list[Call] = field(default_factory=list)
    saved: dict[int, float] = field(default_factory=dict)  # by autograd: storage -> bytes
    is_on: bool = False
    _tensors: list[Tensor] = field(default_factory=list)  # kept alive, because ids of freed storage are reused

    def sizes(self, tensors: Sequence[Tensor]) -> dict[int, float]:
        """Storage -> bytes of the tensors; an expanded tensor has at most the bytes of its storage."""
        self._tensors += tensors
        found: dict[int, float] = {}
        for tensor in tensors:
            storage = storage_id(tensor)
            size = float(min(tensor.numel() * tensor.element_size(), tensor.untyped_storage().nbytes()))
            found[storage] = max(size, found.get(storage, 0.0))
        return found

    def add(self, call: Call) -> None:
        if self.is_on:
            self.calls.append(call)

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Pause recording."""
        before, self.is_on = self.is_on, False
        try:
            yield
        finally:
            self.is_on = before

    def save(self, *tensors: Tensor) -> None:
        """Record tensors that autograd saves."""
        for storage, size in self.sizes(tensors).items():
            self.saved[storage] = max(size, self.saved.get(storage, 0.0))


@contextmanager
def record(log: OperatorLog) -> Iterator[None]:
    """Record operators while `log.is_on`."""

    def pack(tensor: Tensor) -> Tensor:
        if log.is_on:
            log.save(tensor)
        return tensor

    with _AttentionMode(log), saved_tensors_hooks(pack, lambda tensor: tensor), _OperatorMode(log):
        yield


class _OperatorMode(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Records every operator except views, which cost nothing."""

    def __init__(self, log: OperatorLog) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.log = log

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        result = _grouped(*args) if func is torch.ops.aten._grouped_mm.default else func(*args, **kwargs)
        log = self.log
        if log.is_on:
            inputs = list_tensors((args, kwargs))
            reads, writes = log.sizes(inputs), log.sizes(list_tensors(result))
            if not func.is_view and not (writes.keys() <= reads.keys() and not func._schema.is_mutable):
                flops = _flops(func.overloadpacket, args, kwargs, result)
                copied = sum(tensor.nbytes for tensor in inputs if flops and _is_unaligned(tensor))
                is_unaligned = any(map(_is_unaligned, list_tensors(result)))
                name = func.overloadpacket.__name__
                log.add(Call(name, reads, writes, flops, is_unaligned=is_unaligned, copied=float(copied)))
        return result


class _AttentionMode(TorchFunctionMode):
    """Records attention as one operator that saves what the flash kernel saves; on meta, torch decomposes it."""

    def __init__(self, log: OperatorLog) -> None:
        super().__init__()
        self.log = log

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs, log = kwargs or {}, self.log
        if func is not functional.scaled_dot_product_attention or not log.is_on:
            return func(*args, **kwargs)
        named = dict(zip(("query", "key", "value", "attn_mask", "dropout_p", "is_causal"), args)) | kwargs
        query, key, value, mask = named["query"], named["key"], named["value"], named.get("attn_mask")
        with log.paused():
            result = func(*args, **kwargs).transpose(1, 2).contiguous().transpose(1, 2)  # the flash kernel's layout
            sums = torch.empty(query.shape[:-1], dtype=torch.float32, device="meta")
        log.save(query, key, value, result, sums)
        rows, columns = query.shape[-2], key.shape[-2]
        flops = 2.0 * math.prod(query.shape[:-1]) * columns * (query.shape[-1] + value.shape[-1])
        if named.get("is_causal"):
            flops *= (rows + 1) / (2 * rows)
        reads = log.sizes([query, key, value, *([mask] if isinstance(mask, Tensor) else [])])
        masked = rows if mask is not None and rows == columns else 0
        log.add(Call(ATTENTION, reads, log.sizes([result, sums]), flops, masked))
        return result


def _grouped(rows: Tensor, weights: Tensor, *_: Any) -> Tensor:
    """The result of a grouped product of any dtype and size; torch's own on meta takes only some."""
    return rows.new_empty(rows.shape[0], weights.shape[-1])


def _is_unaligned(tensor: Tensor) -> bool:
    """Whether long rows of a tensor start at addresses from which a GPU cannot read 16 bytes at once."""
    lengths = sorted(stride for stride, size in zip(tensor.stride(), tensor.shape) if size > 1)
    return (
        len(lengths) > 1
        and lengths[0] == 1
        and lengths[1] >= MIN_ALIGNED_ROW
        and lengths[1] * tensor.element_size() % 16 != 0
    )


def _flops(packet: Any, args: Any, kwargs: Any, result: Any) -> float:
    if packet.__name__ in EXPERTS:
        return 2.0 * float(args[0].numel() * result.shape[-1])
    count = flop_registry.get(packet)
    return float(count(*args, **kwargs, out_val=result)) if count else 0.0
