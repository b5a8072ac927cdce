"""What `zeropipe profile` is asked to measure, checked before anything starts: no torch here."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

from zeropipe.core.model.checkpointing import Checkpointing
from zeropipe.errors import ConfigError


class Setting(NamedTuple):
    """One way to run the layers."""

    ac: str
    microbatch_size: int
    compile: bool

    def __str__(self) -> str:
        how = "compiled" if self.compile else "eager"
        return f"ac {self.ac}, microbatches of {self.microbatch_size}, {how}"


@dataclass(frozen=True)
class ProfileJob:
    """A model (its name, and a directory or a config as plain data) and the settings to measure it in."""

    name: str
    source: str | Mapping[str, Any]
    settings: tuple[Setting, ...] = (Setting("none", 1, False),)
    sequence: int = 128
    device: str = "cpu"
    dtype: str = "float32"
    steps: int = 5
    microbatches: int = 4  # of a step
    seed: int = 0


def settings_of(modes: tuple[str, ...], sizes: tuple[int, ...], compiles: tuple[bool, ...]) -> tuple[Setting, ...]:
    """Every combination. `selective:N` is put together from `none` and `full`, which are measured instead."""
    wanted: dict[Setting, None] = {}
    for compile in compiles:
        for size in sizes:
            for text in modes:
                wish = Checkpointing.parse(text)
                for mode in ("none", "full") if wish.every > 1 else (text,):
                    if wish.mode == "budget" and not compile:
                        continue  # the compiler keeps the budget: there is none without it
                    wanted[Setting(mode, size, compile)] = None
    if not wanted:
        raise ConfigError(f"--ac {','.join(modes)}: only compiled blocks keep a memory budget: give --compile")
    return tuple(wanted)
