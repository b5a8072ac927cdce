"""How numbers and tables are printed."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

from zeropipe.core.units import percent, size_text, time_text

__all__ = ["console", "percent", "print_json", "print_written", "problem_text", "size_text", "table", "time_text"]

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

    from zeropipe.core.timeline import Timeline


NAMES = ("schedule", "name")  # columns that are not broken in the middle where others can give way


def console() -> Console:
    """Where people's output goes; rich respects NO_COLOR and the width by itself."""
    from rich.console import Console

    return Console(highlight=False, soft_wrap=False)


def print_json(data: Any) -> None:
    """Machine output: one JSON document."""
    print(json.dumps(data, indent=2))


def print_written(path: str) -> None:
    """Say that a file was written, and how large it is."""
    print(f"wrote {path} ({Path(path).stat().st_size:,} bytes)")


def table(*columns: str, left: tuple[str, ...] = (), title: str | None = None) -> Table:
    """A plain table; columns named in `left` are text, the others numbers."""
    from rich import box
    from rich.table import Table

    made = Table(box=box.SIMPLE_HEAD, title=title, title_justify="left", pad_edge=False)
    for column in columns:
        made.add_column(column, justify="left" if column in left else "right", overflow="fold", no_wrap=column in NAMES)
    return made


def problem_text(timeline: Timeline) -> str:
    """`zbv: 4 ranks, 8 stages (vee), 8 microbatches`."""
    s = timeline.schedule
    parts = s.problem.num_weight_parts
    return (
        f"{timeline.title}: {s.num_ranks} ranks, {s.num_stages} stages ({s.placement.name}), "
        f"{s.num_microbatches} microbatches" + (f", W in {parts} parts" if parts > 1 else "")
    )
