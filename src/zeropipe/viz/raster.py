"""A Scene as PNG or PDF, by matplotlib."""

from __future__ import annotations

import re
import warnings
from itertools import groupby
from pathlib import Path
from typing import Any

from zeropipe.core.files import has_suffix
from zeropipe.errors import ConfigError, MissingExtra, short
from zeropipe.viz.scene import Area, Line, Rect, Scene

MAX_PIXELS = 150_000_000  # of a .png: 600 MB while it is drawn
MAX_SIDE = 65_535  # pixels: the limit of matplotlib


def write_figure(scene: Scene, path: Path, title: str, dpi: float) -> None:
    """Write a .png or a .pdf (vector, with fonts that publishers accept)."""
    wide, high = (round(points * dpi / 72) for points in (scene.width, scene.height))
    if has_suffix(path, ".png") and (wide * high > MAX_PIXELS or max(wide, high) > MAX_SIDE):
        raise ConfigError(
            f"the figure would have {wide:,} x {high:,} pixels: must be at most {MAX_PIXELS:,}, and {MAX_SIDE:,} "
            "along a side; use a smaller dpi or width, or .svg"
        )
    try:
        from matplotlib import rc_context
        from matplotlib.figure import Figure
    except ImportError:
        raise MissingExtra("matplotlib", "draw") from None
    fonts: dict[Any, Any] = {
        "pdf.fonttype": 42,
        "font.family": "sans-serif",
        "font.sans-serif": ["Helvetica", "Arial", "DejaVu Sans"],
    }
    with rc_context(fonts):
        figure = Figure(figsize=(scene.width / 72, scene.height / 72), facecolor=scene.paper)
        axes = figure.add_axes((0, 0, 1, 1))
        axes.set_xlim(0, scene.width)
        axes.set_ylim(scene.height, 0)
        axes.axis("off")
        for kind, items in groupby(scene.items, type):
            _add(axes, kind, list(items))
        metadata = {"Title": title} | ({"CreationDate": None} if has_suffix(path, ".pdf") else {})
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            figure.savefig(path, dpi=dpi, metadata=metadata)
    _warn([str(one.message) for one in caught])


def _warn(messages: list[str]) -> None:
    """Repeat matplotlib's warnings, with one line for all characters that no font has."""
    glyphs = [re.match(r"Glyph (\d+) ", message) for message in messages]
    missing = dict.fromkeys(chr(int(glyph[1])) for glyph in glyphs if glyph)
    others = [message for message, glyph in zip(messages, glyphs, strict=True) if not glyph]
    if missing:
        characters = "".join(missing)
        others.append(
            f"no font has {short(characters)}, which is drawn as boxes; .svg and .html use the reader's fonts"
        )
    for message in others:
        warnings.warn(message, stacklevel=2)


def _add(axes: Any, kind: type, items: list[Any]) -> None:
    from matplotlib.collections import LineCollection, PolyCollection

    if kind is Rect:
        corners = [[(r.x, r.y), (r.x + r.w, r.y), (r.x + r.w, r.y + r.h), (r.x, r.y + r.h)] for r in items]
        axes.add_collection(PolyCollection(corners, facecolors=[r.fill for r in items], linewidths=0), autolim=False)
    elif kind is Area:
        areas = PolyCollection([a.points for a in items], facecolors=[a.fill for a in items], linewidths=0,
                               alpha=[a.opacity for a in items])  # fmt: skip
        axes.add_collection(areas, autolim=False)
    elif kind is Line:
        styles = ["--" if line.dashed else "-" for line in items]
        lines = LineCollection([line.points for line in items], colors=[line.color for line in items],
                               linewidths=[line.width for line in items], linestyles=styles)  # fmt: skip
        axes.add_collection(lines, autolim=False)
    else:
        across = {"start": "left", "middle": "center", "end": "right"}
        for text in items:
            axes.text(text.x, text.y, text.text, fontsize=text.size, color=text.fill, ha=across[text.anchor],
                      va="baseline", fontweight="bold" if text.bold else "normal", parse_math=False)  # fmt: skip
