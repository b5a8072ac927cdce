"""The options of `zp.draw`: their defaults, their rules, and the formats that have them."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from typing import Any

from zeropipe.errors import ConfigError
from zeropipe.viz.colors import THEMES

LABELS = ("microbatch", "action", "none")  # texts in boxes
_FIGURE = ("width", "theme", "labels", "memory", "legend", "facts", "title")
OPTIONS: dict[str, tuple[str, ...]] = {
    ".html": ("theme", "labels", "memory", "title"),
    ".svg": _FIGURE,
    ".png": (*_FIGURE, "dpi"),
    ".pdf": _FIGURE,
    ".json": (),
}


@dataclass(frozen=True)
class Style:
    """The options of a figure. `width` is in points (1/72 inch)."""

    width: float = 720.0
    theme: str = "light"
    labels: str = "microbatch"
    memory: bool = False
    legend: bool = True
    facts: bool = True  # makespan, idle time and peak memory beside a timeline's name
    title: str = ""
    dpi: float = 200.0

    def __post_init__(self) -> None:
        _require_choice("theme", self.theme, tuple(THEMES))
        _require_choice("labels", self.labels, LABELS)
        _require_type("memory", self.memory, bool, "must be True or False")
        _require_type("legend", self.legend, bool, "must be True or False")
        _require_type("facts", self.facts, bool, "must be True or False")
        _require_type("title", self.title, str, "must be a string")
        _require_range("width", self.width, 100, 10_000, "must be from 100 to 10000 points (1/72 inch)")
        _require_range("dpi", self.dpi, 20, 2000, "must be from 20 to 2000 dots per inch")

    @property
    def colors(self) -> dict[str, str]:
        return THEMES[self.theme]

    @property
    def is_wide(self) -> bool:
        """Whether it is as wide as a page, not a column: then labels are words."""
        return self.width >= 400


@dataclass(frozen=True)
class PageStyle:
    """The options of an offline page. `memory`: whether the memory curves are shown at first."""

    theme: str = "auto"  # that of the system
    labels: str = "microbatch"
    memory: bool = True
    title: str = ""

    def __post_init__(self) -> None:
        _require_choice("theme", self.theme, ("auto", *THEMES))
        _require_choice("labels", self.labels, LABELS)
        _require_type("memory", self.memory, bool, "must be True or False")
        _require_type("title", self.title, str, "must be a string")


def style_of(suffix: str, options: dict[str, Any]) -> Style | PageStyle | None:
    """The options of a file with that suffix; ConfigError for an unknown option or an invalid value."""
    check_names(suffix, OPTIONS[suffix], options)
    if suffix == ".json":
        return None
    return PageStyle(**options) if suffix == ".html" else Style(**options)


def check_names(where: str, allowed: Collection[str], options: Collection[str]) -> None:
    """ConfigError for an option that is not among those allowed."""
    for name in options:
        if name not in allowed:
            has = f"its options are {', '.join(sorted(allowed))}" if allowed else "it has none"
            raise ConfigError(f"{where} has no option {name!r}: {has}")


def _require_choice(name: str, value: Any, choices: tuple[str, ...]) -> None:
    if value not in choices:
        raise ConfigError(f"{name}={value!r}: must be {', '.join(choices[:-1])} or {choices[-1]}")


def _require_type(name: str, value: Any, kind: type, what: str) -> None:
    if not isinstance(value, kind):
        raise ConfigError(f"{name}={value!r}: {what}")


def _require_range(name: str, value: Any, low: float, high: float, what: str) -> None:
    if isinstance(value, bool) or not isinstance(value, int | float) or not low <= value <= high:
        raise ConfigError(f"{name}={value!r}: {what}")
