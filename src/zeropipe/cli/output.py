"""How numbers and tables are printed."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

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


def number(value: float) -> str:
    """A number without needless digits."""
    return f"{value:.4g}" if abs(value) < 1e4 else f"{value:,.0f}"


def percent(rate: float) -> str:
    return f"{100 * rate:.1f}%"


def time_text(value: float, unit: str) -> str:
    """A time in its unit: seconds are scaled, abstract units are not."""
    if unit != "s":
        return number(value) + (f" {unit}" if unit else "")
    for size, name in ((1.0, "s"), (1e-3, "ms"), (1e-6, "us")):
        if abs(value) >= size:
            return f"{value / size:.3g} {name}"
    return f"{value / 1e-6:.3g} us"


def memory_text(value: float, unit: str) -> str:
    """A memory level in its unit: bytes are scaled, abstract units are not."""
    if unit != "B":
        return number(value)
    for size, name in ((2**30, "GiB"), (2**20, "MiB"), (2**10, "KiB")):
        if value >= size:
            return f"{value / size:.3g} {name}"
    return f"{value:.0f} B"


def problem_text(timeline: Timeline) -> str:
    """`zbv: 4 ranks, 8 stages (vee), 8 microbatches`."""
    s = timeline.schedule
    return (
        f"{timeline.title}: {s.num_ranks} ranks, {s.num_stages} stages ({s.placement.name}), "
        f"{s.num_microbatches} microbatches"
    )
