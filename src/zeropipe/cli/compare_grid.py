"""`compare --grid`: one number of each schedule at each size, in one table."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from zeropipe.cli import output

if TYPE_CHECKING:
    from zeropipe.core.ranking import Standing
    from zeropipe.core.timeline import Timeline

Row = tuple["Timeline", "Standing"]
NUMBERS: dict[str, Callable[[Timeline, Standing], str]] = {
    "makespan": lambda t, _: output.time_text(t.makespan, t.unit),
    "of-best": lambda _, standing: f"{standing.of_best:.3f}",
    "idle": lambda t, _: output.percent(t.idle_fraction),
    "to-ideal": lambda t, _: output.percent(t.bubble_to_ideal),
    "bubble-rate": lambda t, _: output.percent(t.bubble),
    "peak-memory": lambda t, _: output.size_text(max(t.peak_memory), t.memory_unit),
}


def print_grid(number: str, heading: str, rows: Sequence[Row]) -> None:
    """Print a row per schedule and a column per size; the star is at the fastest of each size."""
    from rich.markup import escape

    sizes = list(dict.fromkeys(size_of(t) for t, _ in rows))
    cells: dict[str, dict[tuple[int, int], str]] = {}
    for t, standing in rows:
        text = NUMBERS[number](t, standing)
        text = text if standing.fits else f"[red]{text} over[/]"
        cells.setdefault(t.title, {})[size_of(t)] = f"[bold green]{text} ★[/]" if standing.best_time else text
    console = output.console()
    console.print(heading, style="bold", markup=False)
    headings = [f"{ranks} ×\n{microbatches}" for ranks, microbatches in sizes]
    table = output.create_table("schedule", *headings, left=("schedule",))
    for title, found in cells.items():
        table.add_row(escape(title), *(found.get(size, "") for size in sizes))
    console.print(output.narrow_to_width(table, console))


def size_of(timeline: Timeline) -> tuple[int, int]:
    """(ranks, microbatches)."""
    return timeline.num_ranks, timeline.schedule.num_microbatches
