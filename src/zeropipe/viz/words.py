"""Names and texts in pictures: made safe for terminals and XML, and cut to a width."""

from __future__ import annotations

from unicodedata import category, combining, east_asian_width

LONGEST = 200  # characters of a name; the rest is cut
_NOT_SHOWN = {"Cc", "Cs", "Zl", "Zp"}  # control characters, halves of a pair, line and paragraph separators
_TURNS = set("\u202a\u202b\u202c\u202d\u202e\u2066\u2067\u2068\u2069")  # would reverse the text beside the name

# widths of characters, as a share of the font size, in DejaVu Sans: the widest font of figures
_WIDTHS = {
    0.34: " ',.·:;/\\|ijlIJ",
    0.42: "-()[]ftr!",
    0.55: '"_`*szc?',
    0.79: "ABCDGHKNOQRUVXZ&",
    0.86: "wM#+<=>^~×−",
    1.0: "mW%@…",
}
_EMS = {sign: width for width, signs in _WIDTHS.items() for sign in signs}
_BOLD = 1.15


def one_line(text: str) -> str:
    """A name without line breaks, control characters and lone surrogates, of limited length.

    A terminal would execute them, and XML and UTF-8 cannot contain them.
    """
    kept = "".join(" " if category(c) in _NOT_SHOWN else c for c in text[: LONGEST + 1] if c not in _TURNS)
    return kept if len(text) <= LONGEST else kept[: LONGEST - 1] + "…"


def width_of(text: str, size: float, bold: bool = False) -> float:
    """The approximate width of a text, in the unit of its font size; too large rather than too small."""
    return size * sum(map(_em, text)) * (_BOLD if bold else 1.0)


def _em(sign: str) -> float:
    if combining(sign):
        return 0.0
    return _EMS.get(sign, 1.0 if east_asian_width(sign) in "WF" else 0.64 if sign.isascii() else 0.8)


def cut_to(text: str, size: float, room: float, bold: bool = False) -> str:
    """The text, or as much of it as fits, with an ellipsis."""
    if width_of(text, size, bold) <= room:
        return text
    while text and width_of(text + "…", size, bold) > room:
        text = text[:-1]
    return text.rstrip() + "…"


def wrapped(text: str, size: float, room: float) -> list[str]:
    """The text in lines that fit, broken at spaces; a word that does not fit is cut."""
    lines = [""]
    for word in text.split(" "):
        longer = f"{lines[-1]} {word}".strip()
        if lines[-1] and width_of(longer, size) > room:
            lines.append(word)
        else:
            lines[-1] = longer
    return [cut_to(line, size, room) for line in lines]
