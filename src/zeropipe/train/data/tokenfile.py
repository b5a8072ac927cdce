"""Files of token ids: samples are places in them, nothing is copied.

A file is a .npy of one dimension, or raw numbers in the order of bytes that most machines have (little-endian). A JSON
file beside it, corpus.bin.json for corpus.bin, says what a raw file cannot: {"dtype": "uint16"}. It may also say where
documents end: after each token {"eos": 0}, or by the places where they begin, {"offsets": "documents.npy"}. Without
either the file is one document.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from zeropipe.core.files import has_suffix
from zeropipe.errors import ConfigError
from zeropipe.train.data.beside import read_beside
from zeropipe.train.data.store import Part
from zeropipe.train.data.tokenizer import require_known
from zeropipe.train.data.writer import Writer

_CHUNK = 2**22  # numbers that are in memory at once


def write_token_files(
    files: tuple[Path, ...], writer: Writer, vocabulary: int, beat: Callable[[str], None]
) -> tuple[str, list[Part]]:
    """Samples of files: a digest of their contents, and the places of their token ids."""
    digest, parts, before = hashlib.blake2b(digest_size=16), [], 0
    for number, path in enumerate(files):
        beside = read_beside(path)
        ids = _mapped(path, beside.dtype)
        borders = None if beside.offsets is None else _offsets(beside.offsets, len(ids))
        begin = 0  # of the current document
        for start in range(0, len(ids), _CHUNK):
            chunk = np.asarray(ids[start : start + _CHUNK])
            require_known(str(path), chunk, vocabulary, "it has token id")
            digest.update(chunk.tobytes())
            if beside.eos is not None:
                ends = start + 1 + np.flatnonzero(chunk == beside.eos)
                if len(ends):
                    writer.cut(before + np.array([begin, *ends[:-1]]), before + ends)
                    begin = int(ends[-1])
            beat(f"{path}, {start + len(chunk):,} of {len(ids):,} tokens")
        if borders is not None:
            for part in _windows(borders):
                writer.cut(before + part[:-1], before + part[1:])
                digest.update(part.tobytes())
        elif begin < len(ids):
            writer.cut([before + begin], [before + len(ids)])
        parts.append(Part(number, ids.dtype.str, int(ids.offset), len(ids)))
        before += len(ids)
    return digest.hexdigest(), parts


def _mapped(path: Path, dtype: str | None) -> Any:
    """The ids of a file, not read yet."""
    if has_suffix(path, ".npy"):
        return _array(path, "token ids")
    if dtype is None:
        raise ConfigError(f'{path} is not a .npy file: write {path.name}.json beside it, like {{"dtype": "uint16"}}')
    size, width = path.stat().st_size, np.dtype(dtype).itemsize
    if size == 0 or size % width:
        raise ConfigError(f"{path} has {size:,} bytes: not a number of {dtype}, each of which has {width}")
    return np.memmap(path, dtype=np.dtype(dtype).newbyteorder("<"), mode="r")


def _array(path: Path, what: str) -> Any:
    try:
        found = np.load(path, mmap_mode="r", allow_pickle=False)
    except (OSError, ValueError, EOFError) as error:
        reason = " ".join(str(error).split())[:200]
        raise ConfigError(f"cannot read {path}: {reason}; it must be a .npy file") from None
    if not isinstance(found, np.memmap) or found.ndim != 1 or found.dtype.kind not in "iu" or len(found) == 0:
        shape = f"{getattr(found, 'dtype', '?')}{list(getattr(found, 'shape', ()))}"
        raise ConfigError(f"{path} holds {shape}: {what} are needed, whole numbers in one dimension")
    return found


def _offsets(path: Path, size: int) -> NDArray[np.int64]:
    """Where documents begin, and the end."""
    found = np.append(_array(path, "places where documents begin").astype(np.int64), size)
    if found[0] != 0 or (np.diff(found) < 0).any():
        raise ConfigError(f"{path}: places where documents begin must go up from 0 to at most {size:,}, the last token")
    return found[:-1] if found[-2] == size else found


def _windows(values: NDArray[np.int64]) -> Iterator[NDArray[np.int64]]:
    """Parts of a list that overlap by one."""
    for start in range(0, len(values) - 1, _CHUNK):
        yield values[start : start + _CHUNK + 1]
