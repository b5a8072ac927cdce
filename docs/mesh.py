"""Draws docs/mesh.svg, one step on a mesh of eight processes: `python docs/mesh.py [folder]`."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import zeropipe as zp
from zeropipe.core.action import Kind

SCHEDULE = zp.build("zb-h1", ranks=2, microbatches=4)
UNIT, LANE, GAP, LEFT, TOP = 46.0, 26.0, 14.0, 176.0, 64.0  # points per unit of time, heights, where time starts
BETWEEN = 34.0  # the two pipelines
GATHER, REDUCE = 1.6, 1.6  # units of time, ahead of the first F and behind the last W
WORDS = {Kind.F: "f", Kind.B: "i", Kind.I: "i", Kind.W: "w"}
STYLE = """
  svg { --text: #1d2330; --soft: #667085; --f: #9ec5fe; --i: #f8c48c; --w: #a6d9a0; --move: #d9cdf7; --line: #7a5af0;
        font: 12px system-ui, sans-serif; }
  @media (prefers-color-scheme: dark) { svg { --text: #e8ebf2; --soft: #98a2b3; --f: #2f5d9e; --i: #96591c;
        --w: #3c7a3a; --move: #51458a; --line: #a792ff; } }
  text { fill: var(--text); } .soft { fill: var(--soft); } .bold { font-weight: 600; }
  .f { fill: var(--f); } .i { fill: var(--i); } .w { fill: var(--w); } .move { fill: var(--move); }
  .line { stroke: var(--line); fill: none; stroke-width: 1.3; }
"""


def text(x: float, y: float, words: str, kind: str = "", anchor: str = "start") -> str:
    return f'<text x="{x:g}" y="{y:g}" class="{kind}" text-anchor="{anchor}">{words}</text>'


def box(x: float, y: float, width: float, height: float, kind: str, words: str = "") -> str:
    shape = f'<rect x="{x:g}" y="{y:g}" width="{width:g}" height="{height:g}" rx="3" class="{kind}"/>'
    return shape + (text(x + width / 2, y + height / 2 + 4, words, "", "middle") if words else "")


def line(x1: float, y1: float, x2: float, y2: float, kind: str = "line", arrow: bool = False) -> str:
    end = ' marker-end="url(#arrow)"' if arrow else ""
    return f'<path d="M{x1:g} {y1:g} L{x2:g} {y2:g}" class="{kind}"{end}/>'


def lane(pipeline: int, rank: int) -> float:
    """Where the row of a rank of a pipeline is."""
    return TOP + (2 * pipeline + rank) * (LANE + GAP) + pipeline * BETWEEN


def at(moment: float) -> float:
    return LEFT + (moment + GATHER) * UNIT


def pipelines() -> Iterator[str]:
    """Both pipelines run the schedule; what they share is gathered before it and reduced after it."""
    timeline = zp.simulate(SCHEDULE, zp.Costs(f=1, i=1, w=1))
    rows = [list(timeline.spans(rank)) for rank in range(2)]
    ends = [(row[0].start, row[-1].end) for row in rows]
    for rank, (first, last) in enumerate(ends):  # behind everything else
        for moment in (first - GATHER / 2, last + REDUCE / 2):
            x = at(moment) + (rank - 0.5) * 10
            yield line(x, lane(0, rank) + LANE, x, lane(1, rank))
    for pipeline in range(2):
        y = lane(pipeline, 0)
        yield text(8, y - 10, f"pipeline {pipeline}", "bold")
        for rank in range(2):
            y = lane(pipeline, rank)
            yield text(8, y + 17, f"pp {rank}, dp_shard {pipeline}, tp 0-1")
            for span in rows[rank]:
                name = f"{span.action.kind.name} {span.action.microbatch}"
                width = (span.end - span.start) * UNIT - 2
                yield box(at(span.start) + 1, y, width, LANE, WORDS[span.action.kind], name)
                if rank == 0 and span.action.kind is Kind.F:  # its output goes to the next rank
                    yield line(at(span.end) - 3, y + LANE, at(span.end) + 4, y + LANE + GAP - 2, arrow=True)
                if rank == 1 and span.action.kind is Kind.I:
                    yield line(at(span.end) - 3, y, at(span.end) + 4, y - GAP + 2, arrow=True)
    for rank, (first, last) in enumerate(ends):
        for pipeline in range(2):
            y = lane(pipeline, rank)
            yield box(at(first - GATHER) + 1, y, GATHER * UNIT - 2, LANE, "move", "UNSHARD")
            yield box(at(last) + 1, y, REDUCE * UNIT - 2, LANE, "move", "REDUCE")
    middle = lane(0, 1) + LANE + BETWEEN / 2 + 8
    yield text(at(3.2), middle, "dp_shard: pieces of weights are gathered, gradients are summed in pieces", "soft")


def inside() -> Iterator[str]:
    """One F of a layer on its two processes of tp."""
    y = lane(1, 1) + LANE + 46
    yield text(8, y - 14, "inside an F: the two processes of tp share every layer", "bold")
    parts = (
        ("norm", "f", 60), ("gather", "move", 62), ("q k v, attention, o", "f", 170), ("sum", "move", 50),
        ("norm", "f", 60), ("gather", "move", 62), ("gate, up, down", "f", 150), ("sum", "move", 50),
    )  # fmt: skip
    for place in range(2):
        x, row = LEFT, y + place * (LANE + GAP)
        yield text(8, row + 17, f"tp {place}")
        for number, (words, kind, width) in enumerate(parts):
            shown = f"{words}: half of the {'tokens' if words == 'norm' else 'heads' if number == 2 else 'columns'}"
            yield f"<g>{box(x + 1, row, width - 2, LANE, kind, words)}<title>{shown}</title></g>"
            if kind == "move" and place == 0:
                yield line(x + width / 2, row + LANE, x + width / 2, row + LANE + GAP)
            x += width
    words = "with sequence_parallel norms have half of the tokens; without it all of them, and nothing is gathered"
    yield text(LEFT, y + 2 * (LANE + GAP) + 8, words, "soft")


def picture() -> str:
    makespan = zp.simulate(SCHEDULE, zp.Costs(f=1, i=1, w=1)).makespan
    width, height = at(makespan + REDUCE) + 60, lane(1, 1) + LANE + 46 + 2 * (LANE + GAP) + 24
    arrow = (
        '<marker id="arrow" viewBox="0 0 8 8" refX="6" refY="4" markerWidth="6" markerHeight="6" orient="auto">'
        '<path d="M0 0 L8 4 L0 8 z" fill="var(--line)"/></marker>'
    )
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width:g} {height:g}" role="img">',
        "<title>One step on pp=2, dp_shard=2, tp=2</title>",
        f"<style>{STYLE}</style><defs>{arrow}</defs>",
        text(8, 22, f"One step of {SCHEDULE.name} on pp=2, dp_shard=2, tp=2: eight processes", "bold"),
        *pipelines(),
        *inside(),
        "</svg>",
    ]
    return "\n".join(parts) + "\n"


def write(folder: Path) -> None:
    (folder / "mesh.svg").write_text(picture())


if __name__ == "__main__":
    write(Path(sys.argv[1]) if len(sys.argv) > 1 else Path(__file__).parent)
