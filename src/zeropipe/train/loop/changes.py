"""The fields of a training file that differ from those of the run that wrote a checkpoint."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from zeropipe.errors import short
from zeropipe.train.config.tables import RunConfig

_NOT_COMPARED = {"checkpoint.resume"}  # which checkpoint, not what is trained
_MAX_SHOWN = 20


def dump_fields(config: RunConfig) -> dict[str, dict[str, Any]]:
    """All fields with a value, as JSON, for a checkpoint."""
    return json.loads(config.model_dump_json(exclude_none=True))


def describe_changes(old: Mapping[str, Mapping[str, Any]], config: RunConfig) -> str:
    """`changed since the checkpoint: optimizer.lr 0.01 -> 0.001, ...`; empty if nothing has changed."""
    before, now = _flatten(old), _flatten(dump_fields(config))
    changed = [
        f"{name} {_show(before, name)} -> {_show(now, name)}"
        for name in dict.fromkeys([*now, *before])
        if name not in _NOT_COMPARED and before.get(name) != now.get(name)
    ]
    if len(changed) > _MAX_SHOWN:
        changed = [*changed[:_MAX_SHOWN], f"and {len(changed) - _MAX_SHOWN} more"]
    return f"changed since the checkpoint: {', '.join(changed)}" if changed else ""


def _flatten(tables: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
    return {f"{table}.{name}": value for table, fields in tables.items() for name, value in fields.items()}


def _show(fields: Mapping[str, Any], name: str) -> str:
    return short(fields[name]) if name in fields else "none"
