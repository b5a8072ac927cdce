"""Pictures of timelines: in the terminal, as SVG, PNG, PDF, as an offline page, and as a Perfetto trace."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any

from zeropipe.core.timeline import Timeline
from zeropipe.errors import ConfigError


def draw(timelines: Timeline | Sequence[Timeline], path: str | Path | None = None, **options: Any) -> None:
    """Draw one timeline, or several on one time axis.

    Without a path, in the terminal. Otherwise the suffix decides: .html (a page that works offline), .svg, .png, .pdf
    (figures), .json (a trace for Perfetto or chrome://tracing). Options: `labels` ("microbatch", "action", "none") and
    `theme` ("light", "dark") for pages and figures; `width` (points), `memory` and `legend` for figures; `dpi` for
    .png; `title` for pages.
    """
    listed = [timelines] if isinstance(timelines, Timeline) else list(timelines)
    if not listed:
        raise ConfigError("nothing to draw: give at least one timeline")
    if path is None:
        from zeropipe.viz.terminal import show

        show(listed, **_known(options, {"width", "console"}, "the terminal"))
        return
    target = Path(path)
    check_name(target)
    try:
        _WRITERS[target.suffix](listed, target, options)
    except OSError as error:
        raise ConfigError(f"cannot write {target}: {error.strerror}") from None


def check_name(path: str | Path) -> None:
    """ConfigError for a file that `draw` cannot write: an unknown suffix, or a folder that is not there."""
    if Path(path).suffix not in _WRITERS:
        raise ConfigError(f"cannot draw '{path}': the name must end in {', '.join(_WRITERS)}")
    if not Path(path).absolute().parent.is_dir():
        raise ConfigError(f"cannot write {path}: No such file or directory")


def _html(timelines: list[Timeline], path: Path, options: dict[str, Any]) -> None:
    from zeropipe.viz.html import to_html

    path.write_text(to_html(timelines, **_known(options, {"title", "theme", "labels"}, path.suffix)), "utf-8")


def _figure(timelines: list[Timeline], path: Path, options: dict[str, Any]) -> None:
    from zeropipe.viz.scene import Style, scene
    from zeropipe.viz.svg import to_svg

    looks = {field.name for field in fields(Style)}
    chosen = _known(options, looks | ({"dpi"} if path.suffix == ".png" else set()), path.suffix)
    figure = scene(timelines, Style(**{name: value for name, value in chosen.items() if name in looks}))
    title = ", ".join(t.title for t in timelines)
    if path.suffix == ".svg":
        path.write_text(to_svg(figure, title), "utf-8")
        return
    from zeropipe.viz.raster import write_figure

    write_figure(figure, path, title, **{name: value for name, value in chosen.items() if name == "dpi"})


def _trace(timelines: list[Timeline], path: Path, options: dict[str, Any]) -> None:
    from zeropipe.viz.trace import write_trace

    _known(options, set(), path.suffix)
    write_trace(timelines, path)


_WRITERS: dict[str, Callable[[list[Timeline], Path, dict[str, Any]], None]] = {
    ".html": _html, ".svg": _figure, ".png": _figure, ".pdf": _figure, ".json": _trace,
}  # fmt: skip


def _known(options: dict[str, Any], allowed: set[str], where: str) -> dict[str, Any]:
    for name in options:
        if name not in allowed:
            has = f"it takes {', '.join(sorted(allowed))}" if allowed else "it has none"
            raise ConfigError(f"{where} has no option {name!r}: {has}")
    return options
