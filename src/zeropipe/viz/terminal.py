"""Timelines in the terminal: one line per rank, time compressed to the width."""

from __future__ import annotations

from collections.abc import Sequence
from math import ceil

import numpy as np
from rich.console import Console
from rich.style import Style
from rich.table import Table
from rich.text import Text

from zeropipe.core.ranking import rank_timelines
from zeropipe.core.timeline import ROUNDING, Timeline
from zeropipe.core.units import percent, size_text, time_text
from zeropipe.viz.axis import axis_unit, ticks
from zeropipe.viz.boxes import Boxes, boxes
from zeropipe.viz.cells import HALVES, IDLE, LEVELS, box_row, cell_time, dense_row, is_dense
from zeropipe.viz.colors import LANE_WORDS, MIXED, NAMES, lane_color, shades
from zeropipe.viz.density import KINDS
from zeropipe.viz.drawable import drawable
from zeropipe.viz.lanes import MARKS, THIN, cells, has_lane, looks_of


def show(timelines: Sequence[Timeline], width: int | None = None, console: Console | None = None) -> None:
    """Print timelines on one time axis, a legend and a summary."""
    console = console or Console(width=width, highlight=False)
    plain = console.no_color or console.color_system is None
    timelines = [drawable(t) for t in timelines]
    models = [boxes(t) for t in timelines]
    gutter = len(str(max(m.num_ranks for m in models) - 1)) + 6
    columns = max(10, (width or console.width) - gutter - 7)
    longest = max(m.makespan for m in models) or 1.0
    step = cell_time(models, longest, columns)
    columns = ceil(longest / step * (1 - 1e-9))
    dense = [is_dense(model, columns, step) for model in models]
    for timeline, model, coarse in zip(timelines, models, dense, strict=True):
        _print_heading(timeline, console)
        busy = _busy(timeline)
        for rank in range(model.num_ranks):
            name = f"rank {rank}".rjust(gutter - 1) + " "
            row = (dense_row if coarse else box_row)(model, rank, columns, step, plain)
            console.print(Text.assemble((name, "dim"), row, (f" {busy[rank]:>4}%", "dim")),
                          no_wrap=True, crop=False, overflow="ignore")  # fmt: skip
            if has_lane(timeline):
                below = _lane(cells(timeline, rank, columns, step), plain)
                console.print(Text.assemble(" " * gutter, below), no_wrap=True, crop=False, overflow="ignore")
        console.print()
    console.print(_axis(timelines[0].unit, longest, step, gutter))
    if any(dense):
        console.print(_density_note(models, dense, columns, plain))
    console.print(_legend(models, dense, plain, console.width, looks_of(timelines)))
    if len(timelines) > 1:
        console.print(_summary(timelines))


def _print_heading(timeline: Timeline, console: Console) -> None:
    facts = f"  {timeline.schedule.sizes}"
    numbers = f"  makespan {time_text(timeline.makespan, timeline.unit)}, idle {percent(timeline.idle_fraction)}"
    if timeline.memory:
        numbers += f", peak memory {size_text(max(timeline.peak_memory), timeline.memory_unit)}"
    whole = Text.assemble((timeline.title, "bold"), numbers, (facts, "dim"))
    if whole.cell_len <= console.width:
        console.print(whole, no_wrap=True)
        return
    console.print(Text.assemble((timeline.title, "bold"), numbers), no_wrap=True, overflow="ellipsis")
    console.print(Text(facts, "dim"), no_wrap=True, overflow="ellipsis")


def _busy(timeline: Timeline) -> list[int]:
    """Percent of the makespan that each rank is busy; 100 only if it is never idle."""
    makespan = timeline.makespan
    return [100 if busy * ROUNDING >= makespan else min(99, round(100 * busy / makespan)) for busy in timeline.busy]


