"""The kind of data that files hold, for a training file that names files and no kind."""

from __future__ import annotations

from itertools import islice
from pathlib import Path

from zeropipe.core.files import has_suffix
from zeropipe.errors import ConfigError
from zeropipe.train.config.tables import DataTable
from zeropipe.train.data.chat_formats import find_format
from zeropipe.train.data.reader import JSONL_SUFFIXES, FileReader
from zeropipe.train.data.request import find_files
from zeropipe.train.data.token_files import read_sidecar


def detect_kind(data: DataTable) -> str:
    """`datasets` for folders, `tokens` for token ids, `chat` for JSON with the fields of a chat, else `text`.

    ConfigError if the files are of several kinds.
    """
    patterns = (data.path,) if isinstance(data.path, str) else data.path or ()
    if any(Path(pattern).expanduser().is_dir() for pattern in patterns):
        return "datasets"
    try:
        files = find_files(data.path, "data", "text")
    except ConfigError:
        return "text"  # reading a training file needs no data; the check before a run reports missing files
    kinds = {_kind_of(path, data.field): path for path in files}
    if len(kinds) > 1:
        found = ", ".join(f"{path} is {kind}" for kind, path in kinds.items())
        raise ConfigError(f"data.path has files of several kinds: {found}; name files of one kind")
    return next(iter(kinds))


def _kind_of(path: Path, field: str) -> str:
    if has_suffix(path, ".npy") or read_sidecar(path).file is not None:
        return "tokens"
    if has_suffix(path, ".json", *JSONL_SUFFIXES):
        for record in islice(FileReader([path]).records(), 1):
            if field not in record.value and find_format(record.value) is not None:
                return "chat"
    return "text"
