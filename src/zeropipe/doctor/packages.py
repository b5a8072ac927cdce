"""The extras of zeropipe, and which of their packages are installed in which version."""

from __future__ import annotations

import re
from collections.abc import Iterable
from importlib import metadata
from typing import NamedTuple

USES = {
    "draw": "figures (.png, .pdf)",
    "app": "zeropipe app",
    "search": "proofs of optimal schedules",
    "engine": "zeropipe run, profile; models",
    "train": "zeropipe train",
    "all": "all of these",
    "peft": "LoRA",
    "tensorboard": "TensorBoard logs",
    "wandb": "Weights & Biases logs",
    "datasets": "Parquet and Arrow data",
    "trainer": "transformers' Trainer, TRL",
}
_REQUIREMENT = re.compile(
    r"(?P<name>[\w.-]+)(?:\[(?P<extras>[^]]*)\])?(?:>=(?P<least>[\d.]+))?(?:;.*\bextra == ['\"](?P<extra>[\w-]+)['\"])?"
)


class Package(NamedTuple):
    """A package that an extra needs."""

    name: str
    least: str  # the oldest version that works; empty for any
    version: str | None  # None if it is not installed

    @property
    def is_usable(self) -> bool:
        return self.version is not None and parse_version(self.version) >= parse_version(self.least)


class Extra(NamedTuple):
    """An extra, `pip install 'zeropipe[name]'`, and all packages that it needs."""

    name: str
    packages: tuple[Package, ...]

    @property
    def missing(self) -> tuple[Package, ...]:
        return tuple(package for package in self.packages if not package.is_usable)

    @property
    def command(self) -> str:
        return f"pip install 'zeropipe[{self.name}]'"


def list_extras() -> tuple[Extra, ...]:
    """All extras; none if zeropipe is imported from a folder without being installed."""
    try:
        lines = metadata.requires("zeropipe") or []
    except metadata.PackageNotFoundError:
        return ()
    needs = read_requirements(lines)
    return tuple(Extra(name, tuple(map(_find, sorted(needs[name].items())))) for name in USES if name in needs)


def read_requirements(lines: Iterable[str]) -> dict[str, dict[str, str]]:
    """Per extra, the packages that it needs with their oldest versions, with those of extras that it names."""
    needs: dict[str, dict[str, str]] = {}
    others: dict[str, set[str]] = {}
    for line in lines:
        found = _REQUIREMENT.match(line.replace(" ", "").replace("extra==", "extra == "))
        if found is None or found["extra"] is None:
            continue  # of the base: without it, zeropipe would not have started
        needs.setdefault(found["extra"], {})
        if found["name"] == "zeropipe":
            others.setdefault(found["extra"], set()).update(found["extras"].split(","))
        else:
            needs[found["extra"]][found["name"]] = found["least"] or ""
    return {extra: {**_collect(extra, needs, others)} for extra in needs}


def _collect(extra: str, needs: dict[str, dict[str, str]], others: dict[str, set[str]]) -> dict[str, str]:
    found = dict(needs[extra])
    for other in others.get(extra, ()):
        found |= _collect(other, needs, others)
    return found


def _find(need: tuple[str, str]) -> Package:
    name, least = need
    return Package(name, least, installed_version(name))


def installed_version(name: str) -> str | None:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None


def parse_version(text: str) -> tuple[int, ...]:
    """The leading numbers of a version: (2, 13, 0) of `2.13.0+cpu`."""
    numbers = re.match(r"\d+(?:\.\d+)*", text)
    return tuple(map(int, numbers[0].split("."))) if numbers else ()