def _density_note(models: Sequence[Boxes], dense: Sequence[bool], columns: int, plain: bool) -> Text:
    count = max(len(m.start) for m, coarse in zip(models, dense, strict=True) if coarse)
    note = f"Too many boxes ({count:,}) for {columns} columns: a cell's shade is its share of busy time"
    return Text(note + ("." if plain else ", its colour the kind that has most of it."), "dim")


def _axis(unit: str, longest: float, cell: float, gutter: int) -> Text:
    columns = ceil(longest / cell)
    factor, name = axis_unit(longest, unit)
    line = [" "] * (columns + 8)
    for time, text in ticks(longest, factor, max(2, columns // 12)):
        at = round(time / cell)
        line[at : at + len(text)] = text
    return Text(" " * gutter + "".join(line).rstrip() + f" {name}".rstrip(), "dim")


def _lane(looks: Sequence[str | None], plain: bool) -> Text:
    """The lane below a rank's boxes, as thin marks."""
    return Text.assemble(*(" " if look is None else _lane_mark(look, plain) for look in looks))


def _lane_mark(look: str, plain: bool) -> Text:
    return Text(MARKS[look]) if plain else Text(THIN, Style(color=lane_color("dark", look)))


def _legend(models: Sequence[Boxes], dense: Sequence[bool], plain: bool, width: int, looks: Sequence[str]) -> Text:
    """The meaning of letters, colours and marks, wrapped to `width`."""
    entries = [Text(f"{IDLE} idle", "dim"), Text("% busy", "dim")]
    if any(dense):
        full, *partly = (mark for _, mark in LEVELS)
        entries[:0] = [Text(f"{full} busy", "dim"), Text(f"{''.join(partly)} partly idle", "dim")]
        if not plain:
            entries.insert(0, Text.assemble(("  ", Style(bgcolor=MIXED)), " none has half"))
    if any(m.half.any() for m, coarse in zip(models, dense, strict=True) if not coarse):
        mark = Text("X") if plain else Text(HALVES * 2, Style(color=shades("F", 1)[0], bgcolor=shades("B", 1)[0]))
        entries.insert(0, Text.assemble(mark, " F and B overlapped"))
    if not (plain and all(dense)):  # no kind is visible there
        count = 1 if all(dense) else max(m.num_shades for m in models)
        kinds = sorted({int(k) for m in models for k in np.unique(m.kind)})
        entries[:0] = [_kind_entry(KINDS[kind], count, plain) for kind in kinds]
    if any(m.checkpointed for m in models):
        entries.append(Text("c checkpointed", "dim"))
    entries += [Text.assemble(_lane_mark(look, plain), f" {LANE_WORDS[look]}") for look in looks]
    lines = [entries[0]]
    for entry in entries[1:]:
        if lines[-1].cell_len + 3 + entry.cell_len <= width:
            lines[-1] = Text.assemble(lines[-1], "   ", entry)
        else:
            lines.append(entry)
    return Text("\n").join(lines)


def _kind_entry(kind: str, num_shades: int, plain: bool) -> Text:
    if plain:
        return Text(f"{kind} {NAMES[kind]}")
    colors = [("  ", Style(bgcolor=color)) for color in shades(kind, num_shades)]
    return Text.assemble(*colors, f" {kind} {NAMES[kind]}")


def _summary(timelines: Sequence[Timeline]) -> Table:
    table = Table(box=None, pad_edge=False)
    table.add_column("schedule")
    for head in ("makespan", "to best", "idle", "bubble rate", "peak memory"):
        table.add_column(head, justify="right")
    for t, standing in zip(timelines, rank_timelines(timelines).standings, strict=True):
        ratio = "best" if standing.best_time else f"x {standing.of_best:.3f}"
        peak = size_text(max(t.peak_memory), t.memory_unit) if t.memory else "-"
        table.add_row(
            Text(t.title), time_text(t.makespan, t.unit), ratio, percent(t.idle_fraction),
            percent(t.bubble),
            peak if standing.fits else f"{peak}, over the limit",
        )  # fmt: skip
    return table
