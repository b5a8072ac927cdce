"""Private calls of torch on tensors: memory, DTensor, nested values, sums over lists."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

BLOCK = 1 << 16  # elements that are summed at a time on the CPU


def init_gpu() -> None:
    """Initialize torch's state of the GPU, if there is one."""
    if torch.cuda.is_available():
        torch.cuda.init()


def sharded_like(parameter: Any, shard: Tensor) -> Tensor:
    """A DTensor with the layout of `parameter`, of which this process has `shard`."""
    from torch.distributed.tensor import DTensor

    tensor: Any = DTensor.from_local(
        shard, parameter.device_mesh, parameter.placements, run_check=False, shape=parameter.shape,
        stride=parameter.stride(),
    )  # fmt: skip
    tensor._local_tensor = shard  # not torch's view of it, by which `is_shared` would count two tensors
    return tensor


def linear_placements(x: Any, weight: Any, has_bias: bool) -> tuple[list[Any], list[Any]] | None:
    """The placements of a linear layer's input gradient and output; None if it is not one product of local shards.

    It is one for a weight sharded over its rows and a full input, and for a weight and an input that are both sharded
    over their columns.
    """
    from torch.distributed.tensor import Partial, Replicate, Shard

    if x.device_mesh != weight.device_mesh or len(weight.placements) != 1:
        return None
    (rows,), (columns,) = weight.placements, x.placements
    if any(size % weight.device_mesh.size() for size in weight.shape):  # the last process has a smaller shard
        return None
    if rows == Shard(0) and columns == Replicate():
        return [Partial()], [Shard(x.dim() - 1)]
    if rows == Shard(1) and columns == Shard(x.dim() - 1) and not has_bias:  # a bias would be added by every process
        return [columns], [Partial()]
    return None


def from_local(shard: Tensor, mesh: Any, placements: Sequence[Any]) -> Tensor:
    """The DTensor of which every process of `mesh` has a shard."""
    from torch.distributed.tensor import DTensor

    return DTensor.from_local(shard, mesh, placements, run_check=False)


def tensors_in(value: Any) -> Iterator[Tensor]:
    """The tensors of a nested value."""
    return (leaf for leaf in torch.utils._pytree.tree_leaves(value) if isinstance(leaf, Tensor))


def map_tensors(function: Callable[[Tensor], Tensor], value: Any) -> Any:
    """Apply a function to the tensors of a nested value."""
    return torch.utils._pytree.tree_map(lambda leaf: function(leaf) if isinstance(leaf, Tensor) else leaf, value)


def wait_for(tensor: Tensor) -> Tensor:
    """Wait for the collective that computes a tensor, if there is one; returns a plain tensor."""
    from torch.distributed._functional_collectives import AsyncCollectiveTensor

    return tensor.trigger_wait() if isinstance(tensor, AsyncCollectiveTensor) else tensor


def require_on_device(condition: Tensor, text: str) -> None:
    """IndexError unless a condition holds; on a GPU an assertion that fails later, so that the host need not wait."""
    if condition.is_cuda:
        torch._assert_async(condition, text)
    elif not bool(condition):
        raise IndexError(text)


def squared_norm(tensors: Sequence[Tensor]) -> float:
    """The sum of all squares, in float64.

    On a GPU the norms of 16-bit tensors are computed in float32, because float16 would overflow. On the CPU torch sums
    in float32 one by one, with an error of 12% for 50 million numbers: there, float64 sums of blocks are added.
    """
    tensors = [torch.view_as_real(t) if t.is_complex() else t for t in tensors]
    on_cpu = [block for t in tensors if t.is_cpu for block in t.reshape(-1).split(BLOCK)]
    total = sum((float(torch.dot(wide, wide)) for wide in map(Tensor.double, on_cpu)), 0.0)
    others = [t for t in tensors if not t.is_cpu]
    norms: list[Tensor] = []  # of all tensors of a kind
    if halves := [t for t in others if t.dtype in (torch.float16, torch.bfloat16)]:
        norms.append(torch.stack(torch._foreach_norm(halves, 2, dtype=torch.float32)))
    for dtype in (torch.float32, torch.float64):
        if wides := [t for t in others if t.dtype == dtype]:
            norms.append(torch.stack(torch._foreach_norm(wides, 2)))
    return total + (float(torch.cat([each.double() for each in norms]).square().sum()) if norms else 0.0)


def multiply(tensors: Sequence[Tensor], factor: float) -> None:
    """Scale tensors in place."""
    torch._foreach_mul_(list(tensors), factor)


def divide(tensors: Sequence[Tensor], number: float) -> None:
    """Divide tensors in place."""
    torch._foreach_div_(list(tensors), number)


def add(pairs: Sequence[tuple[Tensor, Tensor]]) -> None:
    """Add to the first tensor of each pair the second, in a few kernels for each device and pair of dtypes."""
    for group in _group_pairs(pairs):
        sums, others = [total for total, _ in group], [other for _, other in group]
        if sums[0].dtype != others[0].dtype:  # torch adds tensors of two dtypes one by one
            others = _cast(others, sums[0].dtype)
        torch._foreach_add_(sums, others)


