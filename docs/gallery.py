"""Writes docs/gallery.md and its pictures: `python docs/gallery.py [folder]`."""

from __future__ import annotations

import sys
from pathlib import Path

import zeropipe as zp
from zeropipe.core.units import number, percent
from zeropipe.schedules.registry import Entry, entries

RANKS, MICROBATCHES = 4, 8
POINTS = 16.0  # per unit of time: pictures can be compared with each other
HEAD = f"""# Gallery

Every schedule on {RANKS} ranks with {MICROBATCHES} microbatches, for one and the same model: a rank's part of it takes
F = I = W = 1 (a whole backward B = 2), shared out over its stages. Messages are free and an Overlap saves nothing.

![Four schedules on one time axis: gpipe, 1f1b, zb-h1, zbv](gallery/four-steps.svg)

Four steps to less idle time. **gpipe** runs all forwards, then all backwards, and keeps the activations of all
microbatches. **1f1b** lets each backward make room for the next forward: half the memory, the same bubble. **zb-h1**
splits the backward; nobody waits for the weight gradients (W, green), so they fill gaps. **zbv** folds the stages into
a V, and no rank is idle between its first and its last action.

A row is a rank, time runs to the right, the number is the microbatch, and light and dark are the different stages (or
copies of the model) of a rank: [how to read a picture](pictures.md). The bubble is the Zero Bubble paper's rate: idle
time between the first and the last action of the longest rank. Peak memory counts the activations of a rank's part for
one microbatch as 1. All pictures have the same scale. Any of them in your terminal:
`zeropipe show zbv --ranks {RANKS} --microbatches {MICROBATCHES}`.

This page is written by `make gallery`.

| schedule | stages per rank | makespan | bubble | peak memory of a rank |
|---|---|---:|---:|---:|
"""
# the families, and how a schedule is known to belong to one
FAMILIES = (
    ("Whole backward", "B is one action: the gradients of inputs and weights together.",
     lambda entry: not entry.splits_backward and not entry.overlaps),
    ("Split backward", "B is two actions: I, which the rank before waits for, and W, for which nobody waits.",
     lambda entry: entry.splits_backward and not entry.overlaps),
    ("Overlapped", "An F and a B of another microbatch run together as one step, so that the messages of the one are "
     "hidden by the work of the other. What that saves depends on the model; in these pictures it saves nothing.",
     lambda entry: entry.overlaps),
)  # fmt: skip
# what to look at in a picture
LOOK = {
    "gpipe": "All eight forwards come before the first backward. The gap in the middle is the bubble.",
    "1f1b": "Rank 0 keeps four microbatches, not eight: after that, each B makes room for the next F. All ranks "
    "together are idle as long as with gpipe.",
    "1f1b-overlap": "Seven forwards come first on rank 0, so that later each F has a B to run with.",
    "interleaved": "Two stages per rank, light and dark. A microbatch is at the last rank after half the time, so the "
    "bubble is half of 1F1B's; there are twice as many messages, and more microbatches are kept.",
    "interleaved-overlap": "Interleaved with one more forward in front, so that later each F has a B to run with.",
    "looped-bfs": "All microbatches go through the light stages, then all through the dark ones. The gap is half of "
    "gpipe's, the memory the same.",
    "hanayo": "Microbatches go down the ranks (light), turn round at the last one and come back (dark). After four of "
    "them the next wave begins.",
    "chimera": "Microbatches 0 to 3 enter at rank 0 (light), 4 to 7 at rank 3 (dark); the ones run in the gaps of the "
    "others. Each rank holds the weights of two stages, one of each copy.",
    "zb-h1": "1F1B, with each W where 1F1B waits: a third of the idle time is left.",
    "zb-h2": "Seven forwards come first on rank 0, instead of four. No rank is idle between its first and its last "
    "action, and seven microbatches are kept.",
    "interleaved-zb": "Interleaved, with the W (green) put off until there is a gap.",
    "zbv": "Light goes down the ranks, dark comes back up: rank 0 has the first and the last stage, and can begin a "
    "backward where the forward has ended. No gap is left inside a rank, with the memory of 1F1B.",
    "v-half": "A V as in zbv that starts a microbatch later and so keeps fewer of them: three at once instead of four.",
    "v-min": "Two at once. The gaps at both ends are the price.",
    "dualpipe": "Microbatches 0 to 3 enter at rank 0 (light), 4 to 7 at rank 3 (dark). In the middle, the F of one "
    "direction runs with the B of the other. Each rank holds the weights of two stages, one of each copy.",
    "dualpipev": "DualPipe on half the ranks, with its two directions as the two arms of a V: one copy of the model. "
    "Where there is no B to run with, the backward is split.",
}


def timelines() -> dict[str, zp.Timeline]:
    made = {}
    for entry in entries():
        schedule = zp.build(entry.name, ranks=RANKS, microbatches=MICROBATCHES)
        made[entry.name] = zp.simulate(schedule, zp.Costs().regroup(schedule.problem))
    return made


def row_of(entry: Entry, run: zp.Timeline) -> str:
    stages = f"{run.schedule.problem.stages_per_rank} ({run.schedule.placement.name})"
    numbers = f"{number(run.makespan)} | {percent(run.bubble)} | {number(max(run.peak_memory))}"
    return f"| [{entry.name}](#{entry.name}) | {stages} | {numbers} |\n"


def section_of(entry: Entry) -> str:
    look = f" {LOOK[entry.name]}" if entry.name in LOOK else ""
    needs = f" Needs: {entry.limits}." if entry.limits else ""
    paper = f" [Source]({entry.paper})." if entry.paper else ""
    picture = f"![{entry.name} on {RANKS} ranks](gallery/{entry.name}.svg)"
    return f"\n### {entry.name}\n\n*{entry.summary}.*{look}{needs}{paper}\n\n{picture}\n"


def write(folder: Path) -> None:
    """The page and one SVG per schedule."""
    pictures = folder / "gallery"
    pictures.mkdir(parents=True, exist_ok=True)
    runs = timelines()
    rows, sections = [], []
    for title, words, belongs in FAMILIES:
        sections.append(f"\n## {title}\n\n{words}\n")
        for entry in filter(belongs, entries()):
            rows.append(row_of(entry, runs[entry.name]))
            sections.append(section_of(entry))
            zp.draw(runs[entry.name], pictures / f"{entry.name}.svg", width=40 + POINTS * runs[entry.name].makespan)
    zp.draw([runs[name] for name in ("gpipe", "1f1b", "zb-h1", "zbv")], pictures / "four-steps.svg")
    many = zp.build("zbv", ranks=8, microbatches=96)
    zp.draw(zp.simulate(many, zp.Costs().regroup(many.problem)), pictures / "many-microbatches.svg")
    (folder / "gallery.md").write_text(HEAD + "".join(rows) + "".join(sections), "utf-8")


if __name__ == "__main__":
    write(Path(sys.argv[1]) if len(sys.argv) > 1 else Path(__file__).parent)
