"""Read files and `datasets` folders as a stream of documents or chats, with bounded memory.

Errors name the file and the line, or the folder and the row.
"""

from __future__ import annotations

import codecs
import hashlib
import json
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, NamedTuple, Protocol, TypeVar

from zeropipe.core.files import has_suffix
from zeropipe.errors import ConfigError, MissingExtra, first_line, short
from zeropipe.train.data.chat_formats import find_format
from zeropipe.train.data.json_array import InvalidArray, iterate_array
from zeropipe.train.data.record import Record

MAX_BLOCK_CHARS = 2**20  # tokenized together
MAX_BLOCK_TEXTS = 1024
MAX_LINE_BYTES = 2**26
JSONL_SUFFIXES = (".jsonl", ".ndjson")
TABLE_SUFFIXES = (".json", ".csv", ".tsv")  # many texts in one file, which must not become one document
_ROWS_PER_READ = 1000  # of a dataset


class TextChunk(NamedTuple):
    """A document, or a chunk of a long one."""

    location: str  # file and line, for errors
    text: str
    is_last: bool


class Reader(ABC):
    """Reads documents or records in order, and computes a digest of their contents."""

    def __init__(self) -> None:
        self._digest = hashlib.blake2b(digest_size=16)
        self.position = ""  # file and line, for progress messages

    @property
    def digest(self) -> str:
        return self._digest.hexdigest()

    @abstractmethod
    def records(self) -> Iterator[Record]:
        """Every line of JSONL files, every item of JSON arrays, or every row of datasets."""

    def documents(self, field: str) -> Iterator[TextChunk]:
        """`field` of every record."""
        for record in self.records():
            yield from _chunk_text(record.location, _get_text(record, field))


class FileReader(Reader):
    """Reads text and JSONL files."""

    def __init__(self, files: Iterable[Path]) -> None:
        super().__init__()
        self._files = tuple(files)

    def documents(self, field: str) -> Iterator[TextChunk]:
        """Every text file is a document, and so is `field` of every line of a JSONL file."""
        for path in self._files:
            if has_suffix(path, *TABLE_SUFFIXES):
                raise ConfigError(f"{path} must be JSONL, one JSON object per line, in a file named .jsonl")
            if not has_suffix(path, *JSONL_SUFFIXES):
                yield from self._read_text(path)
                continue
            for record in self._read_lines(path):
                yield from _chunk_text(record.location, _get_text(record, field))

    def records(self) -> Iterator[Record]:
        for path in self._files:
            yield from self._read_array(path) if _is_array(path) else self._read_lines(path)

    def _read_text(self, path: Path) -> Iterator[TextChunk]:
        decoder, rest, line = codecs.getincrementaldecoder("utf-8-sig")(), "", 1
        for data in self._read_blocks(path):
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
            rest, line = rest + text, line + text.count("\n")
            *chunks, (_, rest, _) = _chunk_text(str(path), rest)
            yield from chunks
        yield TextChunk(str(path), rest, True)

    def _read_lines(self, path: Path) -> Iterator[Record]:
        number = 0
        with _open(path) as file:
            while data := file.readline(MAX_LINE_BYTES + 1):
                number += 1
                self.position = location = f"{path}, line {number}"
                if len(data) > MAX_LINE_BYTES:
                    raise ConfigError(f"{location} has more than {MAX_LINE_BYTES // 2**20} MiB; write shorter lines")
                self._digest.update(data)
                try:
                    text = data.decode("utf-8-sig" if number == 1 else "utf-8").strip()
                except UnicodeDecodeError as error:
                    raise ConfigError(f"{location}: not text (byte {error.start + 1} is not UTF-8)") from None
                if not text:
                    continue
                try:
                    value = json.loads(text)
                except (ValueError, RecursionError) as error:
                    reason = str(error) if isinstance(error, ValueError) else "it is nested too deeply"
                    raise ConfigError(f"{location} is not JSON: {reason}") from None
                if not isinstance(value, dict):
                    raise ConfigError(f'{location} is {short(value)}: must be a JSON object, like {{"text": "..."}}')
                yield Record(location, value)

    def _read_array(self, path: Path) -> Iterator[Record]:
        """The objects of a JSON array. Their location is the line at which they begin."""
        decoder = codecs.getincrementaldecoder("utf-8-sig")()
        try:
            texts = (decoder.decode(data, final=not data) for data in self._read_blocks(path))
            for line, value in iterate_array(texts, MAX_LINE_BYTES):
                self.position = location = f"{path}, line {line}"
                yield Record(location, value)
        except InvalidArray as error:
            raise ConfigError(f"{path}, line {error.line} is not JSON: {error}") from None
        except UnicodeDecodeError as error:
            raise ConfigError(f"{path}: not text (byte {error.object[error.start]:#x} is not UTF-8)") from None

    def _read_blocks(self, path: Path) -> Iterator[bytes]:
        """The bytes of a file, with an empty block at the end."""
        size = 0
        with _open(path) as file:
            while True:
                data = file.read(MAX_BLOCK_CHARS)
                size += len(data)
                self.position = f"{path}, {size / 2**20:,.0f} MiB"
                self._digest.update(data)
                yield data
                if not data:
                    self._digest.update(size.to_bytes(8, "little"))  # document boundaries are part of the content
                    return


