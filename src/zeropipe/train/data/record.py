"""A JSON object of a data file."""

from __future__ import annotations

from typing import Any, NamedTuple


class Record(NamedTuple):
    """A JSON object: a line of a JSONL file, an item of a JSON array, or a row of a dataset."""

    location: str  # file and line, for errors
    value: dict[str, Any]
