"""Broadcast of any value from one rank to all ranks of its pipeline.

Tensors travel in chunks, so no rank needs memory for more than what it receives.
"""

from __future__ import annotations

import io
import pickle
from typing import Any

import torch
from torch import Tensor, nn

from zeropipe.engine.comm.communicator import Communicator
from zeropipe.engine.comm.messages import make_sendable

CHUNK_BYTES = 8 * 2**20


def broadcast_value(comm: Communicator, value: Any, root: int, device: torch.device) -> Any:
    """The value of pipeline rank `root`, on all ranks of its pipeline; received tensors are on `device`.

    All ranks of the pipeline call this.
    """
    if comm.layout.pipeline_rank != root:
        size = int(_broadcast_chunk(comm, torch.zeros(1, dtype=torch.int64, device="cpu"), root))
        data = _broadcast_tensor(comm, torch.empty(size, dtype=torch.uint8, device="cpu"), root)
        return _Unpickler(comm, root, device, data).load()
    pickler = _Pickler()
    pickler.dump(value)
    data = torch.frombuffer(pickler.stream.getbuffer(), dtype=torch.uint8)
    _broadcast_chunk(comm, torch.tensor([data.numel()], device="cpu"), root)
    _broadcast_tensor(comm, data, root)
    for tensor in pickler.tensors:
        _broadcast_tensor(comm, _as_bytes(tensor), root)
    return value


class _Pickler(pickle.Pickler):
    """Pickles everything but tensors, which it collects in the order in which they occur."""

    def __init__(self) -> None:
        self.stream = io.BytesIO()
        super().__init__(self.stream)
        self.tensors: list[Tensor] = []
        self._index_of: dict[int, int] = {}

    def persistent_id(self, item: Any) -> Any:
        """The index, dtype and shape of a tensor; None for anything else."""
        if (
            type(item) not in (Tensor, nn.Parameter)
            or item.layout != torch.strided
            or item.is_quantized
            or item.is_meta
        ):
            return None  # pickled by its own class
        if id(item) not in self._index_of:
            self._index_of[id(item)] = len(self.tensors)
            self.tensors.append(item.detach())
        return self._index_of[id(item)], item.dtype, tuple(item.shape)


class _Unpickler(pickle.Unpickler):
    """Receives each tensor when it first occurs."""

    def __init__(self, comm: Communicator, root: int, device: torch.device, data: Tensor) -> None:
        super().__init__(io.BytesIO(memoryview(data.numpy())))
        self._comm, self._root, self._device = comm, root, device
        self._received: dict[int, Tensor] = {}

    def persistent_load(self, name: Any) -> Tensor:
        index, dtype, shape = name
        if index not in self._received:
            self._received[index] = torch.empty(shape, dtype=dtype, device=self._device)
            _broadcast_tensor(self._comm, _as_bytes(self._received[index]), self._root)
        return self._received[index]


def _as_bytes(tensor: Tensor) -> Tensor:
    return make_sendable(tensor).reshape(-1).view(torch.uint8)


def _broadcast_tensor(comm: Communicator, data: Tensor, root: int) -> Tensor:
    """Broadcast a flat tensor into that of every rank."""
    is_root = comm.layout.pipeline_rank == root
    for chunk in data.split(CHUNK_BYTES):
        if chunk.device.type == "cpu":
            _broadcast_chunk(comm, chunk, root)
        else:
            received = _broadcast_chunk(comm, chunk.cpu() if is_root else torch.empty_like(chunk, device="cpu"), root)
            if not is_root:
                chunk.copy_(received)
    return data


def _broadcast_chunk(comm: Communicator, tensor: Tensor, root: int) -> Tensor:
    if tensor.numel():
        comm.broadcast(tensor, root)
    return tensor
