"""Build the documentation site: `python docs/site/build.py`, or `make docs`. Broken links and anchors are errors.

The pages are those of the repository, copied with their paths so that all links between them stay as they are, beside
pages of the API made from docstrings, and a page that compares schedules. The tracks of docs/README.md are the
navigation.
"""

from __future__ import annotations

import re
import shutil
import sys
from pathlib import Path

import api
import compare

ROOT = Path(__file__).parent.parent.parent
PAGES = ("README.md", "README.zh-CN.md", "CONTRIBUTING.md", "CHANGELOG.md", "tests/README.md", "docs/*.md")
FILES = ("examples/*.ipynb", "docs/*.svg", "docs/*.png", "docs/gallery/*", "docs/data/*", "src/zeropipe/__init__.py")
TRACK = re.compile(r"^## (.+)\n\n((?:(?:\d+\. |   ).*\n)+)", re.MULTILINE)
COMPARE = '<a href="../play/index.html">Compare schedules in this browser</a>: all schedules, any numbers.'
LINK = re.compile(r"\]\(([^)#]+\.md)\)")


def build(target: Path) -> int:
    """Write the site's HTML into `target`; the exit status of Sphinx."""
    from sphinx.cmd.build import build_main  # the text of the site is checked without it

    source = target.parent / "site-source"
    shutil.rmtree(source, ignore_errors=True)
    _copy_pages(source)
    (source / "docs" / "api").mkdir()
    for name, text in api.write_pages().items():
        (source / "docs" / "api" / name).write_text(text)
    status = build_main(["-W", "--keep-going", "-q", "-b", "html", str(source), str(target)])
    shutil.rmtree(target / "play", ignore_errors=True)
    compare.write_page(target / "play", ROOT / "build" / "npm")
    return status


def _copy_pages(source: Path) -> None:
    for pattern in (*PAGES, *FILES):
        for path in ROOT.glob(pattern):
            copy = source / path.relative_to(ROOT)
            copy.parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(path, copy)
    here = Path(__file__).parent
    shutil.copyfile(here / "conf.py", source / "conf.py")
    shutil.copytree(here / "static", source / "static")
    index = source / "docs" / "README.md"
    text = index.read_text()
    index.write_text(text.replace("## See schedules\n", f"## See schedules\n\n{COMPARE}\n", 1) + navigation(text))


def navigation(index: str) -> str:
    """Hidden tables of contents: one per track of the index, then the API, then pages about the project."""
    tracks = [(title, LINK.findall(links)) for title, links in TRACK.findall(index)]
    tracks.append(("Look up", ["glossary.md", "cli.md", *(f"api/{name}.md" for name in api.MODULES)]))
    tracks.append(
        (
            "Project",
            ["../README.md", "../README.zh-CN.md", "../CONTRIBUTING.md", "../CHANGELOG.md", "../tests/README.md"],
        )
    )
    tables = [
        "\n".join(["", "```{toctree}", ":hidden:", f":caption: {title}", "", *links, "```", ""])
        for title, links in tracks
    ]
    return "".join(tables)


if __name__ == "__main__":
    sys.exit(build(Path(sys.argv[1]) if len(sys.argv) > 1 else ROOT / "build" / "site"))
