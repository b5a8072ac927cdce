"""Names and texts in pictures: whatever a name holds, it stays on one line and is only text."""

from __future__ import annotations

from unicodedata import category, combining, east_asian_width

LONGEST = 200  # characters of a name: the rest is cut
_NOT_SHOWN = {"Cc", "Cs", "Zl", "Zp"}  # control characters, halves of a pair, line and paragraph separators
_TURNS = set("\u202a\u202b\u202c\u202d\u202e\u2066\u2067\u2068\u2069")  # would turn round what stands beside the name


def one_line(text: str) -> str:
    """A name as it can stand anywhere: no line breaks, control characters or lone surrogates, and not without end.

    A terminal would obey them, XML and UTF-8 cannot hold them.
    """
    kept = "".join(" " if category(c) in _NOT_SHOWN else c for c in text[: LONGEST + 1] if c not in _TURNS)
    return kept if len(text) <= LONGEST else kept[: LONGEST - 1] + "…"


def width_of(text: str, size: float) -> float:
    """About how wide a text is, in the unit of its font size; rather too much than too little."""
    ems = (0.0 if combining(c) else 1.0 if east_asian_width(c) in "WF" else 0.5 if c.islower() else 0.62 for c in text)
    return size * sum(ems)


def cut_to(text: str, size: float, room: float) -> str:
    """The text, or as much of it as has room, with an ellipsis."""
    if width_of(text, size) <= room:
        return text
    while text and width_of(text + "…", size) > room:
        text = text[:-1]
    return text.rstrip() + "…"
