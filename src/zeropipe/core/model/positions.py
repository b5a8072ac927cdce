"""The largest number of positions that a model supports."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from zeropipe.errors import ConfigError

_NAMES = ("max_position_embeddings", "n_positions")


def require_positions(config: Mapping[str, Any], sequence: int, name: str) -> None:
    """Raise ConfigError if sequences are longer than the config of a model supports. `name`: of the user's value."""
    text = config.get("text_config")
    fields = {**config, **text} if isinstance(text, Mapping) else config
    for field in _NAMES:
        limit = fields.get(field)
        if isinstance(limit, int) and 0 < limit < sequence:
            raise ConfigError(
                f"{name}={sequence}: the model's {field} is {limit}; use shorter sequences, or change its config.json"
            )
