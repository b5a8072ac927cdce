"""Parse text from users: JSON and TOML in bounded time and memory, and the values of options."""

from __future__ import annotations

import json
import re
from typing import Any

from zeropipe.core.limits import MAX_DEPTH, MAX_DIGITS, MAX_TOML
from zeropipe.errors import ConfigError, short

_LONG_NUMBER = re.compile(rf"[0-9][0-9_]{{{MAX_DIGITS},}}|0x[0-9a-fA-F_]{{{MAX_DIGITS},}}")
# tomllib takes time and memory with the square of a dotted key's length; a key begins where no word goes on
_LONG_KEY = re.compile(
    rf"""(?<![\w-])(?:(?:[\w-]++|"[^"\n]*+"|'[^'\n]*+')[ \t]*+\.[ \t]*+){{{MAX_DEPTH},}}""",
)


def require_text(value: Any, suffix: str) -> None:
    """ConfigError for a value that is not the text of a file."""
    if not isinstance(value, str):
        raise ConfigError(f"{short(value)}: must be the text of a file; use Path('mine.{suffix}').read_text()")


def parse_json(text: str) -> Any:
    """The data of a JSON text."""
    _require_short_numbers(text)
    try:
        return json.loads(text)
    except RecursionError:
        raise ValueError("its lists are nested too deeply") from None


def parse_toml(text: str) -> dict[str, Any]:
    """The table of a TOML text."""
    import tomllib

    if len(text) > MAX_TOML:
        raise ValueError(f"it is {len(text):,} characters long, at most {MAX_TOML:,} are read: write it as JSON")
    _require_short_numbers(text)
    if _LONG_KEY.search(text):
        raise ValueError(f"a key has more than {MAX_DEPTH} parts")
    try:
        return tomllib.loads(text)
    except RecursionError:
        raise ValueError("its tables are nested too deeply") from None


def number_or_text(text: str) -> int | float | str:
    """What a value on the command line means: a whole number, a number, or the text itself."""
    for kind in (int, float):
        try:
            return kind(text)
        except ValueError:
            pass
    return text


def value_or_text(text: str) -> bool | int | float | str:
    """What the value of an option means: as above, or yes and no as Python, TOML and JSON write them."""
    return {"true": True, "false": False}.get(text.lower(), number_or_text(text))


def _require_short_numbers(text: str) -> None:
    found = _LONG_NUMBER.search(text)
    if found:
        raise ValueError(f"the number {found[0][:20]}... is too long: at most {MAX_DIGITS} digits are read")
