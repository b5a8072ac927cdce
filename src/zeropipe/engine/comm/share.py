"""One rank's value for all ranks of its pipeline.

Tensors travel piece by piece, so nobody needs memory for more than what it gets.
"""

from __future__ import annotations

import io
import pickle
from typing import Any

import torch
from torch import Tensor, nn

from zeropipe.engine.comm.edges import as_sent
from zeropipe.engine.comm.fabric import Fabric

PIECE = 8 * 2**20  # bytes that travel together


def share(fabric: Fabric, value: Any, root: int, device: torch.device) -> Any:
    """The root's value, on all ranks of its pipeline; the others' tensors are on `device`. Every rank calls this.

    `root` is a place in the pipeline.
    """
    if fabric.layout.pipeline_rank != root:
        size = int(_piece(fabric, torch.zeros(1, dtype=torch.int64, device="cpu"), root))
        data = _bytes(fabric, torch.empty(size, dtype=torch.uint8, device="cpu"), root)
        return _Reader(fabric, root, device, data).load()
    writer = _Writer()
    writer.dump(value)
    data = torch.frombuffer(writer.stream.getbuffer(), dtype=torch.uint8)
    _piece(fabric, torch.tensor([data.numel()], device="cpu"), root)
    _bytes(fabric, data, root)
    for tensor in writer.tensors:
        _bytes(fabric, _as_bytes(tensor), root)
    return value


class _Writer(pickle.Pickler):
    """Pickles everything but tensors, which it keeps in the order in which they are met."""

    def __init__(self) -> None:
        self.stream = io.BytesIO()
        super().__init__(self.stream)
        self.tensors: list[Tensor] = []
        self._numbers: dict[int, int] = {}

    def persistent_id(self, item: Any) -> Any:
        """What stands for a tensor; None for anything else."""
        if (
            type(item) not in (Tensor, nn.Parameter)
            or item.layout != torch.strided
            or item.is_quantized
            or item.is_meta
        ):
            return None  # rare kinds know themselves how to be pickled
        if id(item) not in self._numbers:
            self._numbers[id(item)] = len(self.tensors)
            self.tensors.append(item.detach())
        return self._numbers[id(item)], item.dtype, tuple(item.shape)


class _Reader(pickle.Unpickler):
    """The other side: takes each tensor when it comes to it."""

    def __init__(self, fabric: Fabric, root: int, device: torch.device, data: Tensor) -> None:
        super().__init__(io.BytesIO(memoryview(data.numpy())))
        self._fabric, self._root, self._device = fabric, root, device
        self._taken: dict[int, Tensor] = {}

    def persistent_load(self, name: Any) -> Tensor:
        """The tensor that was met there."""
        number, dtype, shape = name
        if number not in self._taken:
            self._taken[number] = torch.empty(shape, dtype=dtype, device=self._device)
            _bytes(self._fabric, _as_bytes(self._taken[number]), self._root)
        return self._taken[number]


def _as_bytes(tensor: Tensor) -> Tensor:
    return as_sent(tensor).reshape(-1).view(torch.uint8)


def _bytes(fabric: Fabric, data: Tensor, root: int) -> Tensor:
    """The root's bytes in everybody's tensor."""
    for some in data.split(PIECE):
        if some.device.type == "cpu":
            _piece(fabric, some, root)
        else:
            mine = some.cpu() if fabric.layout.pipeline_rank == root else torch.empty_like(some, device="cpu")
            passed = _piece(fabric, mine, root)
            if fabric.layout.pipeline_rank != root:
                some.copy_(passed)
    return data


def _piece(fabric: Fabric, tensor: Tensor, root: int) -> Tensor:
    if tensor.numel():
        fabric.broadcast(tensor, root)
    return tensor
