"""How numbers and tables are printed."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

from zeropipe.viz.units import percent, size_text, time_text

__all__ = ["console", "percent", "print_json", "problem_text", "size_text", "table", "time_text"]

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

    from zeropipe.core.timeline import Timeline


def console() -> Console:
    """Where people's output goes; rich respects NO_COLOR and the width by itself."""
    from rich.console import Console

    return Console(highlight=False, soft_wrap=False)


def print_json(data: Any) -> None:
    """Machine output: one JSON document."""
    print(json.dumps(data, indent=2))


def table(*columns: str, left: tuple[str, ...] = (), title: str | None = None) -> Table:
    """A plain table; columns named in `left` are text, the others numbers."""
    from rich import box
    from rich.table import Table

    made = Table(box=box.SIMPLE_HEAD, title=title, title_justify="left", pad_edge=False)
    for column in columns:
        made.add_column(column, justify="left" if column in left else "right", overflow="fold")
    return made


def problem_text(timeline: Timeline) -> str:
    """`zbv: 4 ranks, 8 stages (vee), 8 microbatches`."""
    s = timeline.schedule
    return (
        f"{timeline.title}: {s.num_ranks} ranks, {s.num_stages} stages ({s.placement.name}), "
        f"{s.num_microbatches} microbatches"
    )
