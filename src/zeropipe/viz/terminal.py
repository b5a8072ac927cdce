"""Timelines in the terminal: one line per rank, time compressed to the width."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from rich.console import Console
from rich.style import Style
from rich.table import Table
from rich.text import Text

from zeropipe.core.timeline import Timeline
from zeropipe.core.units import number, percent, size_text, tick_step, time_text
from zeropipe.viz.boxes import UPPER, Boxes, boxes
from zeropipe.viz.colors import NAMES, ink_on, shades

IDLE = "·"
SPLIT = "▀"  # its upper half in the forward's colour, the lower one in the backward's


def show(timelines: Sequence[Timeline], width: int | None = None, console: Console | None = None) -> None:
    """Print timelines on one time axis, a legend and a summary."""
    console = console or Console(width=width, highlight=False)
    models = [boxes(t) for t in timelines]
    gutter = len(str(max(m.num_ranks for m in models) - 1)) + 6
    columns = max(10, (width or console.width) - gutter - 7)
    longest = max(m.makespan for m in models) or 1.0
    for timeline, model in zip(timelines, models, strict=True):
        console.print(_heading(timeline), no_wrap=True, overflow="ellipsis")
        for rank in range(model.num_ranks):
            name = f"rank {rank}".rjust(gutter - 1) + " "
            busy = Text(f" {100 * (1 - timeline.rank_bubble[rank]):4.0f}%", "dim")
            console.print(Text.assemble((name, "dim"), _row(model, rank, columns, longest / columns, console), busy),
                          no_wrap=True, crop=False, overflow="ignore")  # fmt: skip
        console.print()
    console.print(_axis(timelines[0].unit, longest, columns, gutter))
    console.print(_legend(models, console))
    if len(timelines) > 1:
        console.print(_summary(timelines))


def _heading(timeline: Timeline) -> Text:
    s = timeline.schedule
    facts = f"  {s.num_ranks} ranks, {s.num_stages} stages, {s.num_microbatches} microbatches"
    if s.problem.num_weight_parts > 1:
        facts += f", W in {s.problem.num_weight_parts} parts"
    numbers = f"  makespan {time_text(timeline.makespan, timeline.unit)}, bubble {percent(timeline.bubble)}"
    if timeline.memory:
        numbers += f", peak memory {size_text(max(timeline.peak_memory), timeline.memory_unit)}"
    return Text.assemble((timeline.title, "bold"), numbers, (facts, "dim"))


def _row(model: Boxes, rank: int, columns: int, step: float, console: Console) -> Text:
    """One cell per `step` of time: the box that fills most of it, or a dot."""
    plain = console.no_color or console.color_system is None
    begin, stop = int(model.offsets[rank]), int(model.offsets[rank + 1])
    owner = _owners(model.start[begin:stop], model.end[begin:stop], columns, step)
    used = min(columns, max(1, round(model.makespan / step)))
    row = Text()
    at = 0
    while at < used:
        run = at + 1
        while run < used and owner[run] == owner[at]:
            run += 1
        if owner[at] < 0:
            row.append(IDLE * (run - at), "dim")
        else:
            _box(row, model, begin + owner[at], run - at, plain)
        at = run
    return row.append(" " * (columns - used))


def _owners(start: Any, end: Any, columns: int, step: float) -> list[int]:
    """For each cell the box that has most of it, or -1 where more than half of it is idle."""
    owner, share, covered = [-1] * columns, [0.0] * columns, [0.0] * columns
    first = np.clip(np.floor(start / step + 1e-9), 0, columns - 1).astype(int).tolist()
    last = np.clip(np.ceil(end / step - 1e-9), 1, columns).astype(int).tolist()
    for i, (begin, stop) in enumerate(zip(start.tolist(), end.tolist(), strict=True)):
        for cell in range(first[i], last[i]):
            part = min(stop, (cell + 1) * step) - max(begin, cell * step)
            covered[cell] += part
            if part > share[cell] * (1 + 1e-9):
                owner[cell], share[cell] = i, part
    return [who if time >= 0.5 * step * (1 - 1e-9) else -1 for who, time in zip(owner, covered, strict=True)]


def _box(row: Text, model: Boxes, i: int, cells: int, plain: bool) -> None:
    kind = "FBIW"[int(model.kind[i])]
    label = str(model.microbatch[i])
    fill = shades(kind, model.num_shades)[int(model.shade[i])]
    if model.half[i] == UPPER:
        below = shades("FBIW"[int(model.kind[i + 1])], model.num_shades)[int(model.shade[i + 1])]
        both = f"X{label}&{model.microbatch[i + 1]}"
        text = (both if len(both) <= cells else "X").ljust(cells, "-") if plain else SPLIT * cells
        row.append(text, None if plain else Style(color=fill, bgcolor=below))
    elif plain:
        row.append((kind + label if len(label) < cells else kind).ljust(cells, "-"))
    else:
        text = label.ljust(cells) if len(label) <= cells else " " * cells
        row.append(text, Style(color=ink_on(fill), bgcolor=fill))


def _axis(unit: str, longest: float, columns: int, gutter: int) -> Text:
    step = tick_step(longest, max(2, columns // 12))
    line = [" "] * (columns + 8)
    for n in range(int(longest / step + 1e-9) + 1):
        text = time_text(n * step, unit) if unit == "s" else number(n * step)
        at = round(n * step / longest * columns)
        line[at : at + len(text)] = text
    return Text(" " * gutter + "".join(line).rstrip(), "dim")


def _legend(models: Sequence[Boxes], console: Console) -> Text:
    plain = console.no_color or console.color_system is None
    count = max(m.num_shades for m in models)
    legend = Text()
    for kind in sorted({int(k) for m in models for k in np.unique(m.kind)}):
        letter = "FBIW"[kind]
        for color in () if plain else shades(letter, count):
            legend.append("  ", Style(bgcolor=color))
        legend.append(f"{'' if plain else ' '}{letter} {NAMES[letter]}   ")
    if any(m.half.any() for m in models):
        mark = Text("X") if plain else Text(SPLIT * 2, Style(color=shades("F", 1)[0], bgcolor=shades("B", 1)[0]))
        legend.append(mark).append(" F and B overlapped   ")
    return legend.append(f"{IDLE} idle   % busy", "dim")


def _summary(timelines: Sequence[Timeline]) -> Table:
    best = min(t.makespan for t in timelines)
    table = Table(box=None, pad_edge=False)
    table.add_column("schedule")
    for head in ("makespan", "to best", "bubble", "peak memory"):
        table.add_column(head, justify="right")
    for t in timelines:
        ratio = "best" if t.makespan == best else f"x {t.makespan / best:.3f}"
        peak = size_text(max(t.peak_memory), t.memory_unit) if t.memory else "-"
        table.add_row(t.title, time_text(t.makespan, t.unit), ratio, percent(t.bubble), peak)
    return table