class DatasetsReader(Reader):
    """Reads folders that the `datasets` library saved.

    A row is the column `field`, a text or a list of messages; if there is no such column, the columns of a chat.
    """

    def __init__(self, folders: tuple[Path, ...], field: str) -> None:
        super().__init__()
        self._datasets = [_load_dataset(folder, field) for folder in folders]
        self._folders, self._field = folders, field
        columns = self._datasets[0].column_names
        self._is_row = field not in columns
        value = None if self._is_row else self._datasets[0][0][field]
        self.has_chats = self._is_row or isinstance(value, list)  # else rows are texts
        is_sharegpt = (
            isinstance(value, list) and isinstance(value[:1], list) and any("from" in one for one in value[:1])
        )
        self._name = "conversations" if is_sharegpt else "messages" if self.has_chats else field

    def records(self) -> Iterator[Record]:
        for folder, dataset in zip(self._folders, self._datasets):
            for start in range(0, len(dataset), _ROWS_PER_READ):
                columns = dataset[start : start + _ROWS_PER_READ]
                for number in range(len(next(iter(columns.values())))):
                    row = {name: values[number] for name, values in columns.items()}
                    value = row if self._is_row else row[self._field]
                    self.position = f"{folder}, row {start + number:,}"
                    self._digest.update(json.dumps(value, default=str).encode() + b"\n")
                    yield Record(self.position, row if self._is_row else {self._name: value})


def _load_dataset(folder: Path, field: str) -> Any:
    try:
        import datasets
    except ImportError:
        raise MissingExtra("datasets", "datasets") from None
    try:
        found = datasets.load_from_disk(str(folder))
    except Exception as error:  # of any type
        raise ConfigError(f"cannot read {folder}: {type(error).__name__}: {first_line(error)}") from None
    if not isinstance(found, datasets.Dataset):
        raise ConfigError(f"{folder} has the splits {short(list(found))}; use the folder of one of them")
    if field not in found.column_names and find_format(found.column_names) is None:
        raise ConfigError(f"{folder} has no column {field!r} but {short(found.column_names)}; set data.field")
    if len(found) == 0:
        raise ConfigError(f"{folder} has no rows")
    return found


class _HasText(Protocol):
    @property
    def text(self) -> str: ...


_T = TypeVar("_T", bound=_HasText)


def group_texts(items: Iterable[_T]) -> Iterator[list[_T]]:
    """Group items into lists of about MAX_BLOCK_CHARS characters, to be tokenized together."""
    group: list[_T] = []
    size = 0
    for item in items:
        group.append(item)
        size += len(item.text)
        if size >= MAX_BLOCK_CHARS or len(group) == MAX_BLOCK_TEXTS:
            yield group
            group, size = [], 0
    if group:
        yield group


def _get_text(record: Record, field: str) -> str:
    """A field of a record, which must be a string."""
    location, value = record
    chat = find_format(value)
    if field not in value:
        way_out = f"it is a chat, {chat.title}: set data.kind to 'chat'" if chat else "set data.field"
        raise ConfigError(f"{location} has no field {field!r} but {short(sorted(value))}; {way_out}")
    text = value[field]
    if not isinstance(text, str):
        hint = "; for chats set data.kind to 'chat'" if chat and field in chat.fields else ""
        raise ConfigError(f"{location}: the field {field!r} is {short(text)}: must be a string{hint}")
    return require_unicode(location, text)


def require_unicode(location: str, text: str) -> str:
    """Raise ConfigError for a lone surrogate, which JSON can express and tokenizers cannot read."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise ConfigError(f"{location}: {text[error.start]!r} is a lone surrogate of UTF-16; write UTF-8") from None
    return text


def _chunk_text(location: str, text: str) -> Iterator[TextChunk]:
    """A document in chunks of at most MAX_BLOCK_CHARS characters."""
    while len(text) > MAX_BLOCK_CHARS:
        end = _find_break(text)
        yield TextChunk(location, text[:end], False)
        text = text[end:]
    yield TextChunk(location, text, True)


def _find_break(text: str) -> int:
    """The index at which to end a chunk: after a line, else after a word, else anywhere."""
    for separator in ("\n", " "):
        end = text.rfind(separator, 0, MAX_BLOCK_CHARS) + 1
        if end:
            return end
    return MAX_BLOCK_CHARS


def _is_array(path: Path) -> bool:
    """Whether a .json file is an array, and not JSONL."""
    if not has_suffix(path, ".json"):
        return False
    with _open(path) as file:
        return file.read(2**12).removeprefix(codecs.BOM_UTF8).lstrip()[:1] == b"["


def _open(path: Path) -> Any:
    try:
        return path.open("rb")
    except OSError as error:
        raise ConfigError(f"cannot read {path}: {error.strerror or error}") from None
