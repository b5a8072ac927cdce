"""Samples on their way to the disk."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from zeropipe.train.data.store import OWN, Facts, Part

_DOCUMENTS = 4096  # that are cut together


class Writer:
    """Samples go to the disk as they come: in memory is only what was given last."""

    def __init__(self, folder: Path, sequence: int, vocabulary: int, *, has_mask: bool) -> None:
        self._sequence, self._has_mask = sequence, has_mask
        self._dtype = np.dtype(np.uint16 if vocabulary <= 2**16 else np.uint32)
        self._files = {name: (folder / name).open("wb") for name in ("starts", "lengths", "losses", "tokens", "mask")}
        self._digests = {name: hashlib.blake2b(digest_size=16) for name in self._files}
        self._written = 0  # token ids
        self._ends = [0]  # of documents that are not cut yet; the first is where they begin
        self.num_samples = self.num_tokens = self.num_losses = 0
        self.left_out: dict[str, int] = {}

    def leave_out(self, why: str, number: int = 1) -> None:
        """Count what is no sample."""
        if number:
            self.left_out[why] = self.left_out.get(why, 0) + number

    def extend(self, ids: NDArray[Any]) -> None:
        """More token ids of the current document."""
        self._put("tokens", ids, self._dtype)
        self._written += len(ids)

    def end_document(self) -> None:
        """The current document is complete: it will be cut into samples."""
        self._ends.append(self._written)
        if len(self._ends) > _DOCUMENTS:
            self._cut_documents()

    def _cut_documents(self) -> None:
        self.cut(self._ends[:-1], self._ends[1:])
        self._ends = self._ends[-1:]

    def cut(self, starts: ArrayLike, ends: ArrayLike) -> None:
        """Samples of documents, each from the token at its start to the one before its end.

        Samples of a document overlap by a token, because the first token of a sample is not predicted: so every token
        but the first of the document is predicted once.
        """
        begins, stops = np.asarray(starts, dtype=np.int64), np.asarray(ends, dtype=np.int64)
        step = self._sequence - 1
        numbers = np.maximum(0, -(-(stops - begins - 1) // step))
        within = np.arange(numbers.sum()) - np.repeat(np.cumsum(numbers) - numbers, numbers)
        places = np.repeat(begins, numbers) + within * step
        lengths = np.minimum(self._sequence, np.repeat(stops, numbers) - places)
        self._samples(places, lengths, lengths - 1)
        self.leave_out("documents of less than two tokens", int((numbers == 0).sum()))

    def add(self, ids: NDArray[Any], mask: NDArray[Any]) -> None:
        """A sample of which only some tokens have a loss."""
        start = self._written
        self.extend(ids)
        self._put("mask", mask, np.uint8)
        self._samples(np.array([start]), np.array([len(ids)]), np.array([int(mask[1:].sum())]))

    def _samples(self, starts: NDArray[Any], lengths: NDArray[Any], losses: NDArray[Any]) -> None:
        self._put("starts", starts, np.int64)
        self._put("lengths", lengths, np.int32)
        self._put("losses", losses, np.int32)
        self.num_samples += len(starts)
        self.num_tokens += int(lengths.sum())
        self.num_losses += int(losses.sum())

    def _put(self, name: str, values: NDArray[Any], dtype: Any) -> None:
        data = values.astype(dtype).tobytes()
        self._digests[name].update(data)
        self._files[name].write(data)

    def finish(self) -> None:
        """All has been given."""
        self._cut_documents()

    def close(self) -> None:
        """What is written is in the files; those that were not needed are gone."""
        for file in self._files.values():
            file.close()
            if Path(file.name).stat().st_size == 0:
                Path(file.name).unlink()

    def facts(self, num_rows: int, files: str, parts: Iterable[Part] = ()) -> Facts:
        """What is known, once all samples and rows are there. `parts`: token ids that stayed in files of others."""
        digest = hashlib.blake2b(b"".join(one.digest() for one in self._digests.values()), digest_size=16)
        return Facts(
            self.num_samples, num_rows, self.num_tokens, self.num_losses,
            tuple(parts) or (Part(OWN, self._dtype.str, 0, self._written),), self._has_mask,
            num_rows < self.num_samples, files, digest.hexdigest(), self.left_out,
        )  # fmt: skip
