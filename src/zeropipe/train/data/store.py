"""Samples on disk: token ids, which of them have a loss, and the samples of each row. Written once, then memory-mapped.

    starts, lengths, losses   of each sample: its first token, the number of its tokens, and of those with a loss
    tokens, mask              token ids, and 1 for those with a loss
    row_ends, row_samples     the samples of each row, if some rows have several
    facts.json                StoreInfo

Files of token ids are not copied: then `tokens` is missing, and facts.json has the ranges of their ids.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import numpy as np
from numpy.typing import ArrayLike, NDArray

from zeropipe.errors import ConfigError
from zeropipe.train.data.rows import IntArray, hash_integers

INFO_FILE = "facts.json"
IGNORE_INDEX = -100  # label of a token without a loss
OWN_TOKENS = -1  # TokenRange.file: `tokens` of the store itself
_MAX_PENDING_DOCUMENTS = 4096
# names in facts.json that differ from those of StoreInfo
_JSON_NAMES = {"token_ranges": "parts", "source_digest": "files", "sample_digest": "tokens", "skipped": "left_out"}


class Samples(Protocol):
    """The source of batches. A row is one or more samples, one after the other."""

    @property
    def num_rows(self) -> int | None:
        """None: there is no end."""
        ...

    def samples_in_row(self, row: int) -> IntArray: ...

    def lengths(self, samples: IntArray) -> IntArray:
        """The number of tokens of each sample."""
        ...

    def loss_counts(self, samples: IntArray) -> IntArray:
        """The number of tokens with a loss of each sample."""
        ...

    def read(self, sample: int) -> tuple[NDArray[Any], NDArray[Any]]:
        """Token ids and labels of a sample."""
        ...


@dataclass(frozen=True)
class SyntheticSamples:
    """Random tokens without an end. Every row is one sample."""

    sequence: int
    vocabulary: int
    seed: int
    num_rows: None = None

    def samples_in_row(self, row: int) -> IntArray:
        return np.array([row], dtype=np.int64)

    def lengths(self, samples: IntArray) -> IntArray:
        return np.full(len(samples), self.sequence, dtype=np.int64)

    def loss_counts(self, samples: IntArray) -> IntArray:
        return self.lengths(samples) - 1

    def read(self, sample: int) -> tuple[NDArray[Any], NDArray[Any]]:
        numbers = hash_integers(np.arange(self.sequence, dtype=np.uint64), self.seed, sample)
        ids = (numbers % np.uint64(self.vocabulary)).astype(np.int64)
        return ids, _make_labels(ids)


class TokenRange(NamedTuple):
    """Consecutive token ids in a file."""

    file: int  # index into the requested files, or OWN_TOKENS
    dtype: str
    first: int  # byte
    size: int  # number of ids


@dataclass(frozen=True)
class StoreInfo:
    """The contents of a store."""

    num_samples: int
    num_rows: int
    num_tokens: int  # of all samples
    num_losses: int  # tokens with a loss
    token_ranges: tuple[TokenRange, ...]  # concatenated, they are the token ids that `starts` indexes
    has_mask: bool
    is_packed: bool  # some rows have several samples
    source_digest: str
    sample_digest: str
    skipped: dict[str, int] = field(default_factory=dict)  # reason -> number of documents or chats
    chat_formats: dict[str, int] = field(default_factory=dict)  # format -> number of chats
    example: str = ""  # the first chat, with the tokens that have a loss in brackets

    def save(self, folder: Path) -> None:
        data = {_JSON_NAMES.get(name, name): value for name, value in asdict(self).items()}
        (folder / INFO_FILE).write_text(json.dumps(data, indent=1))

    @staticmethod
    def load(folder: Path) -> StoreInfo:
        try:
            data = json.loads((folder / INFO_FILE).read_text())
            values = {name: data[_JSON_NAMES.get(name, name)] for name in StoreInfo.__dataclass_fields__}
            values["token_ranges"] = tuple(TokenRange(*one) for one in values["token_ranges"])
            return StoreInfo(**values)
        except (OSError, ValueError, TypeError, KeyError) as error:
            raise _unreadable(folder / INFO_FILE, error) from None


class StoredSamples:
    """The samples of a store. `files` are those of the request that it was written for."""

    def __init__(self, folder: Path, files: Sequence[Path]) -> None:
        self.info = info = StoreInfo.load(folder)
        self._starts = _map_array(folder / "starts", np.int64, info.num_samples)
        self._lengths = _map_array(folder / "lengths", np.int32, info.num_samples)
        self._losses = _map_array(folder / "losses", np.int32, info.num_samples)
        if info.is_packed:
            self._row_ends = _map_array(folder / "row_ends", np.int64, info.num_rows)
            self._row_samples = _map_array(folder / "row_samples", np.int64, info.num_samples)
        self._tokens = [
            _map_array(folder / "tokens" if own.file == OWN_TOKENS else files[own.file], own.dtype, own.size, own.first)
            for own in info.token_ranges
        ]
        self._range_ends = np.cumsum([own.size for own in info.token_ranges])
        self._mask = _map_array(folder / "mask", np.uint8, int(self._range_ends[-1])) if info.has_mask else None

    @property
    def num_rows(self) -> int:
        return self.info.num_rows

    def samples_in_row(self, row: int) -> IntArray:
        if not self.info.is_packed:
            return np.array([row], dtype=np.int64)
        start = int(self._row_ends[row - 1]) if row else 0
        return np.array(self._row_samples[start : int(self._row_ends[row])])

    def lengths(self, samples: IntArray) -> IntArray:
        return self._lengths[samples].astype(np.int64)

    def loss_counts(self, samples: IntArray) -> IntArray:
        return self._losses[samples].astype(np.int64)

    def read(self, sample: int) -> tuple[NDArray[Any], NDArray[Any]]:
        start, length = int(self._starts[sample]), int(self._lengths[sample])
        index = int(np.searchsorted(self._range_ends, start, side="right"))
        first = start - (int(self._range_ends[index - 1]) if index else 0)
        ids = self._tokens[index][first : first + length].astype(np.int64)
        labels = _make_labels(ids)
        if self._mask is not None:
            labels[self._mask[start : start + length] == 0] = IGNORE_INDEX
        return ids, labels


def _map_array(path: Path, dtype: Any, size: int, first: int = 0) -> NDArray[Any]:
    try:
        return np.memmap(path, dtype=dtype, mode="r", offset=first, shape=(size,))
    except (OSError, ValueError) as error:
        raise _unreadable(path, error) from None


def _unreadable(path: Path, error: Exception) -> ConfigError:
    return ConfigError(f"cannot read {path}: {error}; delete its folder to create it again")


def _make_labels(ids: NDArray[Any]) -> NDArray[Any]:
    """The labels of a sample. Its first token has none, because no token comes before it."""
    labels = ids.copy()
    labels[:1] = IGNORE_INDEX
    return labels


class SampleWriter:
    """Writes samples to a folder as they come, with bounded memory."""

    def __init__(self, folder: Path, sequence: int, vocabulary: int, *, has_mask: bool) -> None:
        self._sequence, self._has_mask = sequence, has_mask
        self._dtype = np.dtype(np.uint16 if vocabulary <= 2**16 else np.uint32)
        self._files = {name: (folder / name).open("wb") for name in ("starts", "lengths", "losses", "tokens", "mask")}
        self._digests = {name: hashlib.blake2b(digest_size=16) for name in self._files}
        self._num_written = 0  # token ids
        self._ends = [0]  # of documents without samples yet; the first entry is where they begin
        self.num_samples = self.num_tokens = self.num_losses = 0
        self.skipped: dict[str, int] = {}
        self.chat_formats: dict[str, int] = {}
        self.example = ""

    def skip(self, reason: str, number: int = 1) -> None:
        """Count documents or chats that are not made into samples."""
        if number:
            self.skipped[reason] = self.skipped.get(reason, 0) + number

    def count_format(self, name: str) -> None:
        """Count a chat of this format."""
        self.chat_formats[name] = self.chat_formats.get(name, 0) + 1

    def add_tokens(self, ids: NDArray[Any]) -> None:
        """Append token ids to the current document."""
        self._write("tokens", ids, self._dtype)
        self._num_written += len(ids)

    def end_document(self) -> None:
        self._ends.append(self._num_written)
        if len(self._ends) > _MAX_PENDING_DOCUMENTS:
            self._flush_documents()

    def _flush_documents(self) -> None:
        self.add_documents(self._ends[:-1], self._ends[1:])
        self._ends = self._ends[-1:]

    def add_documents(self, starts: ArrayLike, ends: ArrayLike) -> None:
        """Add the samples of documents, each a range of token ids.

        The samples of a document overlap by one token: the first token of a sample has no loss, so every token but the
        first of the document has a loss once.
        """
        begins, stops = np.asarray(starts, dtype=np.int64), np.asarray(ends, dtype=np.int64)
        stride = self._sequence - 1
        counts = np.maximum(0, -(-(stops - begins - 1) // stride))  # samples of each document
        within = np.arange(counts.sum()) - np.repeat(np.cumsum(counts) - counts, counts)
        firsts = np.repeat(begins, counts) + within * stride
        lengths = np.minimum(self._sequence, np.repeat(stops, counts) - firsts)
        self._add_samples(firsts, lengths, lengths - 1)
        self.skip("documents of less than two tokens", int((counts == 0).sum()))

    def add_sample(self, ids: NDArray[Any], mask: NDArray[Any]) -> None:
        """Add a sample in which only the tokens of `mask` have a loss."""
        start = self._num_written
        self.add_tokens(ids)
        self._write("mask", mask, np.uint8)
        self._add_samples(np.array([start]), np.array([len(ids)]), np.array([int(mask[1:].sum())]))

    def _add_samples(self, starts: NDArray[Any], lengths: NDArray[Any], losses: NDArray[Any]) -> None:
        self._write("starts", starts, np.int64)
        self._write("lengths", lengths, np.int32)
        self._write("losses", losses, np.int32)
        self.num_samples += len(starts)
        self.num_tokens += int(lengths.sum())
        self.num_losses += int(losses.sum())

    def _write(self, name: str, values: NDArray[Any], dtype: Any) -> None:
        data = values.astype(dtype).tobytes()
        self._digests[name].update(data)
        self._files[name].write(data)

    def finish(self) -> None:
        """Add the samples of the last documents."""
        self._flush_documents()

    def close(self) -> None:
        """Close the files, and remove empty ones."""
        for file in self._files.values():
            file.close()
            if Path(file.name).stat().st_size == 0:
                Path(file.name).unlink()

    def make_info(self, num_rows: int, source_digest: str, ranges: Iterable[TokenRange] = ()) -> StoreInfo:
        """Describe the samples. `ranges`: of token ids that were not copied."""
        digest = hashlib.blake2b(b"".join(one.digest() for one in self._digests.values()), digest_size=16)
        return StoreInfo(
            self.num_samples, num_rows, self.num_tokens, self.num_losses,
            tuple(ranges) or (TokenRange(OWN_TOKENS, self._dtype.str, 0, self._num_written),), self._has_mask,
            num_rows < self.num_samples, source_digest, digest.hexdigest(), self.skipped,
            self.chat_formats, self.example,
        )  # fmt: skip
