"""The manifest of a checkpoint: one JSON file that describes the tensors beside it. No torch, no pickle.

    PATH/checkpoint.json            the manifest; it names the data folder
    PATH/data-3f0c.../__0_0.distcp  tensors, as torch's DCP writes them, with DCP's own .metadata beside them

A new save writes a data folder of its own. Then checkpoint.json is replaced: in that single rename the new checkpoint
replaces the old one. A crash at any moment leaves either the old checkpoint in PATH, or the new one.
"""

from __future__ import annotations

import json
import math
import re
import zlib
from collections import Counter
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from zeropipe.errors import ConfigError, first_line, short

if TYPE_CHECKING:
    from torch import Tensor

MANIFEST_FILE, FORMAT, VERSION = "checkpoint.json", "zeropipe checkpoint", 1
DATA_FOLDER = re.compile(r"data-[0-9a-f]{12}")
_CRC_CHUNK = 16 * 2**20  # bytes read at a time
_TAG = "__is__"  # key of a JSON object that stands for a value of another type


@dataclass(frozen=True)
class ShardEntry:
    """A box of a tensor, and where its bytes are."""

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    file: str
    start: int
    num_bytes: int
    crc32: int

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> ShardEntry:
        return cls(
            _to_ints(data["offsets"]), _to_ints(data["sizes"]), str(data["file"]), int(data["start"]),
            int(data["num_bytes"]), int(data["crc32"]),
        )  # fmt: skip


