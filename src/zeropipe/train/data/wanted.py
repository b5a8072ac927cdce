"""What a run asks of its data, and where on the disk that is kept."""

from __future__ import annotations

import glob
import hashlib
import json
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from zeropipe.errors import ConfigError
from zeropipe.train.config.models import RunConfig
from zeropipe.train.data.beside import read_beside
from zeropipe.train.inputs import load_text_config

BYTES = "bytes"  # the tokenizer that needs no file
_FORMAT = 3  # of the cache
_TOKENIZER_FILES = (
    "config.json", "tokenizer*", "vocab*", "merges*", "special_tokens_map.json", "added_tokens.json", "*.model",
    "*.tiktoken", "chat_template*", "additional_chat_templates/*",
)  # fmt: skip


@dataclass(frozen=True)
class Wanted:
    """The samples that are made of some files."""

    table: str  # of the training file: data or evaluation
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
    def tokens(self) -> str:
        """The tokenizer, as a cache and a checkpoint know it: a digest of its files."""
        if self.kind == "tokens" or self.tokenizer in (None, BYTES):
            return str(self.tokenizer)
        digest = hashlib.sha256()
        folder = Path(str(self.tokenizer))
        for path in sorted({path for pattern in _TOKENIZER_FILES for path in folder.glob(pattern) if path.is_file()}):
            digest.update(json.dumps([path.name, path.stat().st_size]).encode())
            digest.update(path.read_bytes())
        return digest.hexdigest()[:32]

    @property
    def folder(self) -> Path:
        """Where samples are kept. Files that look the same are not read again."""
        files = _inside(self.files)
        if self.kind == "tokens":
            files += [path for file in self.files for path in read_beside(file).files]
        facts = [(path.name, path.stat().st_size, path.stat().st_mtime_ns) for path in files]
        asked = (self.kind, self.field, self.sequence, self.packing, self.is_shuffled, self.vocabulary)
        versions = [_version(package) for package in ("transformers", "tokenizers")]
        key = json.dumps([_FORMAT, asked, facts, self.tokens, versions])
        return self.output / "data" / hashlib.sha256(key.encode()).hexdigest()[:16]


def wanted_of(config: RunConfig) -> dict[str, Wanted]:
    """By table. Synthetic data has no files."""
    _require_positions(config)
    if config.data.kind == "synthetic":
        if config.evaluation is not None:
            raise ConfigError("evaluation: data.kind='synthetic' has no files to evaluate on; leave the table out")
        return {}
    paths = {"data": config.data.path}
    if config.evaluation is not None:
        paths["evaluation"] = config.evaluation.path
    return {
        table: Wanted(
            table, config.data.kind, find_files(path, table, config.data.kind), _tokenizer(config), config.data.field,
            config.data.sequence, config.data.packing, config.data.shuffle and table == "data", vocabulary_of(config),
            Path(config.train.output),
        )
        for table, path in paths.items()
    }  # fmt: skip


def find_files(given: str | tuple[str, ...] | None, table: str, kind: str) -> tuple[Path, ...]:
    """The files that names and patterns stand for, each once; those of a pattern in the order of their names."""
    patterns = (given,) if isinstance(given, str) else given or ()
    if not patterns:
        raise ConfigError(f"{table}.path is missing: data.kind={kind!r} needs files")
    found: dict[Path, None] = {}
    for pattern in patterns:
        own = Path(pattern).expanduser()
        matches = [own] if own.exists() else [Path(name) for name in sorted(glob.glob(str(own), recursive=True))]
        if kind != "datasets" and not own.is_dir():
            matches = [path for path in matches if not path.is_dir()]
        if not matches:
            raise ConfigError(f"{table}.path={pattern!r}: there is no such file")
        found |= dict.fromkeys(matches)
    for path in found:
        if kind == "datasets" and not path.is_dir():
            raise ConfigError(f"{table}.path: {path} is no folder: give one that `save_to_disk` of datasets wrote")
        if kind != "datasets" and path.is_dir():
            raise ConfigError(f"{table}.path: {path} is a folder: name files, like {path / '*'}")
        if kind != "datasets" and not path.is_file():
            raise ConfigError(f"{table}.path: {path} is no ordinary file, which can be read more than once")
    return tuple(found)


def vocabulary_of(config: RunConfig) -> int:
    """How many token ids the model knows."""
    found = load_text_config(config).get("vocab_size")
    if not isinstance(found, int):
        raise ConfigError(f"{config.model.path}: its config has no vocab_size, so it is not a language model's")
    return found


def _require_positions(config: RunConfig) -> None:
    """ConfigError for sequences that are longer than any the model is made for."""
    model, sequence = load_text_config(config), config.data.sequence
    for name in ("max_position_embeddings", "n_positions"):
        most = model.get(name)
        if isinstance(most, int) and 0 < most < sequence:
            raise ConfigError(
                f"data.sequence={sequence}: the model's {name} is {most}; take shorter ones, or change its config.json"
            )


def _tokenizer(config: RunConfig) -> str | None:
    if config.data.kind == "tokens":
        return None
    given = config.data.tokenizer
    if given == BYTES:
        return given
    path = Path(given or config.model.path).expanduser()
    if not path.is_dir():
        what = (
            f"data.tokenizer={given!r}" if given else f"data.tokenizer is missing, and model.path={config.model.path!r}"
        )
        raise ConfigError(
            f"{what} is no folder with a tokenizer: give one, or {BYTES!r}, of which each byte is a token"
        )
    return str(path)


def _inside(files: tuple[Path, ...]) -> list[Path]:
    """Files, and those in folders."""
    return [one for path in files for one in (sorted(path.rglob("*")) if path.is_dir() else [path]) if one.is_file()]


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return ""
