"""Values as users give them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from zeropipe.errors import ConfigError, short


def as_python(value: Any) -> Any:
    """Python's own number, or list of them, for one of numpy, torch or jax; anything else as it is."""
    return value.tolist() if hasattr(value, "tolist") else value


def hint(name: str, known: Sequence[str]) -> str:
    """For a name that is not known: the nearest one, or all."""
    from difflib import get_close_matches

    near = get_close_matches(name, known, n=1)
    return f"did you mean {near[0]!r}?" if near else f"known are {', '.join(known)}"


def require_text(value: Any, suffix: str) -> None:
    """ConfigError for what is no text of a file."""
    if not isinstance(value, str):
        raise ConfigError(f"{short(value)} is no text: give what a file holds, Path('mine.{suffix}').read_text()")
