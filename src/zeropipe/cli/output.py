"""How numbers and tables are printed."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from zeropipe.core.units import percent, size_text, time_text

__all__ = [
    "console", "costs_text", "fits", "fitted", "note", "percent", "print_json", "print_warnings", "print_written",
    "problem_text", "size_text", "summary", "table", "time_text",
]  # fmt: skip

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

    from zeropipe.core.schedule import Schedule
    from zeropipe.core.timeline import Timeline


FILE_WIDTH = 240  # of lines in files and pipes: cells are not folded there
NAMES = ("schedule", "name")  # columns that are not broken in the middle where others can give way


def console() -> Console:
    """Where people's output goes; rich respects NO_COLOR and a terminal's width; files and pipes have none."""
    from rich.console import Console

    has_width = sys.stdout.isatty() or "COLUMNS" in os.environ
    return Console(highlight=False, soft_wrap=False, width=None if has_width else FILE_WIDTH)


def print_json(data: Any) -> None:
    """Machine output: one JSON document."""
    print(json.dumps(data, indent=2))


def print_written(path: str, more: str = "") -> None:
    """Say that a file was written, and how large it is."""
    print(f"wrote {path} ({Path(path).stat().st_size:,} bytes){more and '; '}{more}")


def note(text: str) -> None:
    """A line beside the result."""
    console().print(text, style="dim", markup=False)


def print_warnings(schedule: Schedule) -> None:
    """What is allowed and still unwise."""
    from zeropipe.schedules.advice import advice

    for line in advice(schedule):
        console().print(f"warning: {line}", style="yellow", markup=False)


def table(*columns: str, left: tuple[str, ...] = (), title: str | None = None) -> Table:
    """A plain table; columns named in `left` are text, the others numbers."""
    from rich import box
    from rich.table import Table

    made = Table(box=box.SIMPLE_HEAD, title=title, title_justify="left", pad_edge=False, padding=(0, 1, 0, 0))
    for column in columns:
        made.add_column(column, justify="left" if column in left else "right", overflow="fold", no_wrap=column in NAMES)
    return made


def fits(made: Table, console: Console) -> bool:
    """Whether a table has room without a cell that is folded."""
    return console.measure(made, options=console.options.update(width=FILE_WIDTH)).maximum <= console.width


def fitted(made: Table, console: Console) -> Table:
    """The table, with its columns closer together where they would be folded."""
    if not fits(made, console):
        made.padding = 0
    return made


def problem_text(timeline: Timeline) -> str:
    """`zbv: 4 ranks, 8 stages (vee), 8 microbatches`."""
    return f"{timeline.title}: {timeline.schedule.sizes}"


def costs_text(per: str, cut: str = "") -> str:
    """What costs are of, as every command that takes some says it; `cut`: what becomes of those of layers."""
    words = {
        "rank": "costs per rank, divided among its stages",
        "stage": "costs per stage",
        "recording": "costs of the recording",
        "estimate": "estimated costs of layers",
        "profile": "measured costs of layers",
        "training file": "costs and layers of the training file; for other numbers of stages, spread evenly",
    }
    return f"{words[per]}, {cut}" if cut else words[per]


def summary(timeline: Timeline) -> dict[str, Any]:
    """All metrics of a timeline as plain data."""
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
