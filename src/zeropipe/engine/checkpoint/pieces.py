"""Tensors to files and back with torch's DCP: who writes which piece, and which pieces a rank needs.

DCP plans, and writes its usual files. Between its steps ranks talk over the engine's own connections, so that a rank
that fails or dies ends all of them. Reading needs no pickle: the index is the manifest's, each piece is checked
against its checksum and read by torch.load(weights_only=True).
"""

from __future__ import annotations

import io
import math
import pickle
from collections.abc import Iterable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.distributed.checkpoint import DefaultLoadPlanner, DefaultSavePlanner, FileSystemWriter
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import ReadItem, SavePlan

from zeropipe import __version__
from zeropipe.core.units import count_text
from zeropipe.engine.checkpoint.manifest import Piece, Saved, check_piece, checksum
from zeropipe.engine.checkpoint.saving import Progress
from zeropipe.errors import ConfigError


class Written(NamedTuple):
    """What a rank has written: its pieces, by the tensor's name, and DCP's own notes about them."""

    pieces: list[tuple[str, Piece]]
    results: bytes


def plan_save(state: Mapping[str, Tensor]) -> SavePlan:
    """What this rank could write."""
    planner = _planner(state)
    plan = planner.create_local_plan()
    return replace(plan, items=[item for item in plan.items if math.prod(item.tensor_data.chunk.sizes)])


def share_out(plans: list[SavePlan]) -> tuple[list[SavePlan], Metadata]:
    """Every piece is written by one rank. All ranks compute the same."""
    try:
        plans, metadata = DefaultSavePlanner(False, False).create_global_plan(plans)
    except (ValueError, AssertionError) as error:
        raise ConfigError(f"ranks hold pieces that do not make whole tensors: {str(error).splitlines()[0]}") from None
    return FileSystemWriter("unused").prepare_global_plan(plans), metadata


def _planner(state: Mapping[str, Tensor]) -> DefaultSavePlanner:
    planner = DefaultSavePlanner(flatten_state_dict=False, flatten_sharded_tensors=False)
    planner.set_up_planner(dict(state), is_coordinator=False)
    return planner


def write(folder: Path, plan: SavePlan, state: Mapping[str, Tensor], progress: Progress = lambda _: None) -> Written:
    """Write this rank's pieces, have them on the disk, and read them back for their checksums."""
    if not plan.items:
        return Written([], pickle.dumps([]))
    progress(f"writing {count_text(len(plan.items), 'tensor')}")
    folder.mkdir(parents=True, exist_ok=True)
    results = FileSystemWriter(folder, sync_files=True).write_data(plan, _planner(state)).wait()
    sizes = {item.index: item.tensor_data.chunk.sizes for item in plan.items}
    pieces = []
    for number, result in enumerate(results):
        progress(f"checking tensor {number + 1} of {len(results)}")
        place, index = result.storage_data, result.index
        crc = checksum(folder / place.relative_path, place.offset, place.length)
        pieces.append((
            index.fqn,
            Piece(tuple(index.offset or ()), tuple(sizes[index]), place.relative_path, place.offset, place.length, crc),
        ))  # fmt: skip
    return Written(pieces, pickle.dumps(results))


def finish(folder: Path, metadata: Metadata, written: Iterable[Written]) -> None:
    """DCP's own index, with which torch's dcp.load and others read the same files."""
    FileSystemWriter(folder, sync_files=True).finish(metadata, [pickle.loads(part.results) for part in written])


def file_sizes(folder: Path, written: Iterable[Written]) -> dict[str, int]:
    """Bytes of every file of a checkpoint."""
    names = {piece.file for part in written for _, piece in part.pieces} | {".metadata"}
    for name in names:
        if not (folder / name).exists():
            raise ConfigError(f"{name} of another rank is not in {folder}: give a folder that all ranks see")
    return {name: (folder / name).stat().st_size for name in sorted(names)}


def versions() -> dict[str, str]:
    """What wrote a checkpoint."""
    return {"zeropipe": __version__, "torch": torch.__version__}


