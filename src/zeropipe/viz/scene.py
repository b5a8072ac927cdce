"""The contents of a figure: rectangles, areas, lines and text, in points (1/72 inch).

`figure.py` lays them out; `svg.py` and `raster.py` write them.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple

Points = tuple[tuple[float, float], ...]


class Rect(NamedTuple):
    x: float
    y: float
    w: float
    h: float
    fill: str
    title: str = ""  # of a box: shown at the pointer


class Text(NamedTuple):
    x: float
    y: float  # the base line
    text: str
    size: float
    fill: str
    anchor: str = "start"  # or "middle", "end"
    bold: bool = False


class Line(NamedTuple):
    points: Points
    color: str
    width: float
    dashed: bool = False


class Area(NamedTuple):
    points: Points
    fill: str
    opacity: float = 1.0


Item = Rect | Text | Line | Area


@dataclass
class Scene:
    """Items to draw, back to front."""

    width: float
    height: float
    paper: str
    items: list[Item] = field(default_factory=list)
