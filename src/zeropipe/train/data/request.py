"""The samples that a run requests: files, tokenizer, sequence length, and the folder that caches them."""

from __future__ import annotations

import glob
import hashlib
import json
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from zeropipe.core.model.positions import require_positions
from zeropipe.errors import ConfigError
from zeropipe.train.config.tables import BYTE_TOKENIZER, RunConfig
from zeropipe.train.data.token_files import read_sidecar
from zeropipe.train.inputs import load_text_config

_CACHE_FORMAT = 4
_TOKENIZER_FILES = (
    "config.json", "tokenizer*", "vocab*", "merges*", "special_tokens_map.json", "added_tokens.json", "*.model",
    "*.tiktoken", "chat_template*", "additional_chat_templates/*",
)  # fmt: skip


@dataclass(frozen=True)
class DataRequest:
    """The samples of one table of a training file."""

    table: str  # data or evaluation
    kind: str
    files: tuple[Path, ...]
    tokenizer: str | None
    field: str
    sequence: int
    packing: bool
    is_shuffled: bool
    vocabulary: int
    output: Path

    @property
    def folder(self) -> Path:
        """The cache folder, named for a hash of the request. Files of the same name, size and time count as equal."""
        files = _expand_folders(self.files)
        if self.kind == "tokens":
            files += [path for file in self.files for path in read_sidecar(file).files]
        stats = [(path.name, path.stat().st_size, path.stat().st_mtime_ns) for path in files]
        fields = (self.kind, self.field, self.sequence, self.packing, self.is_shuffled, self.vocabulary)
        versions = [_installed_version(package) for package in ("transformers", "tokenizers")]
        key = json.dumps([_CACHE_FORMAT, fields, stats, self._hash_tokenizer(), versions])
        return self.output / "data" / hashlib.sha256(key.encode()).hexdigest()[:16]

    def _hash_tokenizer(self) -> str:
        if self.kind == "tokens" or self.tokenizer in (None, BYTE_TOKENIZER):
            return str(self.tokenizer)
        digest = hashlib.sha256()
        folder = Path(str(self.tokenizer))
        for path in sorted({path for pattern in _TOKENIZER_FILES for path in folder.glob(pattern) if path.is_file()}):
            digest.update(json.dumps([path.name, path.stat().st_size]).encode())
            digest.update(path.read_bytes())
        return digest.hexdigest()[:32]


def build_requests(config: RunConfig) -> dict[str, DataRequest]:
    """The requests of the tables `data` and `evaluation`; none for synthetic data."""
    require_positions(load_text_config(config), config.data.sequence, "data.sequence")
    if config.data.kind == "synthetic":
        if config.evaluation is not None:
            raise ConfigError("evaluation: data.kind='synthetic' has no files to evaluate on; leave out the table")
        return {}
    paths = {"data": config.data.path}
    if config.evaluation is not None:
        paths["evaluation"] = config.evaluation.path
    return {
        table: DataRequest(
            table, config.data.kind, find_files(path, table, config.data.kind), _find_tokenizer(config),
            config.data.field, config.data.sequence, config.data.packing, config.data.shuffle and table == "data",
            vocabulary_size(config), Path(config.train.output),
        )
        for table, path in paths.items()
    }  # fmt: skip


def find_files(paths: str | tuple[str, ...] | None, table: str, kind: str) -> tuple[Path, ...]:
    """The files that paths and patterns match, each once. Those of a pattern are sorted by name."""
    patterns = (paths,) if isinstance(paths, str) else paths or ()
    if not patterns:
        raise ConfigError(f"{table}.path is missing: data.kind={kind!r} needs files")
    found: dict[Path, None] = {}
    for pattern in patterns:
        own = Path(pattern).expanduser()
        matches = [own] if own.exists() else [Path(name) for name in sorted(glob.glob(str(own), recursive=True))]
        if kind != "datasets" and not own.is_dir():
            matches = [path for path in matches if not path.is_dir()]
        if not matches:
            raise ConfigError(f"{table}.path={pattern!r}: no such file")
        found |= dict.fromkeys(matches)
    for path in found:
        if kind == "datasets" and not path.is_dir():
            raise ConfigError(f"{table}.path: {path} is not a folder; use one that `save_to_disk` of datasets wrote")
        if kind != "datasets" and path.is_dir():
            raise ConfigError(f"{table}.path: {path} is a folder; name files, like {path / '*'}")
        if kind != "datasets" and not path.is_file():
            raise ConfigError(f"{table}.path: {path} is not a regular file, which can be read more than once")
    return tuple(found)


def vocabulary_size(config: RunConfig) -> int:
    """The number of token ids of the model."""
    found = load_text_config(config).get("vocab_size")
    if not isinstance(found, int):
        raise ConfigError(f"{config.model.path}: its config has no vocab_size, so it is not a language model")
    return found


def _find_tokenizer(config: RunConfig) -> str | None:
    if config.data.kind == "tokens":
        return None
    name = config.data.tokenizer
    if name == BYTE_TOKENIZER:
        return name
    path = Path(name or config.model.path).expanduser()
    if not path.is_dir():
        model = f"data.tokenizer is missing, and model.path={config.model.path!r}"
        raise ConfigError(
            f"{f'data.tokenizer={name!r}' if name else model} is not a folder with a tokenizer; set data.tokenizer to "
            f"one, or to {BYTE_TOKENIZER!r} (one token per byte)"
        )
    return str(path)


def _expand_folders(paths: tuple[Path, ...]) -> list[Path]:
    """Files, and those inside folders."""
    return [file for path in paths for file in (sorted(path.rglob("*")) if path.is_dir() else [path]) if file.is_file()]


def _installed_version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return ""
