"""Directories that the `datasets` library has saved."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from zeropipe.errors import ConfigError, MissingExtra, short
from zeropipe.train.data.reading import Line, Piece, cut, text_of

_ROWS = 1000  # that are in memory at once


class Library:
    """Reads the rows of datasets in order, and knows a digest of all that it has read."""

    def __init__(self, folders: tuple[Path, ...], field: str) -> None:
        self._sets = [_opened(folder, field) for folder in folders]
        self._folders, self._field = folders, field
        self._digest = hashlib.blake2b(digest_size=16)
        self.place = ""

    @property
    def digest(self) -> str:
        return self._digest.hexdigest()

    @property
    def is_chat(self) -> bool:
        """Whether rows are lists of messages; else they are texts."""
        return isinstance(self._sets[0][0][self._field], list)

    def documents(self, field: str) -> Iterator[Piece]:
        """Every row that is a text."""
        for where, value in self.lines():
            yield from cut(where, text_of(where, value, field))

    def lines(self) -> Iterator[Line]:
        """The field of every row, under its own name; a list of messages as `messages`."""
        name = "messages" if self.is_chat else self._field
        for folder, found in zip(self._folders, self._sets):
            for start in range(0, len(found), _ROWS):
                for number, value in enumerate(found[start : start + _ROWS][self._field], start):
                    self.place = f"{folder}, row {number:,}"
                    self._digest.update(json.dumps(value).encode() + b"\n")
                    yield Line(self.place, {name: value})


def _opened(folder: Path, field: str) -> Any:
    try:
        import datasets
    except ImportError:
        raise MissingExtra("datasets", "datasets") from None
    try:
        found = datasets.load_from_disk(str(folder))
    except Exception as error:  # whatever it finds wrong
        reason = " ".join(str(error).split())[:200]
        raise ConfigError(f"cannot read {folder}: {type(error).__name__}: {reason}") from None
    if not isinstance(found, datasets.Dataset):
        raise ConfigError(f"{folder} has the splits {short(list(found))}: name the folder of one of them")
    if field not in found.column_names:
        raise ConfigError(f"{folder} has no column {field!r} but {short(found.column_names)}: set data.field")
    if len(found) == 0:
        raise ConfigError(f"{folder} has no rows")
    return found
