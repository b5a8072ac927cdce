"""The page that compares schedules without a server: a viewer, and the simulator's results for a grid of sizes."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import zeropipe as zp
from zeropipe.schedules.registry import entries
from zeropipe.viz.html import bundle, viewer_file
from zeropipe.viz.payload import payload

RANKS = (2, 4, 8, 16)
MICROBATCHES_PER_RANK = (1, 2, 4)
COSTS = {
    "equal": ("F, I and W take equally long", zp.Costs(f=1, i=1, w=1)),
    "long": ("long sequences: I 1.4, W 0.6", zp.Costs(f=1, i=1.4, w=0.6)),
    "link": ("slow links: 0.2 per message", zp.Costs(f=1, i=1, w=1, p2p=0.2)),
}
SELECTED = ("1f1b", "zb-h1", "zbv")


def write_page(target: Path) -> None:
    """Write the page, its viewer and one data file per size and costs into `target`."""
    data = target / "data"
    data.mkdir(parents=True)
    for name in ("index.html", "compare.css"):
        shutil.copyfile(Path(__file__).parent / "play" / name, target / name)
    (target / "viewer.css").write_text(viewer_file("viewer.css"))
    script = (Path(__file__).parent / "play" / "compare.js").read_text()
    viewer = f"const mountViewer = (() => {{\n{bundle()}\nreturn mountViewer;\n}})();"  # names of its own
    (target / "compare.js").write_text(f"{viewer}\nconst GRID = {json.dumps(describe_grid())};\n{script}")
    for ranks in RANKS:
        for per_rank in MICROBATCHES_PER_RANK:
            for name, (_, costs) in COSTS.items():
                results = simulate_all(ranks, ranks * per_rank, costs)
                key = f"{ranks}x{ranks * per_rank}-{name}"
                text = json.dumps(results, separators=(",", ":"))
                (data / f"{key}.js").write_text(f'receiveResults("{key}", {text});\n')


def describe_grid() -> dict[str, Any]:
    """The choices of the form."""
    return {
        "ranks": RANKS,
        "microbatchesPerRank": MICROBATCHES_PER_RANK,
        "costs": {name: text for name, (text, _) in COSTS.items()},
        "schedules": {entry.name: entry.summary for entry in entries()},
        "selected": SELECTED,
    }


def simulate_all(ranks: int, microbatches: int, costs: zp.Costs) -> dict[str, Any]:
    """What the viewer shows of each schedule that has this size; errors of the others."""
    timelines, errors = {}, {}
    for name in zp.names():
        try:
            schedule = zp.build(name, ranks=ranks, microbatches=microbatches)
        except zp.ConfigError as error:
            errors[name] = str(error)
            continue
        timelines[name] = zp.simulate(schedule, costs.stage_costs(schedule.problem))
    shown = payload(list(timelines.values()))
    return {
        "common": {**shown, "timelines": []},
        "timelines": dict(zip(timelines, shown["timelines"])),
        "errors": errors,
    }
