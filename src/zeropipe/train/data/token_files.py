"""Files of token ids: samples are ranges of them, and nothing is copied.

A file is a one-dimensional .npy array, or raw little-endian integers. A JSON file beside it, its *sidecar*
(corpus.bin.json for corpus.bin), gives the dtype of a raw file: {"dtype": "uint16"}. It may also give the ends of
documents: after each token {"eos": 0}, or by the indices at which they begin, {"offsets": "documents.npy"}. Without
either the file is one document.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from zeropipe.core.files import has_suffix, read_text
from zeropipe.core.limits import COMMAND_LINE
from zeropipe.errors import ConfigError, first_line, short
from zeropipe.train.data.store import IntArray, SampleWriter, TokenRange
from zeropipe.train.data.tokenizer import require_in_vocabulary

DTYPES = ("uint8", "int16", "uint16", "int32", "uint32", "int64", "uint64")
_IDS_PER_READ = 2**22


@dataclass(frozen=True)
class Sidecar:
    """The description of a file of token ids."""

    file: Path | None = None
    dtype: str | None = None  # of a raw file
    eos: int | None = None
    offsets: Path | None = None

    @property
    def files(self) -> list[Path]:
        """The files that samples depend on."""
        return [path for path in (self.file, self.offsets) if path is not None]


def read_sidecar(path: Path) -> Sidecar:
    """The sidecar of a file of token ids, an empty one if there is none. ConfigError if it is invalid."""
    file = path.with_name(f"{path.name}.json")
    if not file.exists():
        return Sidecar()
    try:
        found = json.loads(read_text(file, COMMAND_LINE))
    except ConfigError:
        raise
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{file} is not JSON: {error}") from None
    rules = {"dtype": (str, "a string"), "eos": (int, "a token id"), "offsets": (str, "the name of a .npy file")}
    if not isinstance(found, dict) or found.keys() - rules.keys():
        raise ConfigError(f"{file} is {short(found)}: must be an object with some of {', '.join(rules)}")
    for name, value in found.items():
        kind, rule = rules[name]
        if not isinstance(value, kind) or isinstance(value, bool):
            raise ConfigError(f"{file}: {name}={short(value)}: must be {rule}")
    if found.get("dtype", DTYPES[0]) not in DTYPES:
        raise ConfigError(f"{file}: dtype={found['dtype']!r}: must be one of {', '.join(DTYPES)}")
    if "eos" in found and "offsets" in found:
        raise ConfigError(f"{file} has eos and offsets; leave out one of them")
    offsets = path.parent / found["offsets"] if "offsets" in found else None
    if offsets is not None and not offsets.is_file():
        raise ConfigError(f"{file}: offsets={found['offsets']!r} does not exist; name a .npy file beside it")
    return Sidecar(file, found.get("dtype"), found.get("eos"), offsets)


def write_token_files(
    files: tuple[Path, ...], writer: SampleWriter, vocabulary: int, report_progress: Callable[[str], None]
) -> tuple[str, list[TokenRange]]:
    """Write the samples of files. Returns a digest of their contents and the ranges of their token ids."""
    digest, ranges, base = hashlib.blake2b(digest_size=16), [], 0  # base: index of the file's first id over all files
    for number, path in enumerate(files):
        sidecar = read_sidecar(path)
        ids = _map_ids(path, sidecar.dtype)
        offsets = None if sidecar.offsets is None else _load_offsets(sidecar.offsets, len(ids))
        begin = 0  # of the current document
        for start in range(0, len(ids), _IDS_PER_READ):
            block = np.asarray(ids[start : start + _IDS_PER_READ])
            require_in_vocabulary(str(path), block, vocabulary, "it has token id")
            digest.update(block.tobytes())
            if sidecar.eos is not None:
                ends = start + 1 + np.flatnonzero(block == sidecar.eos)
                if len(ends):
                    writer.add_documents(base + np.array([begin, *ends[:-1]]), base + ends)
                    begin = int(ends[-1])
            report_progress(f"{path}, {start + len(block):,} of {len(ids):,} tokens")
        if offsets is not None:
            for window in _overlapping_windows(offsets):
                writer.add_documents(base + window[:-1], base + window[1:])
                digest.update(window.tobytes())
        elif begin < len(ids):
            writer.add_documents([base + begin], [base + len(ids)])
        ranges.append(TokenRange(number, ids.dtype.str, int(ids.offset), len(ids)))
        base += len(ids)
    return digest.hexdigest(), ranges


def _map_ids(path: Path, dtype: str | None) -> Any:
    """The ids of a file, memory-mapped."""
    if has_suffix(path, ".npy"):
        return _load_array(path, "token ids")
    if dtype is None:
        raise ConfigError(f'{path} is not a .npy file; write {path.name}.json beside it, like {{"dtype": "uint16"}}')
    size, width = path.stat().st_size, np.dtype(dtype).itemsize
    if size == 0 or size % width:
        raise ConfigError(f"{path} has {size:,} bytes: must be a positive multiple of {width}, the size of {dtype}")
    return np.memmap(path, dtype=np.dtype(dtype).newbyteorder("<"), mode="r")


def _load_array(path: Path, what: str) -> Any:
    try:
        found = np.load(path, mmap_mode="r", allow_pickle=False)
    except (OSError, ValueError, EOFError) as error:
        raise ConfigError(f"cannot read {path}: {first_line(error)}; it must be a .npy file") from None
    if not isinstance(found, np.memmap) or found.ndim != 1 or found.dtype.kind not in "iu" or len(found) == 0:
        shape = f"{getattr(found, 'dtype', '?')}{list(getattr(found, 'shape', ()))}"
        raise ConfigError(f"{path} holds {shape}: must be {what}, integers in one dimension")
    return found


def _load_offsets(path: Path, size: int) -> IntArray:
    """The indices at which documents begin, and the number of tokens."""
    found = np.append(_load_array(path, "offsets of documents").astype(np.int64), size)
    if found[0] != 0 or (np.diff(found) < 0).any():
        raise ConfigError(f"{path}: offsets of documents must ascend from 0 to at most {size:,}, the number of tokens")
    return found[:-1] if found[-2] == size else found


def _overlapping_windows(values: IntArray) -> Iterator[IntArray]:
    """Windows of an array that overlap by one element."""
    for start in range(0, len(values) - 1, _IDS_PER_READ):
        yield values[start : start + _IDS_PER_READ + 1]
