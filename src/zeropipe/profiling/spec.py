"""The job of `zeropipe profile`: a model and the settings to measure. Imports no torch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

from zeropipe.core.model.checkpointing import Checkpointing
from zeropipe.errors import ConfigError


class ProfileSetting(NamedTuple):
    """How the layers run."""

    ac: str
    microbatch_size: int
    compile: bool

    def __str__(self) -> str:
        how = "compiled" if self.compile else "eager"
        return f"ac {self.ac}, microbatches of {self.microbatch_size}, {how}"


@dataclass(frozen=True)
class ProfileJob:
    """A model (its name, and a directory or a config) and the settings to measure it in."""

    name: str
    source: str | Mapping[str, Any]
    settings: tuple[ProfileSetting, ...] = (ProfileSetting("none", 1, False),)
    sequence: int = 128
    device: str = "cpu"
    dtype: str = "float32"
    steps: int = 5
    microbatches: int = 4  # of a step
    seed: int = 0
    sample: int | None = None  # tokens of a packed sample


def list_settings(
    modes: tuple[str, ...], sizes: tuple[int, ...], compiles: tuple[bool, ...]
) -> tuple[ProfileSetting, ...]:
    """Every combination. `selective:N` combines `none` and `full`, which are measured instead."""
    found: dict[ProfileSetting, None] = {}
    for compile in compiles:
        for size in sizes:
            for text in modes:
                checkpointing = Checkpointing.parse(text)
                for mode in ("none", "full") if checkpointing.every > 1 else (text,):
                    if checkpointing.mode == "budget" and not compile:
                        continue  # only the compiler has a memory budget
                    found[ProfileSetting(mode, size, compile)] = None
    if not found:
        raise ConfigError(f"--ac {','.join(modes)}: only compiled blocks have a memory budget; use --compile")
    return tuple(found)
