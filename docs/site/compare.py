"""The page that compares schedules without a server.

It has the simulator's results for a grid of sizes, and Python with zeropipe for all other numbers.
"""

from __future__ import annotations

import json
import shutil
import sys
from pathlib import Path
from typing import Any

import zeropipe as zp
from zeropipe.schedules.registry import entries
from zeropipe.viz.html import bundle, viewer_file

PLAY = Path(__file__).parent / "play"
sys.path[:0] = [str(Path(__file__).parent), str(PLAY)]

import browser_python  # noqa: E402
from results import simulate_all  # noqa: E402

RANKS = (2, 4, 8, 16)
MICROBATCHES_PER_RANK = (1, 2, 4)
COSTS = {
    "equal": ("F, I and W take equally long", {"f": 1, "i": 1, "w": 1, "p2p": 0}),
    "long": ("long sequences: I 1.4, W 0.6", {"f": 1, "i": 1.4, "w": 0.6, "p2p": 0}),
    "link": ("slow links: 0.2 per message", {"f": 1, "i": 1, "w": 1, "p2p": 0.2}),
}
SELECTED = ("1f1b", "zb-h1", "zbv")


def write_page(target: Path, cache: Path) -> None:
    """Write the page, its viewer, Python and one data file per size and costs into `target`."""
    data = target / "data"
    data.mkdir(parents=True)
    for name in ("index.html", "compare.css"):
        shutil.copyfile(PLAY / name, target / name)
    (target / "viewer.css").write_text(viewer_file("viewer.css"))
    python = browser_python.write_files(target / "python", cache)
    viewer = f"const mountViewer = (() => {{\n{bundle()}\nreturn mountViewer;\n}})();"  # names of its own
    grid = f"const GRID = {json.dumps(describe_grid(python))};"
    worker = f"const WORKER = {json.dumps((PLAY / 'worker.js').read_text())};"
    scripts = [(PLAY / name).read_text() for name in ("python.js", "compare.js")]
    (target / "compare.js").write_text("\n".join([viewer, grid, worker, *scripts]))
    for ranks in RANKS:
        for per_rank in MICROBATCHES_PER_RANK:
            for name, (_, costs) in COSTS.items():
                results = simulate_all(zp.names(), ranks, ranks * per_rank, zp.Costs(**costs))
                key = f"{ranks}x{ranks * per_rank}-{name}"
                text = json.dumps(results, separators=(",", ":"))
                (data / f"{key}.js").write_text(f'receiveResults("{key}", {text});\n')


def describe_grid(python: dict[str, Any] | None) -> dict[str, Any]:
    """The sizes and costs that have results, and the choices of the form."""
    return {
        "ranks": RANKS,
        "microbatchesPerRank": MICROBATCHES_PER_RANK,
        "costs": {name: {"text": text, **costs} for name, (text, costs) in COSTS.items()},
        "schedules": {entry.name: entry.summary for entry in entries()},
        "selected": SELECTED,
        "python": python,
    }
