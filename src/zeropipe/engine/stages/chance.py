"""Where a model draws random numbers while it is trained."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

_NAME = re.compile("drop|jitter")


def is_chance(name: str, value: Any) -> bool:
    """Whether an entry of a config is a share of something that is left out, or moved, at random."""
    return isinstance(value, int | float) and not isinstance(value, bool) and _NAME.search(name) is not None


def chances(fields: Mapping[str, Any]) -> dict[str, float]:
    """Those entries of a config that are above 0."""
    return {name: value for name, value in fields.items() if is_chance(name, value) and value > 0}
