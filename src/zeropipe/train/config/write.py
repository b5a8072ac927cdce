"""A RunConfig as the text of a training file."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from zeropipe.train.config.models import RunConfig
from zeropipe.train.config.read import FILES, is_file


def to_toml(config: RunConfig) -> str:
    """All fields that have a value; names of files from the root, so that the text may be kept anywhere."""
    blocks = []
    for table, values in config.model_dump(exclude_none=True).items():
        inner = {name: _anywhere(f"{table}.{name}", value) for name, value in values.items()}
        plain = {name: value for name, value in inner.items() if not isinstance(value, dict)}
        blocks.append("\n".join([f"[{table}]", *(f"{name} = {toml_value(value)}" for name, value in plain.items())]))
        for name, value in inner.items():
            if isinstance(value, dict) and value:
                lines = [f"{json.dumps(key)} = {toml_value(one)}" for key, one in value.items()]
                blocks.append("\n".join([f"[{table}.{name}]", *lines]))
    return "\n\n".join(blocks) + "\n"


def toml_value(value: Any) -> str:
    """Texts, numbers and lists are written in TOML as in JSON, but for one character."""
    return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")


def _anywhere(name: str, value: Any) -> Any:
    if name not in FILES:
        return value
    if isinstance(value, (list, tuple)):
        return [_anywhere(name, one) for one in value]
    return str(Path(value).absolute()) if is_file(value, name) else value
