"""Sphinx configuration of the documentation site. `docs/site/build.py` copies it beside the pages."""

from pathlib import Path

project = "zeropipe"
author = "the zeropipe authors"
release = next(
    line.split('"')[1]
    for line in Path("src/zeropipe/__init__.py").read_text().splitlines()
    if line.startswith("__version__")
)

extensions = ["myst_parser"]
root_doc = "docs/README"
myst_heading_anchors = 4
suppress_warnings = ["myst.header"]  # pages for GitHub may skip a level

html_theme = "furo"
html_title = f"zeropipe {release}"
html_static_path = ["static"]
html_css_files = ["site.css"]
html_js_files = ["zoom.js"]
html_copy_source = False
html_show_sphinx = False
html_show_search_summary = False  # summaries are fetched, which a page opened as a file may not do
pygments_style = "friendly"
pygments_dark_style = "monokai"
