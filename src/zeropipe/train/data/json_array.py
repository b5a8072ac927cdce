"""Read the objects of a JSON array one at a time, with bounded memory."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator
from typing import Any

from zeropipe.errors import first_line, short

_SPACE = re.compile(r"[ \t\r\n]*")
_DECODER = json.JSONDecoder()


class InvalidArray(Exception):
    """A text is not a JSON array of objects; `line` is where."""

    def __init__(self, line: int, reason: str) -> None:
        super().__init__(reason)
        self.line = line


def iterate_array(blocks: Iterable[str], max_chars: int) -> Iterator[tuple[int, dict[str, Any]]]:
    """The objects of an array, each with the line at which it begins. An object has at most `max_chars` characters."""
    text, position, line, expected = "", 0, 1, "["  # expected: the next punctuation mark; empty: an object
    for block in _with_end(blocks):
        text, position = text[position:] + (block or ""), 0
        while True:
            position, line = _skip(text, position, _SPACE.match(text, position).end(), line)  # type: ignore[union-attr]
            following = text[position : position + 1]
            if not following:
                break
            if following == "]" and expected != "[":
                return
            if expected:
                if following != expected:
                    raise InvalidArray(line, f"{expected!r} is missing before {short(text[position : position + 20])}")
                position, expected = position + 1, ""
                continue
            try:
                value, end = _DECODER.raw_decode(text, position)
            except (ValueError, RecursionError) as error:
                if block is not None and len(text) - position <= max_chars and isinstance(error, ValueError):
                    break  # the object may go on in the next block
                raise InvalidArray(line, first_line(error)) from None
            if not isinstance(value, dict):
                raise InvalidArray(line, f"{short(value)} must be an object")
            yield line, value
            (position, line), expected = _skip(text, position, end, line), ","
    raise InvalidArray(line, "the array has no end")


def _with_end(blocks: Iterable[str]) -> Iterator[str | None]:
    """The blocks, and None at the end."""
    yield from blocks
    yield None


def _skip(text: str, start: int, end: int, line: int) -> tuple[int, int]:
    """The position and the line after the characters from `start` to `end`."""
    return end, line + text.count("\n", start, end)
