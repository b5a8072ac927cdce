"""Tables, numbers and JSON on stdout."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from zeropipe.core.units import percent, size_text, time_text

__all__ = [
    "console", "create_table", "fits_width", "narrow_to_width", "percent", "print_json", "print_note",
    "print_warnings", "print_written", "problem_text", "size_text", "time_text", "timeline_data",
]  # fmt: skip

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

    from zeropipe.core.schedule import Schedule
    from zeropipe.core.timeline import Timeline


FILE_WIDTH = 240  # characters of a line in a file or pipe, so that cells are not folded
UNBROKEN_COLUMNS = ("schedule", "name")  # other columns are folded first


def console() -> Console:
    """A console for stdout. rich respects NO_COLOR and the terminal's width; files and pipes have FILE_WIDTH."""
    from rich.console import Console

    has_width = sys.stdout.isatty() or "COLUMNS" in os.environ
    return Console(highlight=False, soft_wrap=False, width=None if has_width else FILE_WIDTH)


def print_json(data: Any) -> None:
    """Print one JSON document."""
    print(json.dumps(data, indent=2))


def print_written(path: str, note: str = "") -> None:
    """Print that a file was written, and its size."""
    print(f"wrote {path} ({Path(path).stat().st_size:,} bytes){note and '; '}{note}")


def print_note(text: str) -> None:
    """Print a line below the result, dimmed."""
    console().print(text, style="dim", markup=False)


def print_warnings(schedule: Schedule) -> None:
    """Print advice about a schedule."""
    from zeropipe.schedules.advice import advice

    for line in advice(schedule):
        console().print(f"warning: {line}", style="yellow", markup=False)


def create_table(*columns: str, left: tuple[str, ...] = ()) -> Table:
    """A plain table; the columns `left` are aligned left, as text."""
    from rich import box
    from rich.table import Table

    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, padding=(0, 1, 0, 0))
    for column in columns:
        justify: Any = "left" if column in left else "right"
        table.add_column(column, justify=justify, overflow="fold", no_wrap=column in UNBROKEN_COLUMNS)
    return table


def fits_width(table: Table, console: Console) -> bool:
    """Whether a table fits the console without folded cells."""
    return console.measure(table, options=console.options.update(width=FILE_WIDTH)).maximum <= console.width


def narrow_to_width(table: Table, console: Console) -> Table:
    """Remove the space between columns of a table that does not fit the console; returns it."""
    if not fits_width(table, console):
        table.padding = 0
    return table


def problem_text(timeline: Timeline) -> str:
    """`zbv: 4 ranks, 8 stages (vee), 8 microbatches`."""
    return f"{timeline.title}: {timeline.schedule.sizes}"


def timeline_data(timeline: Timeline) -> dict[str, Any]:
    """The metrics of a timeline as plain data."""
    from zeropipe.core.explain import critical_path, idle_times
    from zeropipe.schedules.advice import advice

    schedule = timeline.schedule
    return {
        "schedule": schedule.name,
        "title": timeline.title,
        "num_ranks": schedule.num_ranks,
        "num_stages": schedule.num_stages,
        "num_microbatches": schedule.num_microbatches,
        "num_weight_parts": schedule.problem.num_weight_parts,
        "num_actions": schedule.num_actions,
        "placement": schedule.placement.name,
        "unit": timeline.unit,
        "makespan": timeline.makespan,
        "idle_fraction": timeline.idle_fraction,
        "rank_idle_fraction": timeline.rank_idle_fraction,
        "bubble": timeline.bubble,
        "bubble_to_ideal": timeline.bubble_to_ideal,
        "rank_bubble": timeline.rank_bubble,
        "peak_memory": timeline.peak_memory,
        "memory_unit": timeline.memory_unit,
        "memory_limit": timeline.memory_limit,
        "busy": timeline.busy,
        "idle": [causes._asdict() for causes in idle_times(timeline)],
        "critical_path": [
            {"rank": span.rank, "action": str(span.action), "start": span.start, "end": span.end}
            for span in critical_path(timeline)
        ],
        "warnings": advice(schedule),
    }
