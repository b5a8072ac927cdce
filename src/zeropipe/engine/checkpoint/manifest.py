"""What a checkpoint's folder says about itself, in one JSON file beside the tensors. No torch, no pickle.

    PATH/checkpoint.json            this file; it names the folder that counts
    PATH/data-3f0c.../__0_0.distcp  tensors, as torch's DCP writes them, with DCP's own .metadata beside them

A new save writes a folder of its own. Then checkpoint.json is replaced: in that single rename the new checkpoint takes
the place of the old one. Whatever moment a crash chooses, PATH holds the old checkpoint or the new one.
"""

from __future__ import annotations

import json
import math
import re
import shutil
import zlib
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any
from uuid import uuid4

from zeropipe.core.files import sync_to_disk, write_whole
from zeropipe.errors import ConfigError

FILE, FORMAT, VERSION = "checkpoint.json", "zeropipe checkpoint", 1
_CHUNK = 16 * 2**20  # bytes that are checked together
_FOLDER = re.compile(r"data-[0-9a-f]{12}")


class NoFolder(ConfigError):
    """The folder of a checkpoint cannot be made or written to: that may change, the other reasons do not."""


@dataclass(frozen=True)
class Piece:
    """A box of a tensor, and where its bytes are."""

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    file: str
    start: int
    num_bytes: int
    crc32: int


