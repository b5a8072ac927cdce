"""OFFLOAD and RELOAD: what an F keeps for its backward is copied to the host, and back.

Only memory that nothing else uses is copied: weights, masks and other tensors that several microbatches share stay on
the device, and so does what another module refers to. Each storage is copied once, and tensors that are views of it are
views of the copy. A tensor that is modified after its F stays where it is, and its backward refuses it.
"""

from __future__ import annotations

import sys
import time
from collections import Counter, defaultdict, deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any, NamedTuple

import torch
from torch import Tensor

from zeropipe.engine.step.cell_runner import Cell
from zeropipe.engine.torch_private import autograd as torch_autograd
from zeropipe.engine.torch_private import tensors as torch_tensors
from zeropipe.engine.torch_private.saved import AnySlot, collect_saved, find_compiled

LEAST_BYTES = 1 << 12  # of a storage: copying less takes longer than it frees memory for
POLL_INTERVAL_S = 2e-5  # between questions whether copies have ended; launching an F takes longer

Copy = Callable[[], int]  # copies, and returns the bytes
WrapCopy = Callable[[Copy, Any], Copy]  # the second argument is the stream that it runs on


class View(NamedTuple):
    """A tensor as a view of its storage."""

    slot: AnySlot
    dtype: torch.dtype
    offset: int
    size: tuple[int, ...]
    stride: tuple[int, ...]


class HostBuffer:
    """Memory of the host, and when the last copy from it has ended."""

    def __init__(self, num_bytes: int, is_pinned: bool) -> None:
        self.data = torch.empty(num_bytes, dtype=torch.uint8, pin_memory=is_pinned)
        self.is_read: torch.cuda.Event | None = None

    @property
    def is_idle(self) -> bool:
        """Whether no copy from it runs."""
        return self.is_read is None or self.is_read.query()


class HostPool:
    """Host buffers for reuse: activations have the same sizes in every microbatch.

    A buffer from which a copy still runs is not reused, or the copies of both directions would wait for each other.
    """

    def __init__(self, is_pinned: bool) -> None:
        self._is_pinned, self._free = is_pinned, defaultdict[int, deque[HostBuffer]](deque)

    def take(self, num_bytes: int) -> HostBuffer:
        """A buffer of that size."""
        free = self._free[num_bytes]
        if free and free[0].is_idle:  # the one that was given back first
            return free.popleft()
        return HostBuffer(num_bytes, self._is_pinned)

    def give_back(self, buffer: HostBuffer) -> None:
        """Let others have a buffer."""
        self._free[len(buffer.data)].append(buffer)


class SavedTensors:
    """What the F of a cell keeps for its backward, and its copies on the host."""

    def __init__(self) -> None:
        self.slots: list[AnySlot] = []
        self.copies: list[tuple[HostBuffer, list[View]]] = []
        self.is_offloaded: torch.cuda.Event | None = None
        self.is_reloaded: torch.cuda.Event | None = None


