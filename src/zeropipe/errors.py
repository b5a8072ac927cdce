"""The exceptions that zeropipe raises, and helpers for their messages.

ZeropipeError
  ConfigError        a user's value breaks a rule
    MissingExtra     an optional dependency is not installed
  ScheduleError      a schedule is incomplete, misplaced or malformed
    DeadlockError    some rank of a schedule waits forever
  EngineError        a run on torch.distributed failed
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from reprlib import Repr
from typing import Any, NamedTuple

_REPR = Repr()
_REPR.maxstring = _REPR.maxother = _REPR.maxlong = 60


class ZeropipeError(Exception):
    """Base of all errors that a user may want to catch."""

    json_fields: Mapping[str, Any] = {}  # for the document that a command prints with --json, beside "error"


class ConfigError(ZeropipeError, ValueError):
    """A value breaks a rule; the message names the value, the rule and the way out."""


class MissingExtra(ConfigError):
    """An optional dependency is not installed."""

    def __init__(self, package: str, extra: str) -> None:
        super().__init__(f"this needs {package}, which is not installed: pip install 'zeropipe[{extra}]'")
        self.package, self.extra = package, extra

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self.package, self.extra)


class ScheduleError(ZeropipeError):
    """A schedule breaks one of the laws (complete, placed, well formed)."""


class Stuck(NamedTuple):
    """One rank of a deadlock: the step at which it waits, and for what."""

    rank: int
    step: int
    action: str
    needs: str


class DeadlockError(ScheduleError):
    """Some ranks wait forever; `stuck` names them, their steps and what they wait for."""

    def __init__(self, message: str, stuck: tuple[Stuck, ...] = ()) -> None:
        super().__init__(message)
        self.stuck = stuck


class EngineError(ZeropipeError, RuntimeError):
    """A run failed; the message names the rank and the action."""


def short(value: Any) -> str:
    """The repr of a value in one line, abbreviated if long or deep."""
    text = _REPR.repr(value)
    return " ".join(text.split()) if "\n" in text else text


def first_line(error: BaseException) -> str:
    """The first line of an error's message; the name of its type if the message is empty."""
    lines = [line.strip() for line in str(error).splitlines()] or [type(error).__name__]
    return " ".join(lines[:2] if lines[0].endswith(":") else lines[:1])


def suggest(name: str, known: Sequence[str]) -> str:
    """The way out for an unknown name: the most similar known one, or all of them."""
    from difflib import get_close_matches

    similar = get_close_matches(name, known, n=1)
    return f"did you mean {similar[0]!r}?" if similar else f"use one of {', '.join(known)}"


def require_positive_integers(**values: Any) -> None:
    """ConfigError for the first value that is not a positive integer."""
    for name, value in values.items():
        if type(value) is not int or value < 1:
            raise ConfigError(f"{name}={short(value)}: must be a positive integer")
