"""Writes docs/gallery.md, its pictures and those of docs/concepts.md: `python docs/gallery.py [folder]`."""

from __future__ import annotations

import sys
from pathlib import Path

import zeropipe as zp
from zeropipe.core.units import number, percent
from zeropipe.schedules.registry import Entry, entries

RANKS, MICROBATCHES = 4, 8
SLICES = 4  # of each microbatch, of the schedules that are made for them
POINTS = 16.0  # per unit of time: pictures can be compared with each other
HEAD = f"""# Gallery

Every built-in schedule on {RANKS} ranks with {MICROBATCHES} microbatches, for the same model: on each rank
F = I = W = 1 (a full backward B = 2), divided among the rank's stages. Messages take no time; an Overlap saves none.
New to the words? [Concepts](concepts.md) explains them in ten minutes.

![Four schedules on one time axis: gpipe, 1f1b, zb-h1, zbv](gallery/four-steps.svg)

Four steps to less idle time. **gpipe** runs all forwards, then all backwards, and keeps the activations of all
microbatches. **1f1b** runs each backward as early as possible, which frees memory for the next forward: half the
memory, the same idle time. **zb-h1** splits the backward: no other rank needs the weight gradients (W, green), so they
fill gaps. **zbv** places the stages on a V, and no rank is idle between its first and its last action.

A row is a rank, time runs to the right, the number is the microbatch, and light and dark are the different stages (or
copies of the model) of a rank: [how to read a picture](pictures.md). Idle is 1 - busy / makespan; the bubble rate is
the Zero Bubble paper's, which leaves out that ranks start and end at different times. Peak memory is in units of a
rank's activations for one microbatch. All pictures have the same scale. To see one in your terminal:
`zeropipe show zbv --ranks {RANKS} --microbatches {MICROBATCHES}`.

This page is written by `make gallery`.

| schedule | stages per rank | makespan | idle | bubble rate | peak memory of a rank |
|---|---|---:|---:|---:|---:|
"""
# the families, and how a schedule is known to belong to one
FAMILIES = (
    ("Full backward", "B is one action: the gradients of inputs and weights together.",
     lambda entry: not entry.splits_backward and not entry.overlaps and not entry.sliced),
    ("Slices", f"The sequences of each microbatch are divided into {SLICES} slices, each with an F and a B of its own, "
     "which take a quarter of the time and the memory here. A slice attends to the slices before it, so forwards run "
     "in order, and backwards in the opposite one. See [long sequences](long-sequences.md#slices).",
     lambda entry: entry.sliced),
    ("Split backward", "B is two actions: I, which the previous stage waits for, and W, which no other rank needs.",
     lambda entry: entry.splits_backward and not entry.overlaps),
    ("Overlapped", "An F and a B of another microbatch run together as one step: the communication inside one of them "
     "is hidden behind the work of the other. The time saved depends on the model; these pictures assume none.",
     lambda entry: entry.overlaps),
)  # fmt: skip
# what a picture shows
LOOK = {
    "gpipe": "All eight forwards come before the first backward. The gap in the middle is the bubble.",
    "1f1b": "Rank 0 keeps four microbatches, not eight: after that, each B frees memory for the next F. The idle time "
    "is the same as with gpipe.",
    "1f1b-overlap": "Seven forwards come first on rank 0, so that later each F has a B to run with.",
    "interleaved": "Two stages per rank, light and dark. A microbatch reaches the last rank in half the time, so the "
    "bubble is half of 1F1B's, for twice the number of messages and more memory.",
    "interleaved-overlap": "Interleaved with one more forward in front, so that later each F has a B to run with.",
    "looped-bfs": "All microbatches go through the light stages, then all through the dark ones. The gap is half of "
    "gpipe's, the memory the same.",
    "hanayo": "Microbatches go down the ranks (light), and come back up (dark) from the last one. After four of them "
    "the next wave begins.",
    "chimera": "Microbatches 0 to 3 enter at rank 0 (light), 4 to 7 at rank 3 (dark); each direction runs in the gaps "
    "of the other. Each rank holds the weights of two stages, one of each copy.",
    "seq1f1b": "1F1B of slices: rank 0 keeps seven of them, 1.75 microbatches where 1F1B keeps 4, and the bubble is a "
    "quarter of 1F1B's.",
    "slimpipe": "All slices of a microbatch, and two more for each later rank. With several stages per rank and more "
    "slices, that is hardly more than one microbatch.",
    "zb-h1": "1F1B, with each W where 1F1B waits: a third of the idle time is left.",
    "zb-h2": "Seven forwards come first on rank 0, instead of four. No rank is idle between its first and its last "
    "action, and seven microbatches are kept.",
    "interleaved-zb": "Interleaved, with each W (green) deferred until there is a gap.",
    "zbv": "Light goes down the ranks, dark comes back up: rank 0 has the first and the last stage, and can start a "
    "backward as soon as the forward has ended. No gap is left inside a rank, with the memory of 1F1B.",
    "v-half": "A V as in zbv that starts a microbatch later and so keeps fewer of them: three at once instead of four.",
    "v-min": "Two microbatches at once, with gaps at both ends.",
    "dualpipe": "Microbatches 0 to 3 enter at rank 0 (light), 4 to 7 at rank 3 (dark). In the middle, the F of one "
    "direction runs with the B of the other. Each rank holds the weights of two stages, one of each copy.",
    "dualpipev": "DualPipe on half the ranks, with its two directions as the two arms of a V: one copy of the model. "
    "Where there is no B to run with, the backward is split.",
}


