"""Writes docs/gallery.md and its pictures: `python docs/gallery.py [folder]`."""

from __future__ import annotations

import sys
from pathlib import Path

import zeropipe as zp
from zeropipe.core.units import number, percent
from zeropipe.schedules.registry import entries

RANKS, MICROBATCHES = 4, 8
HEAD = f"""# Gallery

Every schedule on {RANKS} ranks with {MICROBATCHES} microbatches, for one and the same model: a rank's part of it takes
F = I = W = 1 (a whole backward B = 2), shared out over its stages. Messages are free and an Overlap saves nothing.
The bubble is the Zero Bubble paper's rate: idle time between the first and the last action of the longest rank. Peak
memory counts the activations of a rank's part for one microbatch as 1. How to read a picture:
[pictures.md](pictures.md).

This page is written by `make gallery`.

| schedule | makespan | bubble | peak memory of a rank |
|---|---:|---:|---:|
"""


def timelines() -> dict[str, zp.Timeline]:
    made = {}
    for entry in entries():
        schedule = zp.build(entry.name, ranks=RANKS, microbatches=MICROBATCHES)
        made[entry.name] = zp.simulate(schedule, zp.Costs().regrouped(schedule.problem))
    return made


def write(folder: Path) -> None:
    """The page and one SVG per schedule."""
    (folder / "gallery").mkdir(parents=True, exist_ok=True)
    rows, sections = [], []
    runs = timelines()
    for entry in entries():
        run = runs[entry.name]
        peak = number(max(run.peak_memory))
        link = f"[{entry.name}](#{entry.name})"
        rows.append(f"| {link} | {number(run.makespan)} | {percent(run.bubble)} | {peak} |\n")
        zp.draw(run, folder / "gallery" / f"{entry.name}.svg", width=560)
        needs = f" Needs: {entry.limits}." if entry.limits else ""
        paper = f" [Source]({entry.paper})." if entry.paper else ""
        sections.append(f"\n## {entry.name}\n\n{entry.summary}.{needs}{paper}\n\n"
                        f"![{entry.name} on {RANKS} ranks](gallery/{entry.name}.svg)\n")  # fmt: skip
    many = zp.build("zbv", ranks=8, microbatches=96)
    zp.draw(zp.simulate(many, zp.Costs().regrouped(many.problem)), folder / "gallery" / "many-microbatches.svg")
    (folder / "gallery.md").write_text(HEAD + "".join(rows) + "".join(sections), "utf-8")


if __name__ == "__main__":
    write(Path(sys.argv[1]) if len(sys.argv) > 1 else Path(__file__).parent)
