"""Shards to files with torch's DCP, and the folder of a checkpoint that is being written.

DCP plans which rank writes which shard, and writes its usual files. Between its steps the ranks communicate over the
engine's own connections, so a rank that fails or dies ends the save on all of them.
"""

from __future__ import annotations

import json
import math
import pickle
import re
import shutil
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple
from uuid import uuid4

import torch
from torch import Tensor
from torch.distributed.checkpoint import DefaultSavePlanner, FileSystemWriter
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.planner import SavePlan

from zeropipe import __version__
from zeropipe.core.files import sync_to_disk, write_whole
from zeropipe.engine.checkpoint.manifest import (
    DATA_FOLDER,
    MANIFEST_FILE,
    Manifest,
    ShardEntry,
    TensorEntry,
    check_files,
    compute_crc32,
)
from zeropipe.errors import ConfigError, first_line

ReportProgress = Callable[[str], None]
_TEMPORARY_FILE = re.compile(r"\.checkpoint\.[0-9a-f]+\.json")


class FolderError(ConfigError):
    """The folder of a checkpoint cannot be created or written to; unlike other errors this may be temporary."""


class WrittenShards(NamedTuple):
    """The shards that a rank has written, each with its tensor's name, and DCP's own results."""

    shards: list[tuple[str, ShardEntry]]
    results: bytes


def describe_versions() -> dict[str, str]:
    """The versions that write a checkpoint."""
    return {"zeropipe": __version__, "torch": torch.__version__}


def plan_local(tensors: Mapping[str, Tensor]) -> SavePlan:
    """All shards that this rank could write."""
    plan = _create_planner(tensors).create_local_plan()
    return replace(plan, items=[item for item in plan.items if math.prod(item.tensor_data.chunk.sizes)])


def plan_global(plans: list[SavePlan]) -> tuple[list[SavePlan], Metadata]:
    """Assign every shard to one rank that writes it, the same on all ranks; ConfigError if shards are missing."""
    try:
        plans, metadata = DefaultSavePlanner(False, False).create_global_plan(plans)
    except (ValueError, AssertionError) as error:
        raise ConfigError(f"the shards of all ranks do not make full tensors: {first_line(error)}") from None
    return FileSystemWriter("unused").prepare_global_plan(plans), metadata


def _create_planner(tensors: Mapping[str, Tensor]) -> DefaultSavePlanner:
    planner = DefaultSavePlanner(flatten_state_dict=False, flatten_sharded_tensors=False)
    planner.set_up_planner(dict(tensors), is_coordinator=False)
    return planner


def write_shards(
    folder: Path, plan: SavePlan, tensors: Mapping[str, Tensor], report_progress: ReportProgress = lambda _: None
) -> WrittenShards:
    """Write the shards of this rank, sync them to the disk, and read them back for their checksums."""
    if not plan.items:
        return WrittenShards([], pickle.dumps([]))
    report_progress(f"writing {len(plan.items)} tensors")
    folder.mkdir(parents=True, exist_ok=True)
    results = FileSystemWriter(folder, sync_files=True).write_data(plan, _create_planner(tensors)).wait()
    sizes = {item.index: item.tensor_data.chunk.sizes for item in plan.items}
    shards = []
    for number, result in enumerate(results):
        report_progress(f"checking tensor {number + 1} of {len(results)}")
        index, stored = result.index, result.storage_data
        file, start, length = stored.relative_path, stored.offset, stored.length
        crc = compute_crc32(folder / file, start, length)
        shards.append((index.fqn, ShardEntry(tuple(index.offset or ()), tuple(sizes[index]), file, start, length, crc)))
    return WrittenShards(shards, pickle.dumps(results))


