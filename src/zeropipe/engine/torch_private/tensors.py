"""Private calls of torch on tensors: memory, DTensor, nested values, sums over lists."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

PIECE = 1 << 16  # numbers that are added up at once on the CPU


def wake_gpu() -> None:
    """Make torch's state of the GPU, if there is one."""
    if torch.cuda.is_available():
        torch.cuda.init()


def like(parameter: Any, piece: Tensor) -> Tensor:
    """A DTensor spread as `parameter` is, of which this process has `piece`."""
    from torch.distributed.tensor import DTensor

    spread: Any = DTensor.from_local(
        piece, parameter.device_mesh, parameter.placements, run_check=False, shape=parameter.shape,
        stride=parameter.stride(),
    )  # fmt: skip
    spread._local_tensor = piece  # not the view that torch made of it: as `is_shared` sees it, that has two holders
    return spread


def linear_placements(x: Any, weight: Any, has_bias: bool) -> tuple[list[Any], list[Any]] | None:
    """How a product of pieces is spread, if it is one: the input's gradient, and the output.

    A weight spread by its rows with a whole input; or by its columns, with an input that is spread alike.
    """
    from torch.distributed.tensor import Partial, Replicate, Shard

    if x.device_mesh != weight.device_mesh or len(weight.placements) != 1:
        return None
    (rows,), (columns,) = weight.placements, x.placements
    if any(size % weight.device_mesh.size() for size in weight.shape):  # the last process has a smaller piece
        return None
    if rows == Shard(0) and columns == Replicate():
        return [Partial()], [Shard(x.dim() - 1)]
    if rows == Shard(1) and columns == Shard(x.dim() - 1) and not has_bias:  # a bias would be added by every process
        return [columns], [Partial()]
    return None


def from_local(piece: Tensor, mesh: Any, placements: Sequence[Any]) -> Tensor:
    """The tensor of which every process of `mesh` has a piece."""
    from torch.distributed.tensor import DTensor

    return DTensor.from_local(piece, mesh, placements, run_check=False)


def tensors_in(value: Any) -> Iterator[Tensor]:
    """The tensors of a nested value."""
    return (leaf for leaf in torch.utils._pytree.tree_leaves(value) if isinstance(leaf, Tensor))


def mapped(function: Callable[[Tensor], Tensor], value: Any) -> Any:
    """A nested value with other tensors in it."""
    return torch.utils._pytree.tree_map(lambda leaf: function(leaf) if isinstance(leaf, Tensor) else leaf, value)


def settled(tensor: Tensor) -> Tensor:
    """A plain tensor; one that a collective is still working on is waited for."""
    from torch.distributed._functional_collectives import AsyncCollectiveTensor

    return tensor.trigger_wait() if isinstance(tensor, AsyncCollectiveTensor) else tensor


def require_on_device(condition: Tensor, text: str) -> None:
    """IndexError if a condition does not hold; a GPU tells it later, by an assertion, so that nobody waits for it."""
    if condition.is_cuda:
        torch._assert_async(condition, text)
    elif not bool(condition):
        raise IndexError(text)


def squared_norm(tensors: Sequence[Tensor]) -> float:
    """The sum of all squares, in float64.

    On a GPU 16-bit tensors' norms are in float32, which float16 would overflow. torch's norm on the CPU adds up in
    float32 one by one, and is 12% off for 50 million numbers: there, products of short pieces in float64 are added.
    """
    tensors = [torch.view_as_real(t) if t.is_complex() else t for t in tensors]
    on_cpu = [piece for t in tensors if t.is_cpu for piece in t.reshape(-1).split(PIECE)]
    total = sum((float(torch.dot(wide, wide)) for wide in map(Tensor.double, on_cpu)), 0.0)
    others = [t for t in tensors if not t.is_cpu]
    norms: list[Tensor] = []
    if halves := [t for t in others if t.dtype in (torch.float16, torch.bfloat16)]:
        norms += torch._foreach_norm(halves, 2, dtype=torch.float32)
    if wides := [t for t in others if t.dtype not in (torch.float16, torch.bfloat16)]:
        norms += torch._foreach_norm(wides, 2)
    return total + (float(torch.stack([norm.double() for norm in norms]).square().sum()) if norms else 0.0)


