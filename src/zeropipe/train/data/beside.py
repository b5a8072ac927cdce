"""What a JSON file beside a file of token ids says about it: corpus.bin.json about corpus.bin."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

from zeropipe.core.files import read_text
from zeropipe.core.limits import COMMAND_LINE
from zeropipe.errors import ConfigError, short

DTYPES = ("uint8", "int16", "uint16", "int32", "uint32", "int64", "uint64")


@dataclass(frozen=True)
class Beside:
    """The dtype of a raw file, and where documents end: after a token, or at places that a .npy file has."""

    file: Path | None = None
    dtype: str | None = None
    eos: int | None = None
    offsets: Path | None = None

    @property
    def files(self) -> list[Path]:
        """Those that samples depend on."""
        return [path for path in (self.file, self.offsets) if path is not None]


def read_beside(path: Path) -> Beside:
    """ConfigError for a file that is there and wrong."""
    beside = path.with_name(f"{path.name}.json")
    if not beside.exists():
        return Beside()
    try:
        found = json.loads(read_text(beside, COMMAND_LINE))
    except ConfigError:
        raise
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{beside} is not JSON: {error}") from None
    if not isinstance(found, dict) or found.keys() - {"dtype", "eos", "offsets"}:
        raise ConfigError(f"{beside} is {short(found)}: give an object with some of dtype, eos, offsets")
    rules = {"dtype": (str, "a text"), "eos": (int, "a token id"), "offsets": (str, "the name of a .npy file")}
    for name, value in found.items():
        kind, what = rules[name]
        if not isinstance(value, kind) or isinstance(value, bool):
            raise ConfigError(f"{beside}: {name}={short(value)}: {what} is needed")
    if found.get("dtype", DTYPES[0]) not in DTYPES:
        raise ConfigError(f"{beside}: dtype={found['dtype']!r}: give one of {', '.join(DTYPES)}")
    if "eos" in found and "offsets" in found:
        raise ConfigError(f"{beside} has eos and offsets: give one of them")
    offsets = path.parent / found["offsets"] if "offsets" in found else None
    if offsets is not None and not offsets.is_file():
        raise ConfigError(f"{beside}: offsets={found['offsets']!r} is not there: give a .npy file beside it")
    return Beside(beside, found.get("dtype"), found.get("eos"), offsets)