@dataclass(frozen=True)
class TensorEntry:
    """A tensor of the full model or of its optimizer."""

    dtype: str
    shape: tuple[int, ...]
    shards: tuple[ShardEntry, ...]

    @property
    def num_elements(self) -> int:
        return math.prod(self.shape)

    @property
    def num_bytes(self) -> int:
        """Size in memory; files are a little larger."""
        digits = re.search(r"\d+", self.dtype)
        return self.num_elements * (int(digits[0]) // 8 if digits else 1)


@dataclass(frozen=True)
class Manifest:
    """Everything in a checkpoint except the values of tensors."""

    folder: str
    step: int | None
    written_by: dict[str, Any]  # mesh, schedule, placement, number of stages, versions
    model: dict[str, Any]  # config and head of a Hugging Face model, ties: {name: the name it is saved as}
    optimizer: dict[str, Any] | None
    extra: Any
    files: dict[str, int] = field(default_factory=dict)  # sizes in bytes
    tensors: dict[str, TensorEntry] = field(default_factory=dict)

    def to_json(self) -> str:
        """The text of checkpoint.json."""
        data: dict[str, Any] = {"format": FORMAT, "version": VERSION} | asdict(self)
        for entry in data["tensors"].values():
            entry["pieces"] = entry.pop("shards")
        return json.dumps(data, separators=(",", ":"))

    @classmethod
    def from_json(cls, data: Any, file: Path) -> Manifest:
        """The manifest in the JSON value of a file; ConfigError if it is not complete and consistent."""
        try:
            return _parse(data, file)
        except ConfigError:
            raise
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise ConfigError(f"{file} is damaged: {type(error).__name__} {error}") from None

    def select(self, prefix: str) -> dict[str, TensorEntry]:
        """The tensors of one kind ("model", "optim", "random", "extra"), by their names without the prefix."""
        return {name.removeprefix(f"{prefix}."): t for name, t in self.tensors.items() if name.startswith(f"{prefix}.")}


# read and check


def resolve_pointer(path: Path) -> Path:
    """The checkpoint that the file `latest` or `best` of a run names; any other path as it is."""
    if path.name in ("latest", "best") and path.is_file():
        with suppress(OSError, ValueError):
            return path.with_name(path.read_text().strip())
    return path


def suggest_checkpoint(path: Path) -> str:
    """For error messages: the newest checkpoint inside the folder of a run, or of its checkpoints."""
    found = sorted(
        file.parent for pattern in ("", "checkpoints/") for file in path.glob(f"{pattern}step-*/{MANIFEST_FILE}")
    )
    return f"; use one of those inside, as {found[-1]}" if found else ""


def read_manifest(path: Path) -> Manifest:
    """Read the manifest of a checkpoint; ConfigError if it is damaged, or a file is missing or has another size."""
    file = path / MANIFEST_FILE
    try:
        data = json.loads(file.read_text())
    except FileNotFoundError:
        others = {"config.json": ": it is a model directory", ".metadata": ": it has the format of torch's DCP"}
        reason = next((text for name, text in others.items() if (path / name).exists()), f", as it has no {file.name}")
        raise ConfigError(f"{path} is not a checkpoint{reason}{suggest_checkpoint(path)}") from None
    except (OSError, ValueError, RecursionError) as error:
        raise ConfigError(f"cannot read {file}: {first_line(error)}") from None
    manifest = Manifest.from_json(data, file)
    check_files(path / manifest.folder, manifest.files)
    return manifest


def _parse(data: Any, file: Path) -> Manifest:
    if not isinstance(data, dict) or data.get("format") != FORMAT:
        raise ConfigError(f"{file} is not a {FORMAT}; use the folder that save_checkpoint wrote")
    if data["version"] != VERSION:
        raise ConfigError(f"{file} has version {data['version']}, this zeropipe reads {VERSION}; update zeropipe")
    if not DATA_FOLDER.fullmatch(data["folder"]):
        raise ConfigError(f"{file} is damaged: its folder is {data['folder']!r}")
    files = {str(name): int(size) for name, size in data["files"].items()}
    tensors = {}
    for name, entry in data["tensors"].items():
        shards = tuple(map(ShardEntry.from_json, entry["pieces"]))
        tensors[str(name)] = TensorEntry(str(entry["dtype"]), _to_ints(entry["shape"]), shards)
        _check_shards(name, tensors[str(name)], files, file)
    written_by, model, optimizer = dict(data["written_by"]), dict(data["model"]), data["optimizer"]
    dict(model["ties"])
    if optimizer is not None:
        dict(optimizer["numbers"])
        dict(optimizer["group_of"])
        list(optimizer["groups"])
    return Manifest(data["folder"], data["step"], written_by, model, optimizer, data["extra"], files, tensors)


def _to_ints(numbers: Any) -> tuple[int, ...]:
    return tuple(int(number) for number in numbers)


def _check_shards(name: str, tensor: TensorEntry, files: Mapping[str, int], file: Path) -> None:
    """ConfigError unless the shards of a tensor are inside it and their files, and together as large as it is."""
    for shard in tensor.shards:
        in_tensor = len(shard.offsets) == len(shard.sizes) == len(tensor.shape) and all(
            o >= 0 and s > 0 and o + s <= n for o, s, n in zip(shard.offsets, shard.sizes, tensor.shape)
        )
        in_file = shard.start >= 0 and 0 < shard.num_bytes <= files.get(shard.file, 0) - shard.start
        if not (in_tensor and in_file and shard.file == Path(shard.file).name):
            raise ConfigError(f"{file} is damaged: a shard of {name} is outside of the tensor or of its file")
    if sum(math.prod(shard.sizes) for shard in tensor.shards) != tensor.num_elements:
        raise ConfigError(f"{file} is damaged: the shards of {name} do not make the full tensor")


def check_files(folder: Path, files: Mapping[str, int]) -> None:
    """ConfigError for a file that is missing or has another size."""
    for name, size in files.items():
        try:
            found = (folder / name).stat().st_size
        except OSError:
            raise ConfigError(f"{folder / name} is missing: the checkpoint is incomplete; use another one") from None
        if found != size:
            raise ConfigError(
                f"{folder / name} has {found} bytes, {size} were written: the checkpoint is damaged; use another one"
            )


def verify_checksums(path: Path, manifest: Manifest) -> None:
    """Read all files; ConfigError if the bytes of a shard are not those that were written."""
    for name, tensor in manifest.tensors.items():
        for shard in tensor.shards:
            verify_shard(path / manifest.folder, name, shard)


def verify_shard(folder: Path, name: str, shard: ShardEntry) -> None:
    """ConfigError if the bytes of a shard are not those that were written."""
    file = folder / shard.file
    try:
        crc = compute_crc32(file, shard.start, shard.num_bytes)
    except OSError as error:
        raise ConfigError(f"cannot read {file}: {error.strerror}") from None
    if crc != shard.crc32:
        raise ConfigError(f"{file} is damaged at byte {shard.start} ({name}); use another checkpoint")


def compute_crc32(path: Path, start: int, length: int) -> int:
    """The CRC-32 of some bytes of a file."""
    crc = 0
    with path.open("rb") as file:
        file.seek(start)
        while length > 0 and (data := file.read(min(_CRC_CHUNK, length))):
            crc, length = zlib.crc32(data, crc), length - len(data)
    return crc


# values of `extra` and of optimizers, such as the state_dicts of learning-rate schedulers and data loaders


def encode(value: Any, name: str, tensors: dict[str, Tensor]) -> Any:
    """Convert a value to JSON, from which `decode` makes an equal value of the same type.

    It may contain numbers, strings, lists, tuples, dicts with such keys, Counters, and tensors, which are added to
    `tensors`. ConfigError for any other type.
    """
    from torch import Tensor  # a manifest is read without torch
    from torch.distributed.tensor import DTensor

    if value is None or isinstance(value, bool | str) or type(value) is int:
        return value
    if type(value) is float:
        return value if math.isfinite(value) else {_TAG: "float", "value": str(value)}
    if isinstance(value, Tensor) and not isinstance(value, DTensor):
        key = str(len(tensors))
        tensors[key] = value.detach()
        return {_TAG: "tensor", "value": key}
    if type(value) in (list, tuple):
        items = [encode(item, f"{name}[{index}]", tensors) for index, item in enumerate(value)]
        return items if type(value) is list else {_TAG: "tuple", "value": items}
    if type(value) in (dict, Counter):
        pairs = [
            [encode(key, name, tensors), encode(item, f"{name}[{short(key)}]", tensors)] for key, item in value.items()
        ]
        if type(value) is dict and all(type(key) is str and key != _TAG for key in value):
            return dict(pairs)
        return {_TAG: type(value).__name__, "value": pairs}
    raise ConfigError(
        f"{name} is a {type(value).__name__}: a checkpoint holds numbers, strings, lists, tuples, dicts and tensors"
    )


def decode(value: Any, tensors: Mapping[str, Tensor]) -> Any:
    """The value that `encode` converted to JSON."""
    if isinstance(value, list):
        return [decode(item, tensors) for item in value]
    if not isinstance(value, dict):
        return value
    if _TAG not in value:
        return {key: decode(item, tensors) for key, item in value.items()}
    content = value["value"]
    match value[_TAG]:
        case "float":
            return float(content)
        case "tensor":
            return tensors[content]
        case "tuple":
            return tuple(decode(item, tensors) for item in content)
        case kind:
            pairs = {decode(key, tensors): decode(item, tensors) for key, item in content}
            return Counter(pairs) if kind == "Counter" else pairs