def multiply(tensors: Sequence[Tensor], factor: float) -> None:
    """Scale tensors in place."""
    torch._foreach_mul_(list(tensors), factor)


def divide(tensors: Sequence[Tensor], number: float) -> None:
    """Divide tensors in place."""
    torch._foreach_div_(list(tensors), number)


def num_aliases(tensor: Tensor) -> int:
    """The number of tensors that share the memory of `tensor`, itself included.

    Counted by the storage, so views without a common version counter are seen, too: those that compiled code makes.
    """
    return torch._C._storage_Use_Count(tensor.untyped_storage()._cdata) - 1  # the storage object made here has one


def has_memory(tensor: Tensor) -> bool:
    """Whether the memory of a tensor is there: FSDP frees that of whole weights, whoever shares it."""
    return tensor.untyped_storage().nbytes() > 0 or tensor.numel() == 0


def is_shared(tensor: Any) -> bool:
    """Whether another tensor has the memory of a dense tensor, too; of a DTensor, that of this process's piece."""
    piece = settled(getattr(tensor, "_local_tensor", tensor))  # to_local() may make another alias
    return piece.layout is torch.strided and num_aliases(piece) > 1


def version(tensor: Tensor) -> int:
    """A number that grows with every in-place write to a tensor."""
    return tensor._version


def sum_versions(tensors: Iterable[Tensor]) -> int:
    """A number that grows with every write in place to one of the tensors; those made in inference mode count none."""
    return sum(tensor._version for tensor in tensors if not tensor.is_inference())


def owned(tensor: Tensor) -> Tensor:
    """The same values as no view: what an autograd function returns as a view may not be changed in place."""
    return torch.ops.aten._unsafe_view(tensor, tensor.shape) if tensor._is_view() else tensor


class Allocations:
    """How much memory was alive on a GPU during some time, without touching the allocator's own peaks.

    From the allocator's history of its events. Where the caller records one already, that one is read.
    """

    def __init__(self, device: torch.device) -> None:
        self._device, self._ours = device, False

    def begin(self) -> None:
        """Record from here on; what was recorded before is forgotten, if it was ours."""
        if self._ours or not torch._C._cuda_isHistoryEnabled():
            torch.cuda.memory._record_memory_history(None)
            torch.cuda.memory._record_memory_history("all", context=None, max_entries=2_000_000)
            self._ours = True

    def mark(self) -> tuple[int, int]:
        """A moment: the number of events so far, and the bytes alive now."""
        stats = torch._C._cuda_memoryStats(self._device.index)
        number = stats["allocation"]["all"]
        return number["allocated"] + number["freed"], stats["allocated_bytes"]["all"]["current"]

    def end(self, spans: Sequence[tuple[int, int]]) -> list[int]:
        """The most bytes that were alive between two moments, for each span of event numbers."""
        last, now = self.mark()
        trace = torch.cuda.memory._snapshot(self._device)["device_traces"][self._device.index]
        if self._ours:
            torch.cuda.memory._record_memory_history(None)
            self._ours = False
        changes = [e["size"] if e["action"] == "alloc" else -e["size"] for e in trace if e["action"] in _CHANGES]
        levels = list(itertools.accumulate(changes, initial=0))
        first, ground = last - len(changes), now - levels[-1]
        return [
            ground + max(levels[max(0, begin - first) : max(0, end - first) + 1], default=0) for begin, end in spans
        ]


_CHANGES = ("alloc", "free_requested")


def storage_id(storage: torch.UntypedStorage) -> int:
    """What tells storages apart; unlike the address of their data it stays when they are resized."""
    return storage._cdata


def memory_of(tensor: Any) -> int:
    """What tells the memory of tensors apart; of a DTensor, that of this process's piece. 0: it has none of its own."""
    try:
        return storage_id(getattr(tensor, "_local_tensor", tensor).untyped_storage())
    except (NotImplementedError, RuntimeError):  # a sparse tensor
        return 0