def saved_tensors(metadata: Metadata, written: Iterable[Written]) -> dict[str, Saved]:
    """The manifest's index."""
    pieces: dict[str, list[Piece]] = {name: [] for name in metadata.state_dict_metadata}
    for part in written:
        for name, piece in part.pieces:
            pieces[name].append(piece)
    return {
        name: Saved(
            str(entry.properties.dtype).removeprefix("torch."),
            tuple(entry.size),
            tuple(sorted(pieces[name], key=lambda piece: piece.offsets)),
        )
        for name, entry in metadata.state_dict_metadata.items()
    }


class Reading:
    """The pieces that make this rank's part of some tensors, found before anything is changed."""

    def __init__(
        self,
        folder: Path,
        state: Mapping[str, Tensor],
        tensors: Mapping[str, Saved],
        progress: Progress = lambda _: None,
    ) -> None:
        self._folder, self._tensors, self._progress = folder, tensors, progress
        metadata = Metadata({name: _described(tensors[name]) for name in state})
        self._planner = DefaultLoadPlanner(flatten_state_dict=False, flatten_sharded_tensors=False)
        self._planner.set_up_planner(dict(state), metadata, False)
        items = [item for item in self._planner.create_local_plan().items if math.prod(item.lengths)]
        self._items = sorted(items, key=lambda item: (self._piece(item).file, self._piece(item).start))

    def _piece(self, item: ReadItem) -> Piece:
        return self._tensors[item.storage_index.fqn].pieces[item.storage_index.index or 0]

    def check(self) -> None:
        """ConfigError if the bytes are not those that were written."""
        for piece, name in {self._piece(item): item.storage_index.fqn for item in self._items}.items():
            self._progress(f"checking {name}")
            check_piece(self._folder, name, piece)

    @torch.no_grad()
    def run(self) -> None:
        """Read into the tensors."""
        last: Piece | None = None
        for item in self._items:
            if self._piece(item) is not last:
                last = self._piece(item)
                self._progress(f"reading {item.storage_index.fqn}")
                stored = _load(self._folder, last)
            part = stored
            for dimension, (offset, length) in enumerate(zip(item.storage_offsets, item.lengths)):
                part = part.narrow(dimension, offset, length)
            target = self._planner.resolve_tensor(item)
            target.detach().copy_(part)


def _described(saved: Saved) -> TensorStorageMetadata:
    chunks = [ChunkStorageMetadata(torch.Size(piece.offsets), torch.Size(piece.sizes)) for piece in saved.pieces]
    return TensorStorageMetadata(TensorProperties(dtype_of(saved)), torch.Size(saved.shape), chunks)


def dtype_of(saved: Saved) -> torch.dtype:
    """As torch knows it."""
    found = getattr(torch, saved.dtype, None)
    if not isinstance(found, torch.dtype):
        raise ConfigError(f"a tensor of dtype {saved.dtype}: this torch ({torch.__version__}) does not know it")
    return found


def _load(folder: Path, piece: Piece) -> Tensor:
    with (folder / piece.file).open("rb") as file:
        file.seek(piece.start)
        data = file.read(piece.num_bytes)
    try:
        found: Any = torch.load(io.BytesIO(data), map_location="cpu", weights_only=True)
    except (RuntimeError, pickle.UnpicklingError, EOFError, ValueError) as error:
        raise ConfigError(f"cannot read {folder / piece.file}: {str(error).splitlines()[0]}") from None
    if not isinstance(found, Tensor) or tuple(found.shape) != piece.sizes:
        raise ConfigError(f"{folder / piece.file} holds something else at byte {piece.start}: it is damaged")
    return found


def read_whole(folder: Path, name: str, saved: Saved) -> Tensor:
    """All of one tensor, on the CPU, checked."""
    made = torch.empty(saved.shape, dtype=dtype_of(saved))
    reading = Reading(folder, {name: made}, {name: saved})
    reading.check()
    reading.run()
    return made
