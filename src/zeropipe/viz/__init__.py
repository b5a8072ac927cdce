"""Pictures of timelines: in the terminal, as SVG, PNG, PDF, as an offline page, and as a Perfetto trace.

boxes       a timeline as columns of boxes, which every output draws
style       the options of `zp.draw`
drawable    refuses timelines that cannot be drawn
terminal    lines of characters; `cells` fills them
figure      a Scene (`scene`) for SVG (`svg`), PNG and PDF (`raster`); `bands` and `density` for boxes that are too fine
html        an offline page: `viewer/` draws the data of `payload`, `article` is above it
columns     the columns of `payload`, made without numpy, so that a browser makes them, too
trace       Perfetto's JSON
lanes       gathers and reductions of sharded stages, below the boxes of a rank
axis, colors, words    ticks, colours, and texts of limited width
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from os import PathLike
from pathlib import Path
from typing import Any

from zeropipe.core.files import has_suffix, require_writable, write_whole, writing
from zeropipe.core.timeline import Timeline
from zeropipe.errors import ConfigError, short
from zeropipe.viz.style import OPTIONS, PageStyle, Style, check_names, style_of


def draw(timelines: Timeline | Sequence[Timeline], path: str | Path | None = None, **options: Any) -> None:
    """Draw one timeline, or several on one time axis.

    Without a path it prints to the terminal. The suffix of a path is the format: .html (a page that works offline),
    .svg, .png, .pdf (figures), .json (a trace for Perfetto or chrome://tracing). Options: `labels` ("microbatch",
    "action", "none"), `theme` ("light", "dark"), `title` and `memory` (True or False) for pages and figures; `width`
    (points), `legend` and `facts` (True or False) for figures; `dpi` for .png. A file is written completely or not
    at all.
    """
    listed = list(timelines) if isinstance(timelines, Iterable) else [timelines]
    if not listed:
        raise ConfigError("nothing to draw: must have at least one timeline")
    for one in listed:
        if not isinstance(one, Timeline):
            raise ConfigError(f"{short(one)} must be a Timeline, from zp.simulate or a recorded run")
    if path is None:
        from zeropipe.viz.terminal import show

        check_names("the terminal", ("width", "console"), options)
        show(listed, **options)
        return
    style = _style(path, options)
    if isinstance(style, PageStyle):
        from zeropipe.viz.html import to_html

        write_whole(path, to_html(listed, style))
    elif isinstance(style, Style):
        _write_figure(listed, Path(path), style)
    else:
        from zeropipe.viz.trace import write_trace

        with writing(path) as temporary:
            write_trace(listed, temporary)


def check_name(path: str | Path, **options: Any) -> None:
    """ConfigError for a file or options that `draw` would refuse. Call it before long work."""
    _style(path, options)
    require_writable(path)


def _style(path: str | Path, options: dict[str, Any]) -> Style | PageStyle | None:
    suffix = Path(path).suffix.lower() if isinstance(path, (str, PathLike)) else ""
    if suffix not in OPTIONS:
        name = short(str(path) if isinstance(path, PathLike) else path)
        raise ConfigError(f"cannot draw {name}: the name must end in {', '.join(OPTIONS)}")
    return style_of(suffix, options)


def _write_figure(timelines: list[Timeline], path: Path, style: Style) -> None:
    from zeropipe.viz.figure import figure
    from zeropipe.viz.words import one_line

    scene = figure(timelines, style)
    title = one_line(style.title or ", ".join(t.title for t in timelines))
    if has_suffix(path, ".svg"):
        from zeropipe.viz.svg import to_svg

        write_whole(path, to_svg(scene, title))
        return
    from zeropipe.viz.raster import write_figure

    with writing(path) as temporary:
        write_figure(scene, temporary, title, style.dpi)
