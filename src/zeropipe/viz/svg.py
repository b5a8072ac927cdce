"""A Scene as SVG text."""

from __future__ import annotations

from xml.sax.saxutils import escape, quoteattr

from zeropipe.viz.scene import Area, Item, Line, Rect, Scene


def to_svg(scene: Scene, title: str) -> str:
    """One SVG document."""
    width, height = _n(scene.width), _n(scene.height)
    head = (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}pt" height="{height}pt" '
        f'viewBox="0 0 {width} {height}" font-family="Helvetica, Arial, sans-serif" role="img">'
    )
    parts = [head, f"<title>{escape(title)}</title>", f'<rect width="{width}" height="{height}" fill="{scene.paper}"/>']
    parts.extend(_item(item) for item in scene.items)
    return "\n".join([*parts, "</svg>", ""])


def _item(item: Item) -> str:
    if isinstance(item, Rect):
        box = f'<rect x="{_n(item.x)}" y="{_n(item.y)}" width="{_n(item.w)}" height="{_n(item.h)}" fill="{item.fill}"'
        return f'{box} class="box"><title>{escape(item.title)}</title></rect>' if item.title else f"{box}/>"
    if isinstance(item, Line):
        points = " ".join(f"{_n(x)},{_n(y)}" for x, y in item.points)
        dash = ' stroke-dasharray="3 2"' if item.dashed else ""
        return f'<polyline points="{points}" fill="none" stroke="{item.color}" stroke-width="{_n(item.width)}"{dash}/>'
    if isinstance(item, Area):
        points = " ".join(f"{_n(x)},{_n(y)}" for x, y in item.points)
        return f'<polygon points="{points}" fill="{item.fill}" fill-opacity="0.6"/>'
    anchor = f' text-anchor="{item.anchor}"' if item.anchor != "start" else ""
    bold = ' font-weight="bold"' if item.bold else ""
    place = f'x="{_n(item.x)}" y="{_n(item.y)}" font-size="{_n(item.size)}" fill={quoteattr(item.fill)}'
    return f"<text {place}{anchor}{bold}>{escape(item.text)}</text>"


def _n(value: float) -> str:
    return f"{value:.2f}".rstrip("0").rstrip(".")
