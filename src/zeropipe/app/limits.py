"""What the page takes: bounds that keep one request from eating the machine. The command line has none of them."""

from __future__ import annotations

from math import isfinite
from typing import Any

from zeropipe.core.schedule import Schedule
from zeropipe.errors import ConfigError
from zeropipe.schedules.registry import Entry

MAX_ACTIONS = 2_000_000  # of one request, all its schedules together
MAX_RANKS = 1024
MAX_CHOICES = 64
MAX_BODY = 64 * 2**20  # bytes
SMALLEST, LARGEST = 1e-18, 1e18  # a cost that is not 0


def num_actions(entry: Entry, ranks: int, microbatches: int, stages_per_rank: int, parts: int = 1) -> int:
    """How many actions a schedule will have at most, every W in `parts`, known before it is built."""
    return ranks * stages_per_rank * microbatches * (2 + parts if entry.splits_backward else 2)


def num_cut(schedule: Schedule, parts: int) -> int:
    """How many actions a complete schedule of whole W will have once each W is in `parts`."""
    others = 2 * schedule.num_stages * schedule.num_microbatches  # F, and B or I
    return others + parts * max(0, schedule.num_actions - others)


def require_actions(count: int, what: str, parts: int = 1) -> None:
    """ConfigError for more actions than the page takes."""
    if count > MAX_ACTIONS:
        cut, fewer = (f" with W in {parts} parts", "parts, ") if parts > 1 else ("", "")
        raise ConfigError(
            f"{what} would have {count:,} actions{cut}, the page takes up to {MAX_ACTIONS:,}: "
            f"take fewer {fewer}ranks, stages or microbatches, or use the command line"
        )


def require_costs(data: dict[str, Any]) -> None:
    """ConfigError for a cost whose sums would leave the range of a float."""
    for name, value in data.items():
        if isinstance(value, dict):
            require_costs({f"{name}.{key}": inner for key, inner in value.items()})
            continue
        for number in value if isinstance(value, list) else [value]:
            usable = isinstance(number, (int, float)) and not isinstance(number, bool) and isfinite(number)
            if usable and number > 0 and not SMALLEST <= number <= LARGEST:
                raise ConfigError(f"{name}={number!r}: the page takes 0, or numbers from {SMALLEST} to {LARGEST}")
