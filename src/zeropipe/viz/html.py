"""The viewer as one file that works offline, without a server."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from functools import cache
from html import escape
from importlib.resources import files
from typing import Any

from zeropipe.core.timeline import Timeline
from zeropipe.viz.article.blocks import Block
from zeropipe.viz.article.html import article_html, theme_css
from zeropipe.viz.payload import payload
from zeropipe.viz.style import PageStyle
from zeropipe.viz.words import one_line

# in the order of their imports: each file uses only those before it
MODULES = ("units.js", "data.js", "view.js", "shapes.js", "bands.js", "phases.js", "rows.js", "memory.js", "lane.js",
           "causes.js", "explain.js", "overlay.js", "panel.js", "legend.js", "summary.js", "input.js", "viewer.js",
           "charts.js")  # fmt: skip

_PAGE = """<!doctype html>
<html lang="en" data-theme="{theme}">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta http-equiv="Content-Security-Policy" content="default-src 'none'; script-src 'unsafe-inline'; \
style-src 'unsafe-inline'; img-src data:">
<meta name="generator" content="zeropipe">
<title>{title}</title>
<style>
{style}
</style>
</head>
<body class="zp-page">
<main>{article}<div id="viewer"></div></main>
<noscript>This picture is drawn by a script in this file. Please allow scripts for it.</noscript>
<script type="application/json" id="data">{data}</script>
<script type="module">
{script}
const data = JSON.parse(document.getElementById("data").textContent);
globalThis.zeropipeViewer = mountViewer(document.getElementById("viewer"), data, {options});
mountCharts();
</script>
</body>
</html>
"""


def to_html(
    timelines: Timeline | Sequence[Timeline], style: PageStyle | None = None, above: Sequence[Block] = ()
) -> str:
    """A page that works offline. `above` are the blocks above the timelines."""
    style = style or PageStyle()
    data = payload(timelines)
    heading = one_line(style.title or " · ".join(t["title"] for t in data["timelines"]))
    title = "" if above else one_line(style.title)
    options = {"title": title, "labels": style.labels, "memory": style.memory, "keys": True}
    sheet = viewer_file("viewer.css") + (f"{theme_css()}\n{viewer_file('article.css')}" if above else "")
    return _PAGE.format(
        title=escape(heading), theme=style.theme, style=sheet, script=bundle(),
        article=article_html(above) if above else "", data=_inline_json(data), options=_inline_json(options),
    )  # fmt: skip


def to_notebook(timeline: Timeline, height: int | None = None) -> str:
    """The page in a frame, for Jupyter."""
    tall = height or min(960, 390 + 62 * min(timeline.num_ranks, 12))
    page = escape(to_html(timeline), quote=True)
    look = f'style="width:100%;height:{tall}px;border:0" title="{escape(one_line(timeline.title))}"'
    return f'<iframe srcdoc="{page}" {look}></iframe>'


@cache
def bundle() -> str:
    """All viewer modules in one scope, without their imports and exports."""
    return "\n".join(_plain(viewer_file(name)) for name in MODULES)


@cache
def viewer_file(name: str) -> str:
    """The text of a file of the viewer."""
    return files("zeropipe.viz").joinpath("viewer", name).read_text("utf-8")


def _plain(source: str) -> str:
    without = re.sub(r"^import\b[^;]*;\n", "", source, flags=re.MULTILINE)
    return re.sub(r"^export (?=(async |function|const|class))", "", without, flags=re.MULTILINE)


def _inline_json(value: Any) -> str:
    """JSON that is safe inside a script element."""
    return json.dumps(value, separators=(",", ":")).replace("<", "\\u003c").replace("\u2028", "\\u2028")
