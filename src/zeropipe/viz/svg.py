"""A Scene as SVG text."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import groupby
from xml.sax.saxutils import escape

from zeropipe.viz.scene import Area, Item, Line, Rect, Scene, Text


def to_svg(scene: Scene, title: str) -> str:
    """One SVG document."""
    width, height = _n(scene.width), _n(scene.height)
    head = (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}pt" height="{height}pt" '
        f'viewBox="0 0 {width} {height}" font-family="Helvetica, Arial, sans-serif" role="img">'
    )
    parts = [head, f"<title>{escape(title)}</title>", f'<rect width="{width}" height="{height}" fill="{scene.paper}"/>']
    return "\n".join([*parts, *_items(scene.items), "</svg>", ""])


def _items(items: list[Item]) -> Iterator[str]:
    """Group consecutive items that look alike, which keeps the file small."""
    for look, group in groupby(items, _look):
        if look:
            yield f"<g {look}>"
        yield from map(_item, group)
        if look:
            yield "</g>"


def _look(item: Item) -> str:
    if isinstance(item, Rect):
        return 'class="boxes"' if item.title else ""
    if isinstance(item, Text):
        anchor = f' text-anchor="{item.anchor}"' if item.anchor != "start" else ""
        bold = ' font-weight="bold"' if item.bold else ""
        return f'font-size="{_n(item.size)}" fill="{item.fill}"{anchor}{bold}'
    return ""


def _item(item: Item) -> str:
    if isinstance(item, Rect):
        box = f'<rect x="{_n(item.x)}" y="{_n(item.y)}" width="{_n(item.w)}" height="{_n(item.h)}" fill="{item.fill}"'
        return f"{box}><title>{escape(item.title)}</title></rect>" if item.title else f"{box}/>"
    if isinstance(item, Text):
        return f'<text x="{_n(item.x)}" y="{_n(item.y)}">{escape(item.text)}</text>'
    points = " ".join(f"{_n(x)},{_n(y)}" for x, y in item.points)
    if isinstance(item, Area):
        opacity = f' fill-opacity="{_n(item.opacity)}"' if item.opacity < 1 else ""
        return f'<polygon points="{points}" fill="{item.fill}"{opacity}/>'
    assert isinstance(item, Line)
    dash = ' stroke-dasharray="3 2"' if item.dashed else ""
    return f'<polyline points="{points}" fill="none" stroke="{item.color}" stroke-width="{_n(item.width)}"{dash}/>'


def _n(value: float) -> str:
    return f"{value:.2f}".rstrip("0").rstrip(".")