@dataclass(frozen=True)
class Saved:
    """A tensor of the whole model or of its optimizer."""

    dtype: str
    shape: tuple[int, ...]
    pieces: tuple[Piece, ...]

    @property
    def num_elements(self) -> int:
        return math.prod(self.shape)

    @property
    def num_bytes(self) -> int:
        """In memory; files have a little more."""
        digits = re.search(r"\d+", self.dtype)
        return self.num_elements * (int(digits[0]) // 8 if digits else 1)


@dataclass(frozen=True)
class Manifest:
    """All of a checkpoint but the tensors' values."""

    folder: str
    step: int | None
    written_by: dict[str, Any]  # mesh, schedule, placement, number of stages, versions
    model: dict[str, Any]  # config and head of a Hugging Face model, ties: {name: the name it is saved as}
    optimizer: dict[str, Any] | None
    extra: Any
    files: dict[str, int]  # bytes of each
    tensors: dict[str, Saved]

    def text(self) -> str:
        """For the file."""
        return json.dumps({"format": FORMAT, "version": VERSION} | asdict(self), separators=(",", ":"))

    def under(self, prefix: str) -> dict[str, Saved]:
        """The tensors of one kind ("model", "optim", "random", "extra"), by their names without it."""
        return {name.removeprefix(f"{prefix}."): t for name, t in self.tensors.items() if name.startswith(f"{prefix}.")}


def followed(path: Path) -> Path:
    """The checkpoint that `latest` or `best` of a run names, if that is given; else the path itself."""
    if path.name in ("latest", "best") and path.is_file():
        with suppress(OSError, ValueError):
            return path.with_name(path.read_text().strip())
    return path


def one_inside(path: Path) -> str:
    """For messages: the newest checkpoint in the folder of a run, or in that of its checkpoints."""
    found = sorted(file.parent for pattern in ("", "checkpoints/") for file in path.glob(f"{pattern}step-*/{FILE}"))
    return f": give one of those inside, like {found[-1]}" if found else ""


def read_manifest(path: Path) -> Manifest:
    """The checkpoint that a folder holds: ConfigError unless it is whole, as far as names and sizes can tell."""
    file = path / FILE
    try:
        given = json.loads(file.read_text())
    except FileNotFoundError:
        other = next((p for p in (path / "config.json", path / ".metadata") if p.exists()), None)
        what = {"config.json": ": it is a model's directory", ".metadata": ": it is DCP's own form"}
        raise ConfigError(
            f"{path} holds no checkpoint{what[other.name] if other else f', as there is no {FILE}'}{one_inside(path)}"
        ) from None
    except (OSError, ValueError, RecursionError) as error:
        raise ConfigError(f"cannot read {file}: {str(error).splitlines()[0]}") from None
    try:
        manifest = _parsed(given, file)
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        if isinstance(error, ConfigError):
            raise
        raise ConfigError(f"{file} is damaged: {type(error).__name__} {error}") from None
    _check_files(path / manifest.folder, manifest.files)
    return manifest


def _parsed(given: Any, file: Path) -> Manifest:
    if not isinstance(given, dict) or given.get("format") != FORMAT:
        raise ConfigError(f"{file} is no {FORMAT}: give the folder that save_checkpoint wrote")
    if given["version"] != VERSION:
        raise ConfigError(f"{file} is of version {given['version']}, this zeropipe reads {VERSION}: update zeropipe")
    tensors = {
        str(name): Saved(
            str(entry["dtype"]),
            _numbers(entry["shape"]),
            tuple(
                Piece(_numbers(p["offsets"]), _numbers(p["sizes"]), str(p["file"]), *map(int, _place(p)))
                for p in entry["pieces"]
            ),
        )
        for name, entry in given["tensors"].items()
    }
    files = {str(name): int(size) for name, size in given["files"].items()}
    if not _FOLDER.fullmatch(given["folder"]):
        raise ConfigError(f"{file} is damaged: its folder is {given['folder']!r}")
    for name, saved in tensors.items():
        _check_pieces(name, saved, files, file)
    manifest = Manifest(
        given["folder"], given["step"], dict(given["written_by"]), dict(given["model"]), given["optimizer"],
        given["extra"], files, tensors,
    )  # fmt: skip
    dict(manifest.model["ties"])
    if manifest.optimizer is not None:
        dict(manifest.optimizer["numbers"])
        dict(manifest.optimizer["group_of"])
        list(manifest.optimizer["groups"])
    return manifest


def check_contents(path: Path, manifest: Manifest) -> None:
    """ConfigError if some bytes are not those that were written; reads all of them."""
    for name, saved in manifest.tensors.items():
        for piece in saved.pieces:
            check_piece(path / manifest.folder, name, piece)


def check_piece(folder: Path, name: str, piece: Piece) -> None:
    """ConfigError if a piece's bytes are not those that were written."""
    file = folder / piece.file
    try:
        crc = checksum(file, piece.start, piece.num_bytes)
    except OSError as error:
        raise ConfigError(f"cannot read {file}: {error.strerror}") from None
    if crc != piece.crc32:
        raise ConfigError(f"{file} is damaged at byte {piece.start} ({name}): take another checkpoint")


def _place(piece: Mapping[str, Any]) -> tuple[Any, Any, Any]:
    return piece["start"], piece["num_bytes"], piece["crc32"]


def _numbers(given: Any) -> tuple[int, ...]:
    return tuple(int(number) for number in given)


def _check_pieces(name: str, saved: Saved, files: Mapping[str, int], file: Path) -> None:
    """The pieces lie inside the tensor and inside their files, and are together as large as the tensor."""
    for piece in saved.pieces:
        inside = len(piece.offsets) == len(piece.sizes) == len(saved.shape) and all(
            o >= 0 and s > 0 and o + s <= n for o, s, n in zip(piece.offsets, piece.sizes, saved.shape)
        )
        in_file = piece.start >= 0 and 0 < piece.num_bytes <= files.get(piece.file, 0) - piece.start
        if not (inside and in_file and piece.file == Path(piece.file).name):
            raise ConfigError(f"{file} is damaged: a piece of {name} lies outside of the tensor or of its file")
    if sum(math.prod(piece.sizes) for piece in saved.pieces) != saved.num_elements:
        raise ConfigError(f"{file} is damaged: the pieces of {name} are not the whole tensor")


def _check_files(folder: Path, files: Mapping[str, int]) -> None:
    for name, size in files.items():
        try:
            found = (folder / name).stat().st_size
        except OSError:
            raise ConfigError(f"{folder / name} is missing: the checkpoint is not whole, take another one") from None
        if found != size:
            raise ConfigError(
                f"{folder / name} has {found} bytes, {size} were written: the checkpoint is damaged, take another one"
            )


def checksum(path: Path, start: int, length: int) -> int:
    """Of a part of a file."""
    crc = 0
    with path.open("rb") as file:
        file.seek(start)
        while length > 0 and (data := file.read(min(_CHUNK, length))):
            crc, length = zlib.crc32(data, crc), length - len(data)
    return crc


class Target:
    """Where a checkpoint is being written."""

    def __init__(self, path: Path, token: str) -> None:
        self.path, self.folder = path, path / f"data-{token}"

    @staticmethod
    def open(path: Path) -> str:
        """Make a new folder inside `path`, free of what saves that did not end have left; its token."""
        token = uuid4().hex[:12]
        if path.exists() and not path.is_dir():
            raise ConfigError(f"cannot save a checkpoint as {path}: it is a file; give a folder")
        try:
            strangers = [entry.name for entry in path.iterdir() if not _ours(entry.name)] if path.exists() else []
            if strangers:
                raise ConfigError(
                    f"{path} holds {min(strangers)}, which is no part of a checkpoint: give a folder of its own"
                )
            path.mkdir(parents=True, exist_ok=True)
            present = _folder_of(path)
            if present is not None or not (path / FILE).exists():  # what it names is not known: all is left alone
                _clean(path, keep=present)
            (path / f"data-{token}").mkdir()
        except OSError as error:
            raise ConfigError(f"cannot write into {path}: {error.strerror}") from None
        return token

    def switch(self, manifest: Manifest) -> None:
        """Check that all is there, and let it take the place of the checkpoint before it."""
        _check_files(self.folder, manifest.files)
        sync_to_disk(self.folder)
        sync_to_disk(self.path)
        text = manifest.text()
        _parsed(json.loads(text), self.path / FILE)
        write_whole(self.path / FILE, text)
        sync_to_disk(self.path)
        _clean(self.path, keep=manifest.folder)

    def close(self) -> None:
        """Give up."""
        shutil.rmtree(self.folder, ignore_errors=True)


def _ours(name: str) -> bool:
    return (
        name == FILE
        or _FOLDER.fullmatch(name) is not None
        or re.fullmatch(r"\.checkpoint\.[0-9a-f]+\.json", name) is not None
    )


def _folder_of(path: Path) -> str | None:
    """The folder that the present checkpoint names."""
    try:
        return str(json.loads((path / FILE).read_text())["folder"])
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        return None


def _clean(path: Path, keep: str | None) -> None:
    for entry in path.iterdir():
        if _FOLDER.fullmatch(entry.name) and entry.name != keep:
            shutil.rmtree(entry, ignore_errors=True)
        elif _ours(entry.name) and entry.name.startswith("."):
            entry.unlink(missing_ok=True)
