"""Samples on disk: token ids, which of them have a loss, and which samples make a row."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from zeropipe.errors import ConfigError
from zeropipe.train.data.order import Ints, mixed

FACTS = "facts.json"
NO_LOSS = -100  # a label without a loss


class Samples(Protocol):
    """What batches are made of. A row is some samples that stand behind each other."""

    @property
    def num_rows(self) -> int | None:
        """None: there is no end."""
        ...

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


class Part(NamedTuple):
    """Some token ids in a file."""

    file: int  # a number of the files that were asked for; OWN: the ids are kept here
    dtype: str
    first: int  # byte
    size: int  # ids


OWN = -1


@dataclass(frozen=True)
class Facts:
    """What is known about stored samples."""

    num_samples: int
    num_rows: int
    num_tokens: int  # of all samples
    num_losses: int
    parts: tuple[Part, ...]  # where the token ids are, one behind the other
    has_mask: bool
    is_packed: bool  # several samples in some rows
    files: str  # digest of what was read
    tokens: str  # digest of what samples are made of it
    left_out: dict[str, int] = field(default_factory=dict)


class Stored:
    """Samples of a folder, made of some files, read where they are on disk."""

    def __init__(self, folder: Path, files: Sequence[Path]) -> None:
        self.facts = facts = read_facts(folder)
        self._starts = _mapped(folder / "starts", np.int64, facts.num_samples)
        self._lengths = _mapped(folder / "lengths", np.int32, facts.num_samples)
        self._losses = _mapped(folder / "losses", np.int32, facts.num_samples)
        if facts.is_packed:
            self._row_ends = _mapped(folder / "row_ends", np.int64, facts.num_rows)
            self._row_samples = _mapped(folder / "row_samples", np.int64, facts.num_samples)
        self._parts = [
            _mapped(folder / "tokens" if part.file == OWN else files[part.file], part.dtype, part.size, part.first)
            for part in facts.parts
        ]
        self._part_ends = np.cumsum([part.size for part in facts.parts])
        self._mask = _mapped(folder / "mask", np.uint8, int(self._part_ends[-1])) if facts.has_mask else None

    @property
    def num_rows(self) -> int:
        return self.facts.num_rows

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
            labels[self._mask[start : start + length] == 0] = NO_LOSS
        return ids, labels


def _mapped(path: Path, dtype: Any, size: int, first: int = 0) -> NDArray[Any]:
    try:
        return np.memmap(path, dtype=dtype, mode="r", offset=first, shape=(size,))
    except (OSError, ValueError) as error:
        raise ConfigError(f"cannot read {path}: {error}; remove its folder, it is made again") from None


def without_first(ids: NDArray[Any]) -> NDArray[Any]:
    """The labels of a sample: nothing comes before its first token, so that cannot be predicted."""
    labels = ids.copy()
    labels[:1] = NO_LOSS
    return labels


def read_facts(folder: Path) -> Facts:
    try:
        raw = json.loads((folder / FACTS).read_text())
        return Facts(**{**raw, "parts": tuple(Part(*part) for part in raw["parts"])})
    except (OSError, ValueError, TypeError, KeyError) as error:
        raise ConfigError(f"cannot read {folder / FACTS}: {error}; remove its folder, it is made again") from None


def write_facts(folder: Path, facts: Facts) -> None:
    (folder / FACTS).write_text(json.dumps(asdict(facts), indent=1))
