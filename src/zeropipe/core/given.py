"""Values as users give them."""

from __future__ import annotations

from typing import Any


def as_python(value: Any) -> Any:
    """Python's own number, or list of them, for one of numpy, torch or jax; anything else as it is."""
    return value.tolist() if hasattr(value, "tolist") else value
