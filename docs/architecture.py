"""Draws docs/architecture.svg, the packages and their imports: `python docs/architecture.py [folder]`."""

from __future__ import annotations

import ast
import sys
from functools import cache
from pathlib import Path

SOURCE = Path(__file__).parent.parent / "src" / "zeropipe"
# column in the picture, and content; the row follows from the imports
PACKAGES = {
    "core": (2, "schedules and timelines"),
    "schedules": (0, "built-in, and the registry"),
    "sim": (1, "costs, simulator"),
    "viz": (4.5, "pictures of timelines"),
    "engine": (2.5, "runs programs with torch"),
    "searching": (0, "search, lower bounds"),
    "balancing": (1, "layers to stages"),
    "profiling": (2, "measured layer costs"),
    "estimating": (2, "layer costs from shapes"),
    "planning": (1, "layouts, ranked"),
    "pipelining": (3, "torch's interface"),
    "integrations": (3, "torchtitan, Archon"),
    "train": (4, "the trainer"),
    "app": (5, "the web page"),
    "doctor": (6, "what is installed"),
    "cli": (4.5, "the command line"),
}
BOX_WIDTH, BOX_HEIGHT, COLUMN_GAP, ROW_GAP, MARGIN = 156.0, 44.0, 14.0, 46.0, 14.0
STYLE = """
  svg { --text: #1d2330; --soft: #667085; --box: #eef4ff; --edge: #9ec5fe; --torch: #fdf1e3; --torch-edge: #f0b673;
        --line: #a3adbf; font: 13px system-ui, sans-serif; }
  @media (prefers-color-scheme: dark) { svg { --text: #e8ebf2; --soft: #a8b2c3; --box: #1d2b45; --edge: #2f5d9e;
        --torch: #3b2a17; --torch-edge: #96591c; --line: #5d6778; } }
  text { fill: var(--text); text-anchor: middle; }
  .soft { fill: var(--soft); font-size: 11px; } .name { font-weight: 600; }
  rect { fill: var(--box); stroke: var(--edge); } rect.torch { fill: var(--torch); stroke: var(--torch-edge); }
  path { stroke: var(--line); fill: none; stroke-width: 1.2; }
"""


def imported_names(path: Path) -> set[str]:
    """The modules that a file imports, in full: `zeropipe.core.action`, `torch`."""
    names = set()
    for node in ast.walk(ast.parse(path.read_text("utf-8"))):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            members = {f"zeropipe.{alias.name}" for alias in node.names}
            names |= members if node.module == "zeropipe" else {node.module}
    return names


@cache
def package_imports() -> dict[str, set[str]]:
    """The packages that each package imports, at any place in its files; `torch` counts as one."""
    imports = {}
    for package in PACKAGES:
        names = {name for path in (SOURCE / package).rglob("*.py") for name in imported_names(path)}
        own = {name.split(".")[1] for name in names if name.startswith("zeropipe.")}
        other = {"torch"} & {name.split(".")[0] for name in names}
        imports[package] = (own & PACKAGES.keys() | other) - {package}
    return imports


def level_of(package: str) -> int:
    """The length of the longest chain of imports below a package."""
    below = package_imports()[package] - {"torch"}
    return 1 + max(map(level_of, below)) if below else 0


def needed_edges() -> set[tuple[str, str]]:
    """Imports that do not follow from a chain of others."""
    imports = {package: names - {"torch"} for package, names in package_imports().items()}

    @cache
    def reached(package: str) -> frozenset[str]:
        return frozenset(imports[package]).union(*(reached(name) for name in imports[package]))

    return {
        (package, name)
        for package, names in imports.items()
        for name in names
        if not any(name in reached(other) for other in names)
    }


def draw() -> str:
    num_levels = 1 + max(map(level_of, PACKAGES))
    num_columns = 1 + max(column for column, _ in PACKAGES.values())
    width = num_columns * (BOX_WIDTH + COLUMN_GAP) - COLUMN_GAP + 2 * MARGIN
    height = num_levels * (BOX_HEIGHT + ROW_GAP) - ROW_GAP + 2 * MARGIN
    corners = {}
    for package, (column, _) in PACKAGES.items():
        top = MARGIN + (num_levels - 1 - level_of(package)) * (BOX_HEIGHT + ROW_GAP)
        corners[package] = (MARGIN + column * (BOX_WIDTH + COLUMN_GAP), top)
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width:g} {height:g}" width="{width:g}">',
        f"<title>Packages of zeropipe: a line goes down to what a package imports</title><style>{STYLE}</style>",
    ]
    for package, name in sorted(needed_edges()):
        (x1, y1), (x2, y2) = corners[package], corners[name]
        x1, x2, y1 = x1 + BOX_WIDTH / 2, x2 + BOX_WIDTH / 2, y1 + BOX_HEIGHT
        middle = ROW_GAP * 0.8
        parts.append(f'<path d="M{x1:g} {y1:g} C{x1:g} {y1 + middle:g} {x2:g} {y2 - middle:g} {x2:g} {y2:g}"/>')
    for package, (x, y) in corners.items():
        kind = ' class="torch"' if "torch" in package_imports()[package] else ""
        center, content = x + BOX_WIDTH / 2, PACKAGES[package][1]
        parts += [
            f'<rect x="{x:g}" y="{y:g}" width="{BOX_WIDTH:g}" height="{BOX_HEIGHT:g}" rx="6"{kind}/>',
            f'<text x="{center:g}" y="{y + 18:g}" class="name">{package}</text>',
            f'<text x="{center:g}" y="{y + 34:g}" class="soft">{content}</text>',
        ]
    return "\n".join([*parts, "</svg>"]) + "\n"


if __name__ == "__main__":
    folder = Path(sys.argv[1]) if len(sys.argv) > 1 else Path(__file__).parent
    (folder / "architecture.svg").write_text(draw(), "utf-8")
