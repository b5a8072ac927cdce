"""The blocks of an article, as values; `html.py` and the style sheet define how they look."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Tone = Literal["blue", "red", "yellow", "green", "violet", "grey"]


@dataclass(frozen=True)
class Heading:
    """The title of the page, and a line of facts below it."""

    text: str
    facts: str = ""


@dataclass(frozen=True)
class Figure:
    """One number, large, with its name above it and a remark below."""

    name: str
    value: str
    remark: str = ""


@dataclass(frozen=True)
class Figures:
    """Numbers side by side."""

    figures: tuple[Figure, ...]


@dataclass(frozen=True)
class Note:
    """A highlighted text. Text in `backquotes` is shown as code."""

    title: str
    text: str


@dataclass(frozen=True)
class Line:
    """Points of a chart, in the order of x. `look`: a line, a dashed line, or only the points."""

    name: str
    points: tuple[tuple[float, float], ...]
    tone: Tone = "blue"
    look: Literal["line", "dashed", "points"] = "line"


@dataclass(frozen=True)
class Chart:
    """Lines over one x axis. `unit` is that of y: "s" for seconds, or empty."""

    title: str
    x_name: str
    lines: tuple[Line, ...]
    unit: str = ""
    from_zero: bool = False


@dataclass(frozen=True)
class Shares:
    """Parts of a whole as a bar: (name, value, tone); the rest of the whole stays empty."""

    parts: tuple[tuple[str, float, Tone], ...]
    whole: float


@dataclass(frozen=True)
class Row:
    """A row of a table; `marked` ones stand out. A single cell is as wide as the table."""

    cells: tuple[str | Shares, ...]
    marked: bool = False


@dataclass(frozen=True)
class Table:
    """Rows of text and bars. The head of a column of bars has a legend of its colours."""

    title: str
    head: tuple[str, ...]
    rows: tuple[Row, ...]
    remark: str = ""


Block = Heading | Figures | Note | Chart | Table