def copy(pairs: Sequence[tuple[Tensor, Tensor]]) -> None:
    """Copy to the first tensor of each pair the second, in a few kernels for each device and pair of dtypes."""
    for group in _group_pairs(pairs):
        torch._foreach_copy_([target for target, _ in group], [source for _, source in group])


def _group_pairs(pairs: Sequence[tuple[Tensor, Tensor]]) -> Iterable[list[tuple[Tensor, Tensor]]]:
    """The pairs by device and dtypes."""
    groups: dict[tuple[Any, ...], list[tuple[Tensor, Tensor]]] = {}
    for one, other in pairs:
        groups.setdefault((one.device, one.dtype, other.device, other.dtype), []).append((one, other))
    return groups.values()


def _cast(tensors: Sequence[Tensor], dtype: torch.dtype) -> list[Tensor]:
    """The tensors in another dtype, in memory that they share."""
    memory = tensors[0].new_empty(sum(tensor.numel() for tensor in tensors), dtype=dtype)
    parts = [part.view(tensor.shape) for part, tensor in zip(memory.split([t.numel() for t in tensors]), tensors)]
    torch._foreach_copy_(parts, list(tensors))
    return parts


def num_aliases(tensor: Tensor) -> int:
    """The number of tensors that share the memory of `tensor`, itself included.

    The storage counts them, so views without a common version counter, which compiled code creates, are included.
    """
    return torch._C._storage_Use_Count(tensor.untyped_storage()._cdata) - 1  # without the one created here


def has_memory(tensor: Tensor) -> bool:
    """Whether a tensor has its memory: FSDP frees the memory of unsharded weights, also if other tensors share it."""
    return tensor.untyped_storage().nbytes() > 0 or tensor.numel() == 0


def is_shared(tensor: Any) -> bool:
    """Whether another tensor shares the memory of a dense tensor, or of the local shard of a DTensor."""
    shard = wait_for(getattr(tensor, "_local_tensor", tensor))  # to_local() may create another alias
    return shard.layout is torch.strided and num_aliases(shard) > 1


def version(tensor: Tensor) -> int:
    """A number that grows with every in-place write to a tensor."""
    return tensor._version


def sum_versions(tensors: Iterable[Tensor]) -> int:
    """A number that grows with every in-place write to one of the tensors, except those created in inference mode."""
    return sum(tensor._version for tensor in tensors if not tensor.is_inference())


def not_a_view(tensor: Tensor) -> Tensor:
    """The same tensor, not as a view: a view that an autograd function returns must not be modified in place."""
    return torch.ops.aten._unsafe_view(tensor, tensor.shape) if tensor._is_view() else tensor


class Allocations:
    """Measures peaks of allocated GPU memory without resetting the allocator's own peak statistics.

    It reads the allocator's history of events, that of the caller if the caller records one.
    """

    def __init__(self, device: torch.device) -> None:
        self._device, self._ours = device, False

    def begin(self) -> None:
        """Start recording; an earlier recording of this object is deleted."""
        if self._ours or not torch._C._cuda_isHistoryEnabled():
            torch.cuda.memory._record_memory_history(None)
            torch.cuda.memory._record_memory_history("all", context=None, max_entries=2_000_000)
            self._ours = True

    def mark(self) -> tuple[int, int]:
        """A point in time: the number of events so far, and the bytes allocated now."""
        stats = torch._C._cuda_memoryStats(self._device.index)
        number = stats["allocation"]["all"]
        return number["allocated"] + number["freed"], stats["allocated_bytes"]["all"]["current"]

    def end(self, spans: Sequence[tuple[int, int]]) -> list[int]:
        """The peak of allocated bytes in each span of event numbers."""
        last, now = self.mark()
        trace = torch.cuda.memory._snapshot(self._device)["device_traces"][self._device.index]
        if self._ours:
            torch.cuda.memory._record_memory_history(None)
            self._ours = False
        changes = [e["size"] if e["action"] == "alloc" else -e["size"] for e in trace if e["action"] in _CHANGES]
        levels = list(itertools.accumulate(changes, initial=0))
        first, base = last - len(changes), now - levels[-1]
        return [base + max(levels[max(0, begin - first) : max(0, end - first) + 1], default=0) for begin, end in spans]


_CHANGES = ("alloc", "free_requested")


def storage_id(storage: torch.UntypedStorage) -> int:
    """The identity of a storage, which unlike the address of its data stays the same when it is resized."""
    return storage._cdata


def memory_of(tensor: Any) -> int:
    """The identity of the memory of a tensor, or of the local shard of a DTensor; 0 without memory of its own."""
    try:
        return storage_id(getattr(tensor, "_local_tensor", tensor).untyped_storage())
    except (NotImplementedError, RuntimeError):  # a sparse tensor
        return 0
