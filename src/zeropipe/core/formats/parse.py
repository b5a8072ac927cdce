"""Parse text from users: JSON and TOML in bounded time and memory, and the values of options."""

from __future__ import annotations

import json
import re
from typing import Any

from zeropipe.core.limits import MAX_DEPTH, MAX_DIGITS, MAX_TOML_CHARACTERS
from zeropipe.errors import ConfigError, short

_LONG_NUMBER = re.compile(rf"[0-9][0-9_]{{{MAX_DIGITS},}}|0x[0-9a-fA-F_]{{{MAX_DIGITS},}}")
# tomllib takes time and memory with the square of a dotted key's length
_LONG_KEY = re.compile(
    rf"""(?<![\w-])(?:(?:[\w-]++|"[^"\n]*+"|'[^'\n]*+')[ \t]*+\.[ \t]*+){{{MAX_DEPTH},}}""",
)


def require_text(value: Any, suffix: str) -> None:
    """ConfigError unless `value` is a str: a path or bytes are common mistakes."""
    if not isinstance(value, str):
        raise ConfigError(f"{short(value)}: must be the text of a file; use Path('mine.{suffix}').read_text()")


def parse_json(text: str) -> Any:
    """The data of a JSON text; ValueError with one line if it is invalid."""
    _require_short_numbers(text)
    try:
        return json.loads(text)
    except RecursionError:
        raise ValueError("its lists are nested too deeply") from None


def parse_toml(text: str) -> dict[str, Any]:
    """The table of a TOML text; ValueError with one line if it is invalid."""
    import tomllib

    if len(text) > MAX_TOML_CHARACTERS:
        raise ValueError(f"it has {len(text):,} characters: must be at most {MAX_TOML_CHARACTERS:,}; write it as JSON")
    _require_short_numbers(text)
    if _LONG_KEY.search(text):
        raise ValueError(f"a key has more than {MAX_DEPTH} parts")
    try:
        return tomllib.loads(text)
    except RecursionError:
        raise ValueError("its tables are nested too deeply") from None


def parse_number(text: str) -> int | float | str:
    """A value of the command line as an int or a float if it is one, else the text itself."""
    for kind in (int, float):
        try:
            return kind(text)
        except ValueError:
            pass
    return text


def parse_value(text: str) -> bool | int | float | str:
    """The value of an option: true or false in any case, or as `parse_number`."""
    return {"true": True, "false": False}.get(text.lower(), parse_number(text))


def _require_short_numbers(text: str) -> None:
    match = _LONG_NUMBER.search(text)
    if match:
        raise ValueError(f"the number {match[0][:20]}... is too long: at most {MAX_DIGITS} digits are supported")
