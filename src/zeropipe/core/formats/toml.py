"""Write TOML."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any


def format_value(value: Any) -> str:
    """A string, number, boolean or list in TOML, which is JSON except for one character."""
    return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")


def format_table(name: str, values: Mapping[str, Any]) -> str:
    """A table, with a line for each value."""
    return "\n".join([f"[{name}]", *(f"{key} = {format_value(value)}" for key, value in values.items())])