class Offloader:
    """Copies what cells keep, on a CUDA stream for each direction; on the CPU at once."""

    def __init__(self, device: torch.device) -> None:
        self._device, self._pool = device, HostPool(device.type == "cuda")
        on_gpu = device.type == "cuda"
        self.to_host = torch.cuda.Stream(device) if on_gpu else None
        self.from_host = torch.cuda.Stream(device) if on_gpu else None
        self._saved: dict[tuple[int, int], SavedTensors] = {}
        self._pending: deque[tuple[torch.cuda.Event, list[Tensor]]] = deque()  # being copied, with their memory

    @contextmanager
    def collect(self, cell: Cell) -> Iterator[None]:
        """Around the F of a cell: find what it keeps."""
        self._wait_for_copies()
        saved = self._saved[cell.stage, cell.microbatch] = SavedTensors()
        with collect_saved(saved.slots):
            yield
        edges = cell.gradient_edges
        if cell.loss is not None and cell.loss.requires_grad:
            edges = [torch_autograd.gradient_edge(cell.loss)]
        saved.slots += find_compiled(edges)

    def offload(self, cell: Cell, wrap: WrapCopy) -> None:
        """OFFLOAD: start the copies to the host; the memory is free when they have ended."""
        saved = self._saved[cell.stage, cell.microbatch]
        groups = self._find_own_storages(saved, cell)
        saved.slots.clear()
        if self.to_host is not None:
            self.to_host.wait_stream(torch.cuda.current_stream(self._device))
        sources: list[Tensor] = []

        def copy() -> int:
            for slots in groups:
                storage = slots[0].tensor.untyped_storage()  # type: ignore[union-attr]
                buffer, source = self._pool.take(storage.nbytes()), _bytes_of(storage)
                buffer.data.copy_(source, non_blocking=True)
                saved.copies.append((buffer, [_view(slot) for slot in slots]))
                sources.append(source)
            return sum(len(source) for source in sources)

        self._run(copy, self.to_host, wrap)
        for _, views in saved.copies:
            for view in views:
                view.slot.tensor = None
        self._release_inputs(cell, sources)
        if self.to_host is not None:
            saved.is_offloaded = self.to_host.record_event()
            self._pending.append((saved.is_offloaded, sources))

    def reload(self, cell: Cell, wrap: WrapCopy) -> None:
        """RELOAD: allocate memory, and start the copies back."""
        self._free_copied()
        saved = self._saved[cell.stage, cell.microbatch]
        targets = [torch.empty_like(buffer.data, device=self._device) for buffer, _ in saved.copies]
        if self.from_host is not None and saved.is_offloaded is not None:
            self.from_host.wait_stream(torch.cuda.current_stream(self._device))
            self.from_host.wait_event(saved.is_offloaded)

        def copy() -> int:
            for target, (buffer, _) in zip(targets, saved.copies):
                target.copy_(buffer.data, non_blocking=True)
            return sum(map(len, targets))

        self._run(copy, self.from_host, wrap)
        if self.from_host is not None:
            saved.is_reloaded = self.from_host.record_event()
        for target, (buffer, views) in zip(targets, saved.copies):
            buffer.is_read = saved.is_reloaded
            self._pool.give_back(buffer)
            for view in views:
                copied = torch.empty(0, dtype=view.dtype, device=self._device)
                with torch.no_grad():
                    copied.set_(target.untyped_storage(), view.offset, view.size, view.stride)
                view.slot.set_copy(copied)
        saved.copies.clear()

    def wait(self, cell: Cell) -> None:
        """Before the backward of a cell: wait until its RELOAD has ended."""
        self._free_copied()
        saved = self._saved.pop((cell.stage, cell.microbatch))
        if saved.is_reloaded is not None:
            torch.cuda.current_stream(self._device).wait_event(saved.is_reloaded)

    def clear(self) -> None:
        """Release what a step that failed has left."""
        self._saved.clear()
        self._pending.clear()

    def _run(self, copy: Copy, stream: torch.cuda.Stream | None, wrap: WrapCopy) -> None:
        with torch.no_grad(), nullcontext() if stream is None else torch.cuda.stream(stream):
            wrap(copy, stream)()

    def _find_own_storages(self, saved: SavedTensors, cell: Cell) -> list[list[AnySlot]]:
        """The slots of each storage that nothing but this cell uses."""
        groups: dict[int, list[AnySlot]] = defaultdict(list)
        for slot in saved.slots:
            if slot.tensor is not None and _is_plain(slot.tensor, self._device) and not slot.is_modified:
                groups[torch_tensors.memory_of(slot.tensor)].append(slot)
        inputs = Counter(map(torch_tensors.memory_of, cell.inputs))
        return [slots for memory, slots in groups.items() if _is_own(slots, inputs[memory])]

    def _release_inputs(self, cell: Cell, sources: list[Tensor]) -> None:
        """Free the values of a cell's inputs that are on the host: a backward needs only their shapes."""
        copied = {torch_tensors.memory_of(source) for source in sources}
        for x in cell.inputs:
            if type(x) is Tensor and torch_tensors.memory_of(x) in copied:
                x.data = x.new_empty(()).expand(x.shape)

    def _wait_for_copies(self) -> None:
        """Wait until the F that comes next may be issued, and free what is on the host.

        Memory is allocated when an action is issued. An F is issued when all copies to the host have ended, or the
        device has ended all actions before it: else it would allocate its memory before that of the copies is free.
        """
        self._free_copied()
        if self._pending:
            issued = torch.cuda.current_stream(self._device).record_event()
            while self._pending and not issued.query():
                time.sleep(POLL_INTERVAL_S)
                self._free_copied()
            self._free_copied()

    def _free_copied(self) -> None:
        while self._pending and self._pending[0][0].query():
            self._pending.popleft()


def _is_own(slots: Sequence[AnySlot], num_inputs: int) -> bool:
    """Whether the tensors of these slots, and that many inputs, are all that use their memory, and it is large."""
    uses = Counter(id(slot.tensor) for slot in slots)
    # without the reference by which it is passed: a tensor that needs no gradient is saved itself, not an alias of it
    if any(sys.getrefcount(slot.tensor) - 1 > uses[id(slot.tensor)] for slot in slots):
        return False
    tensor = slots[0].tensor
    assert tensor is not None
    is_large = tensor.untyped_storage().nbytes() >= LEAST_BYTES
    return is_large and torch_tensors.num_aliases(tensor) == len(uses) + num_inputs


def _is_plain(tensor: Tensor, device: torch.device) -> bool:
    """Whether a tensor is a dense view of memory on the device."""
    return (
        type(tensor) is Tensor
        and tensor.layout is torch.strided
        and tensor.device.type == device.type
        and not (tensor.is_conj() or tensor.is_neg())
        and torch_tensors.has_memory(tensor)
    )


def _bytes_of(storage: torch.UntypedStorage) -> Tensor:
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)


def _view(slot: AnySlot) -> View:
    tensor = slot.tensor
    assert tensor is not None
    return View(slot, tensor.dtype, tensor.storage_offset(), tuple(tensor.shape), tensor.stride())