def timelines() -> dict[str, zp.Timeline]:
    made = {}
    for entry in entries():
        slices = {"slices": SLICES} if entry.sliced else {}
        schedule = zp.build(entry.name, ranks=RANKS, microbatches=MICROBATCHES, **slices)
        made[entry.name] = zp.simulate(schedule, zp.Costs().regroup(schedule.problem))
    return made


def concepts() -> dict[str, zp.Timeline | list[zp.Timeline]]:
    """The timelines of docs/concepts.md. All are of one model, on four ranks."""

    def run(name: str, microbatches: int, label: str = "") -> zp.Timeline:
        schedule = zp.build(name, ranks=RANKS, microbatches=microbatches)
        timeline = zp.simulate(schedule, zp.Costs().regroup(schedule.problem))
        return timeline.with_label(label) if label else timeline

    return {
        "one-microbatch": run("gpipe", 1, "one microbatch"),
        "microbatches": [run("gpipe", 4, "gpipe, 4 microbatches"), run("gpipe", 8, "gpipe, 8 microbatches")],
        "memory": [run("gpipe", 8), run("1f1b", 8)],
        "split": [run("1f1b", 6), run("zb-h1", 6)],
        "vee": run("zbv", 8),
    }


def row_of(entry: Entry, run: zp.Timeline) -> str:
    stages = f"{run.schedule.problem.stages_per_rank} ({run.schedule.placement.name})"
    shares = f"{percent(run.idle_fraction)} | {percent(run.bubble)}"
    numbers = f"{number(run.makespan)} | {shares} | {number(max(run.peak_memory))}"
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
    for name, concept in concepts().items():
        labels = "action" if name == "one-microbatch" else "microbatch"
        zp.draw(concept, pictures / f"concept-{name}.svg", width=600, labels=labels, memory=name == "memory")
    zp.draw([runs[name] for name in ("gpipe", "1f1b", "zb-h1", "zbv")], pictures / "four-steps.svg")
    zp.draw([runs[name] for name in ("1f1b", "seq1f1b")], pictures / "slices.svg", memory=True)
    many = zp.build("zbv", ranks=8, microbatches=96)
    zp.draw(zp.simulate(many, zp.Costs().regroup(many.problem)), pictures / "many-microbatches.svg")
    (folder / "gallery.md").write_text(HEAD + "".join(rows) + "".join(sections), "utf-8")


if __name__ == "__main__":
    write(Path(sys.argv[1]) if len(sys.argv) > 1 else Path(__file__).parent)
