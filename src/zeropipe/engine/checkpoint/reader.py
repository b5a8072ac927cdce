"""Shards from files into tensors of any layout.

No pickle is read: the index is the manifest's, and each shard is checked against its checksum and read by
torch.load(weights_only=True).
"""

from __future__ import annotations

import io
import math
import pickle
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint import DefaultLoadPlanner
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import ReadItem

from zeropipe.engine.checkpoint.manifest import ShardEntry, TensorEntry, verify_shard
from zeropipe.errors import ConfigError, first_line


class ShardReader:
    """Reads saved tensors into this rank's shards of them, after `verify` has checked the files."""

    def __init__(
        self,
        folder: Path,
        targets: Mapping[str, Tensor],
        saved: Mapping[str, TensorEntry],
        report_progress: Callable[[str], None] = lambda _: None,
    ) -> None:
        self._folder, self._saved, self._report_progress = folder, saved, report_progress
        metadata = Metadata({name: _to_metadata(saved[name]) for name in targets})
        self._planner = DefaultLoadPlanner(flatten_state_dict=False, flatten_sharded_tensors=False)
        self._planner.set_up_planner(dict(targets), metadata, False)
        items = [item for item in self._planner.create_local_plan().items if math.prod(item.lengths)]
        self._items = sorted(items, key=lambda item: (self._find_shard(item).file, self._find_shard(item).start))

    def _find_shard(self, item: ReadItem) -> ShardEntry:
        return self._saved[item.storage_index.fqn].shards[item.storage_index.index or 0]

    def verify(self) -> None:
        """ConfigError if the bytes that will be read are not those that were written."""
        for shard, name in {self._find_shard(item): item.storage_index.fqn for item in self._items}.items():
            self._report_progress(f"checking {name}")
            verify_shard(self._folder, name, shard)

    @torch.no_grad()
    def read(self) -> None:
        """Copy the saved values into the targets."""
        last: ShardEntry | None = None
        for item in self._items:
            if self._find_shard(item) is not last:
                last = self._find_shard(item)
                self._report_progress(f"reading {item.storage_index.fqn}")
                stored = _load_shard(self._folder, last)
            box = stored
            for dimension, (offset, length) in enumerate(zip(item.storage_offsets, item.lengths)):
                box = box.narrow(dimension, offset, length)
            self._planner.resolve_tensor(item).detach().copy_(box)


def read_full_tensor(folder: Path, name: str, saved: TensorEntry) -> Tensor:
    """Verify and read all shards of one tensor, on the CPU."""
    tensor = torch.empty(saved.shape, dtype=to_dtype(saved))
    reader = ShardReader(folder, {name: tensor}, {name: saved})
    reader.verify()
    reader.read()
    return tensor


def to_dtype(saved: TensorEntry) -> torch.dtype:
    """The torch.dtype of a saved tensor; ConfigError if this version of torch does not have it."""
    dtype = getattr(torch, saved.dtype, None)
    if not isinstance(dtype, torch.dtype):
        raise ConfigError(f"a tensor has dtype {saved.dtype}, which torch {torch.__version__} does not have")
    return dtype


def _to_metadata(saved: TensorEntry) -> TensorStorageMetadata:
    chunks = [ChunkStorageMetadata(torch.Size(shard.offsets), torch.Size(shard.sizes)) for shard in saved.shards]
    return TensorStorageMetadata(TensorProperties(to_dtype(saved)), torch.Size(saved.shape), chunks)


def _load_shard(folder: Path, shard: ShardEntry) -> Tensor:
    file = folder / shard.file
    with file.open("rb") as opened:
        opened.seek(shard.start)
        data = opened.read(shard.num_bytes)
    try:
        tensor: Any = torch.load(io.BytesIO(data), map_location="cpu", weights_only=True)
    except (RuntimeError, pickle.UnpicklingError, EOFError, ValueError) as error:
        raise ConfigError(f"cannot read {file}: {first_line(error)}") from None
    if not isinstance(tensor, Tensor) or tuple(tensor.shape) != shard.sizes:
        raise ConfigError(f"{file} is damaged: byte {shard.start} does not begin a tensor of shape {shard.sizes}")
    return tensor
