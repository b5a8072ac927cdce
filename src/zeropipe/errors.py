"""Everything zeropipe raises on purpose.

ZeropipeError
  ConfigError        a value the user gave breaks a rule
    MissingExtra     an optional dependency is not installed
  ScheduleError      a schedule is not complete, not placed or not well formed
    DeadlockError    a schedule in which some rank waits forever
  EngineError        a run on torch.distributed failed
"""

from __future__ import annotations

from reprlib import Repr
from typing import Any, NamedTuple

_SHORT = Repr()
_SHORT.maxstring = _SHORT.maxother = _SHORT.maxlong = 60


def short(value: Any) -> str:
    """A value as Python writes it, cut where it gets long or deep: for messages."""
    text = _SHORT.repr(value)
    return " ".join(text.split()) if "\n" in text else text


def first_line(error: BaseException) -> str:
    """What an error says, in one line; its type where it says nothing."""
    lines = [line.strip() for line in str(error).splitlines()] or [type(error).__name__]
    return " ".join(lines[:2] if lines[0].endswith(":") else lines[:1])


class ZeropipeError(Exception):
    """Base of all errors a user may want to catch."""


class ConfigError(ZeropipeError, ValueError):
    """A value breaks a rule; the message names the value, the rule and the way out."""


class MissingExtra(ConfigError):
    """An optional dependency is needed and not installed."""

    def __init__(self, package: str, extra: str) -> None:
        super().__init__(f"this needs {package}, which is not installed: pip install 'zeropipe[{extra}]'")
        self._given = package, extra

    def __reduce__(self) -> tuple[type[MissingExtra], tuple[str, str]]:
        return MissingExtra, self._given


class ScheduleError(ZeropipeError):
    """A schedule breaks one of the laws (complete, placed, well formed)."""


class Stuck(NamedTuple):
    """One rank of a deadlock: where it stands and what it waits for."""

    rank: int
    step: int
    action: str
    needs: str


class DeadlockError(ScheduleError):
    """Some ranks wait forever; `stuck` says who, where and for what."""

    def __init__(self, message: str, stuck: tuple[Stuck, ...] = ()) -> None:
        super().__init__(message)
        self.stuck = stuck


class EngineError(ZeropipeError, RuntimeError):
    """A run failed; the message names the rank and the action."""


def require_counts(**counts: Any) -> None:
    """ConfigError for the first that is no whole number from 1 on, by its name."""
    for name, value in counts.items():
        if type(value) is not int or value < 1:
            raise ConfigError(f"{name}={short(value)}: a whole number from 1 on is needed")
