"""Files read piece by piece: whatever their size, no more than a block or a line of them is in memory."""

from __future__ import annotations

import codecs
import hashlib
import json
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, NamedTuple, Protocol, TypeVar

from zeropipe.core.files import has_suffix
from zeropipe.errors import ConfigError, short

BLOCK = 2**20  # characters of text that are made into tokens at once
MOST_TEXTS = 1024  # likewise
LONGEST_LINE = 2**26  # bytes
JSONL = (".jsonl", ".ndjson")
TABLES = (".json", ".csv", ".tsv")  # many texts in one file: it must not become one document


class Piece(NamedTuple):
    """A part of a document, or a whole one."""

    where: str  # file and line, for messages
    text: str
    is_last: bool


class Line(NamedTuple):
    """A line of a JSONL file."""

    where: str
    value: dict[str, Any]


class Reader:
    """Reads files in order, and knows a digest of all that it has read."""

    def __init__(self, files: Iterable[Path]) -> None:
        self._files = tuple(files)
        self._digest = hashlib.blake2b(digest_size=16)
        self.place = ""  # where it is: for those who wait

    @property
    def digest(self) -> str:
        return self._digest.hexdigest()

    def documents(self, field: str) -> Iterator[Piece]:
        """Every text file, and that field of every line of a JSONL file."""
        for path in self._files:
            if has_suffix(path, *TABLES):
                raise ConfigError(f"{path}: give one JSON object per line, in a file that is named .jsonl")
            if not has_suffix(path, *JSONL):
                yield from self._text(path)
                continue
            for where, value in self._lines(path):
                yield from cut(where, text_of(where, value, field))

    def lines(self) -> Iterator[Line]:
        """Every line of JSONL files."""
        for path in self._files:
            yield from self._lines(path)

    def _text(self, path: Path) -> Iterator[Piece]:
        """A text file: one document."""
        decoder, held, line = codecs.getincrementaldecoder("utf-8-sig")(), "", 1
        for data in self._blocks(path):
            try:
                text = decoder.decode(data, final=not data)
            except UnicodeDecodeError as error:
                line += error.object[: error.start].count(b"\n")
                raise ConfigError(
                    f"{path}, line {line}: not text (byte {error.object[error.start]:#x} is not UTF-8)"
                ) from None
            if "\0" in text:
                line += text[: text.index("\0")].count("\n")
                raise ConfigError(f"{path}, line {line}: not text (it has a zero byte)")
            held, line = held + text, line + text.count("\n")
            while len(held) > BLOCK:
                end = _border(held)
                yield Piece(str(path), held[:end], False)
                held = held[end:]
        yield Piece(str(path), held, True)

    def _lines(self, path: Path) -> Iterator[Line]:
        number = 0
        with _opened(path) as file:
            while data := file.readline(LONGEST_LINE + 1):
                number += 1
                self.place = where = f"{path}, line {number}"
                if len(data) > LONGEST_LINE:
                    raise ConfigError(f"{where} has more than {LONGEST_LINE // 2**20} MiB: is it JSONL? Split it up")
                self._digest.update(data)
                try:
                    text = data.decode("utf-8-sig" if number == 1 else "utf-8").strip()
                except UnicodeDecodeError as error:
                    raise ConfigError(f"{where}: not text (byte {error.start + 1} is not UTF-8)") from None
                if not text:
                    continue
                try:
                    value = json.loads(text)
                except (ValueError, RecursionError) as error:
                    reason = str(error) if isinstance(error, ValueError) else "it is nested too deeply"
                    raise ConfigError(f"{where} is not JSON: {reason}") from None
                if not isinstance(value, dict):
                    raise ConfigError(f'{where} is {short(value)}: give a JSON object, like {{"text": "..."}}')
                yield Line(where, value)

    def _blocks(self, path: Path) -> Iterator[bytes]:
        """The bytes of a file, an empty block at its end."""
        size = 0
        with _opened(path) as file:
            while True:
                data = file.read(BLOCK)
                size += len(data)
                self.place = f"{path}, {size / 2**20:,.0f} MiB"
                self._digest.update(data)
                yield data
                if not data:
                    self._digest.update(size.to_bytes(8, "little"))  # where one document ends is part of the content
                    return


class _HasText(Protocol):
    @property
    def text(self) -> str: ...


_T = TypeVar("_T", bound=_HasText)


def in_blocks(items: Iterable[_T]) -> Iterator[list[_T]]:
    """Some of them at a time, of together about a block of text."""
    block: list[_T] = []
    size = 0
    for item in items:
        block.append(item)
        size += len(item.text)
        if size >= BLOCK or len(block) == MOST_TEXTS:
            yield block
            block, size = [], 0
    if block:
        yield block


def cut(where: str, text: str) -> Iterator[Piece]:
    """A document in pieces that are not too large to be made into tokens."""
    while len(text) > BLOCK:
        end = _border(text)
        yield Piece(where, text[:end], False)
        text = text[end:]
    yield Piece(where, text, True)


def text_of(where: str, value: dict[str, Any], field: str) -> str:
    """A field that is a text."""
    if field not in value:
        raise ConfigError(f"{where} has no field {field!r} but {short(sorted(value))}: set data.field")
    text = value[field]
    if not isinstance(text, str):
        raise ConfigError(f"{where}: the field {field!r} is {short(text)}: a text is needed")
    return require_text(where, text)


def require_text(where: str, text: str) -> str:
    """ConfigError for half a character: JSON can write that, no tokenizer can read it."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise ConfigError(f"{where}: {text[error.start]!r} is half a character of UTF-16: write it in UTF-8") from None
    return text


def _border(text: str) -> int:
    """Where to cut a text that is too long: after a line, or a word, if there is any."""
    for mark in ("\n", " "):
        end = text.rfind(mark, 0, BLOCK) + 1
        if end:
            return end
    return BLOCK


def _opened(path: Path) -> Any:
    try:
        return path.open("rb")
    except OSError as error:
        raise ConfigError(f"cannot read {path}: {error.strerror or error}") from None