class StagedCheckpoint:
    """A checkpoint that is being written into a data folder of its own; no reader sees it until `commit`."""

    def __init__(self, path: Path, token: str) -> None:
        self.path, self.folder = path, path / f"data-{token}"

    @staticmethod
    def create_folder(path: Path) -> str:
        """Create a new data folder in `path`, and remove those of saves that did not end; returns its token."""
        token = uuid4().hex[:12]
        if path.exists() and not path.is_dir():
            raise ConfigError(f"cannot save a checkpoint as {path}: it is a file; use a folder")
        try:
            unknown = [entry.name for entry in path.iterdir() if not _is_known(entry.name)] if path.exists() else []
            if unknown:
                raise ConfigError(
                    f"{path} contains {min(unknown)}, which is not part of a checkpoint; use another folder"
                )
            path.mkdir(parents=True, exist_ok=True)
            current = _read_folder(path)
            if current is not None or not (path / MANIFEST_FILE).exists():  # a manifest that is unreadable may be valid
                _remove_unused(path, keep=current)
            (path / f"data-{token}").mkdir()
        except OSError as error:
            raise ConfigError(f"cannot write into {path}: {error.strerror}") from None
        return token

    def commit(self, manifest: Manifest, metadata: Metadata, written: list[WrittenShards]) -> None:
        """Write the indexes of DCP and of the manifest; with the latter this checkpoint replaces the one before it."""
        # DCP's own index: with it torch's dcp.load and other programs read the same files
        FileSystemWriter(self.folder, sync_files=True).finish(metadata, [pickle.loads(w.results) for w in written])
        manifest = replace(
            manifest, folder=self.folder.name, files=self._list_files(written), tensors=_index(metadata, written)
        )
        check_files(self.folder, manifest.files)
        sync_to_disk(self.folder)
        sync_to_disk(self.path)
        file, text = self.path / MANIFEST_FILE, manifest.to_json()
        Manifest.from_json(json.loads(text), file)  # what could not be read again is not committed
        write_whole(file, text)
        sync_to_disk(self.path)
        _remove_unused(self.path, keep=manifest.folder)

    def discard(self) -> None:
        """Remove the data folder; the checkpoint before it stays."""
        shutil.rmtree(self.folder, ignore_errors=True)

    def _list_files(self, written: Iterable[WrittenShards]) -> dict[str, int]:
        """The sizes of all files, in bytes."""
        names = {shard.file for rank in written for _, shard in rank.shards} | {".metadata"}
        for name in names:
            if not (self.folder / name).exists():
                raise ConfigError(f"{name} of another rank is not in {self.folder}; use a folder that all ranks see")
        return {name: (self.folder / name).stat().st_size for name in sorted(names)}


def _index(metadata: Metadata, written: Iterable[WrittenShards]) -> dict[str, TensorEntry]:
    """The manifest's entries of all tensors."""
    shards: dict[str, list[ShardEntry]] = {name: [] for name in metadata.state_dict_metadata}
    for rank in written:
        for name, shard in rank.shards:
            shards[name].append(shard)
    return {
        name: TensorEntry(
            str(entry.properties.dtype).removeprefix("torch."),
            tuple(entry.size),
            tuple(sorted(shards[name], key=lambda shard: shard.offsets)),
        )
        for name, entry in metadata.state_dict_metadata.items()
    }


def _is_known(name: str) -> bool:
    """Whether a checkpoint's folder may contain a file or folder of this name."""
    return name == MANIFEST_FILE or bool(DATA_FOLDER.fullmatch(name) or _TEMPORARY_FILE.fullmatch(name))


def _read_folder(path: Path) -> str | None:
    """The data folder that the current manifest names, if there is a manifest and it is readable."""
    try:
        return str(json.loads((path / MANIFEST_FILE).read_text())["folder"])
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        return None


def _remove_unused(path: Path, keep: str | None) -> None:
    for entry in path.iterdir():
        if DATA_FOLDER.fullmatch(entry.name) and entry.name != keep:
            shutil.rmtree(entry, ignore_errors=True)
        elif _TEMPORARY_FILE.fullmatch(entry.name):
            entry.unlink(missing_ok=True)
