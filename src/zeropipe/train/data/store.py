"""Samples on disk: token ids, which of them have a loss, and which samples make a row."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from zeropipe.errors import ConfigError
from zeropipe.train.data.order import Ints, mixed

FACTS = "facts.json"


class Samples(Protocol):
    """What batches are made of. A row is some samples that stand behind each other."""

    @property
    def num_rows(self) -> int | None:
        """None: there is no end."""
        ...

    @property
    def num_samples(self) -> int | None: ...

    def samples_of(self, row: int) -> Ints: ...

    def lengths(self, samples: Ints) -> Ints:
        """Tokens of some samples."""
        ...

    def losses(self, samples: Ints) -> Ints:
        """Tokens with a loss of some samples."""
        ...

    def read(self, sample: int) -> tuple[NDArray[Any], NDArray[Any]]:
        """Token ids and labels of one sample."""
        ...


@dataclass(frozen=True)
class Synthetic:
    """Random tokens, without an end: a row is a sample."""

    sequence: int
    vocabulary: int
    seed: int
    num_rows: None = None
    num_samples: None = None

    def samples_of(self, row: int) -> Ints:
        return np.array([row], dtype=np.int64)

    def lengths(self, samples: Ints) -> Ints:
        return np.full(len(samples), self.sequence, dtype=np.int64)

    def losses(self, samples: Ints) -> Ints:
        return self.lengths(samples) - 1

    def read(self, sample: int) -> tuple[NDArray[Any], NDArray[Any]]:
        numbers = mixed(np.arange(self.sequence, dtype=np.uint64), self.seed, sample)
        ids = (numbers % np.uint64(self.vocabulary)).astype(np.int64)
        return ids, without_first(ids)


@dataclass(frozen=True)
class Facts:
    """What is known about stored samples."""

    num_samples: int
    num_rows: int
    num_tokens: int  # of all samples
    num_losses: int
    dtype: str  # of the token ids
    parts: tuple[tuple[str, int, int], ...]  # files of token ids: name, first byte, number of ids
    has_mask: bool
    is_packed: bool  # several samples in some rows
    files: str  # digest of what was read
    tokens: str  # digest of what samples are made of it
    left_out: dict[str, int] = field(default_factory=dict)


class Stored:
    """Samples of a folder, read where they are on disk."""

    def __init__(self, folder: Path) -> None:
        raw = json.loads((folder / FACTS).read_text())
        self.facts = Facts(**{**raw, "parts": tuple(map(tuple, raw["parts"]))})
        facts = self.facts
        self._starts = _mapped(folder / "starts", np.int64, facts.num_samples)
        self._lengths = _mapped(folder / "lengths", np.int32, facts.num_samples)
        self._losses = _mapped(folder / "losses", np.int32, facts.num_samples)
        if facts.is_packed:
            self._row_ends = _mapped(folder / "row_ends", np.int64, facts.num_rows)
            self._row_samples = _mapped(folder / "row_samples", np.int64, facts.num_samples)
        self._parts = [_mapped(folder / name, facts.dtype, size, first) for name, first, size in facts.parts]
        self._part_ends = np.cumsum([size for _, _, size in facts.parts])
        self._mask = _mapped(folder / "mask", np.uint8, int(self._part_ends[-1])) if facts.has_mask else None

    @property
    def num_rows(self) -> int:
        return self.facts.num_rows

    @property
    def num_samples(self) -> int:
        return self.facts.num_samples

    def samples_of(self, row: int) -> Ints:
        if not self.facts.is_packed:
            return np.array([row], dtype=np.int64)
        start = int(self._row_ends[row - 1]) if row else 0
        return np.array(self._row_samples[start : int(self._row_ends[row])])

    def lengths(self, samples: Ints) -> Ints:
        return self._lengths[samples].astype(np.int64)

    def losses(self, samples: Ints) -> Ints:
        return self._losses[samples].astype(np.int64)

    def read(self, sample: int) -> tuple[NDArray[Any], NDArray[Any]]:
        start, length = int(self._starts[sample]), int(self._lengths[sample])
        part = int(np.searchsorted(self._part_ends, start, side="right"))
        first = start - (int(self._part_ends[part - 1]) if part else 0)
        ids = self._parts[part][first : first + length].astype(np.int64)
        labels = without_first(ids)
        if self._mask is not None:
            labels[self._mask[start : start + length] == 0] = -100
        return ids, labels


def _mapped(path: Path, dtype: Any, size: int, first: int = 0) -> NDArray[Any]:
    try:
        return np.memmap(path, dtype=dtype, mode="r", offset=first, shape=(size,))
    except (OSError, ValueError) as error:
        raise ConfigError(f"cannot read {path}: {error}; remove its folder, it is made again") from None


def without_first(ids: NDArray[Any]) -> NDArray[Any]:
    """The labels of a sample: nothing comes before its first token, so that cannot be predicted."""
    labels = ids.copy()
    labels[:1] = -100
    return labels


class Writer:
    """Samples go to the disk as they come; in memory are only those of one block."""

    def __init__(self, folder: Path, dtype: str, has_mask: bool, sequence: int) -> None:
        self._folder, self._dtype, self._has_mask, self._sequence = folder, np.dtype(dtype), has_mask, sequence
        names = ["starts", "lengths", "losses", *(["tokens"] if dtype else []), *(["mask"] if has_mask else [])]
        self._files = {name: (folder / name).open("wb") for name in names}
        self._digest = hashlib.blake2b(digest_size=16)
        self._written = self._document = 0  # token ids; those before the current document
        self.num_samples = self.num_tokens = self.num_losses = 0
        self.left_out: dict[str, int] = {}

    def leave_out(self, why: str) -> None:
        self.left_out[why] = self.left_out.get(why, 0) + 1

    def extend(self, ids: NDArray[Any]) -> None:
        """More token ids of the current document."""
        data = ids.astype(self._dtype)
        self._put("tokens", data)
        self._written += len(data)

    def end_document(self) -> None:
        """Cut the current document into samples that overlap by a token: each but its first is predicted once."""
        self.cut(self._document, self._written)
        self._document = self._written

    def cut(self, start: int, end: int) -> None:
        """Samples of the tokens from `start` to `end`."""
        if end - start < 2:
            self.leave_out("documents of less than two tokens")
            return
        starts = np.arange(start, end - 1, self._sequence - 1, dtype=np.int64)
        lengths = np.minimum(self._sequence, end - starts).astype(np.int32)
        self._samples(starts, lengths, lengths - 1)

    def add(self, ids: NDArray[Any], mask: NDArray[np.uint8]) -> None:
        """A whole sample, of which some tokens have a loss."""
        losses = int(mask[1:].sum())
        self._put("mask", mask)
        start = self._written
        self.extend(ids)
        self._document = self._written
        one = np.array([start]), np.array([len(ids)]), np.array([losses])
        self._samples(*one)

    def _samples(self, starts: Ints, lengths: NDArray[Any], losses: NDArray[Any]) -> None:
        self._put("starts", starts.astype(np.int64))
        self._put("lengths", lengths.astype(np.int32))
        self._put("losses", losses.astype(np.int32))
        self.num_samples += len(starts)
        self.num_tokens += int(lengths.sum())
        self.num_losses += int(losses.sum())

    def _put(self, name: str, data: NDArray[Any]) -> None:
        raw = np.ascontiguousarray(data).tobytes()
        self._digest.update(raw)
        self._files[name].write(raw)

    def close(self) -> None:
        for file in self._files.values():
            file.close()

    def facts(
        self, num_rows: int, is_packed: bool, files: str, parts: Iterable[tuple[str, int, int]] | None = None
    ) -> Facts:
        """What is known, once all samples and rows are there."""
        return Facts(
            self.num_samples, num_rows, self.num_tokens, self.num_losses, self._dtype.str,
            tuple(parts) if parts is not None else (("tokens", 0, self._written),), self._has_mask, is_packed, files,
            self._digest.hexdigest(), self.left_out,
        )  # fmt: skip


def write_facts(folder: Path, facts: Facts) -> None:
    (folder / FACTS).write_text(json.dumps(asdict(facts), indent=1))


def counted(left_out: dict[str, int]) -> str:
    """`3 chats longer than 512 tokens, 1 empty document`."""
    return ", ".join(f"{number:,} {why}" for why, number in left_out.items())


__all__: Sequence[str] = (
    "Facts",
    "Samples",
    "Stored",
    "Synthetic",
    "Writer",
    "counted",
    "without_first",
    "write_facts",
)
