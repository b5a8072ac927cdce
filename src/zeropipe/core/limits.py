"""How large things may be: one place for the command line and the page. Python itself has none of these bounds."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from math import isfinite
from typing import Any

from zeropipe.core.action import MAX_STAGES
from zeropipe.core.schedule import Schedule
from zeropipe.core.timeline import Timeline
from zeropipe.errors import ConfigError, ScheduleError, short

MAX_DIGITS = 400  # of a number in a text; the largest float has 309
MAX_DEPTH = 8  # parts of a dotted key; ours have at most 4
MAX_TOML = 2**18  # characters; its reader is slow
SMALLEST, LARGEST = 1e-18, 1e18  # a cost that is not 0
LONGEST = 1e15  # of a timeline's times
# of a file that the page plans: a config.json or costs of layers
PLAN_TEXT = 2**18  # characters; the longest config.json that models have are a tenth of that
PLAN_DEPTH = 16  # tables in tables; transformers writes up to 5
PLAN_LAYERS = 512  # balancing them takes memory with the square of their number
PLAN_SETTINGS = 256


@dataclass(frozen=True)
class Limits:
    """What one way in takes, and what takes more."""

    where: str  # as messages name it
    instead: str
    actions: int  # of all schedules of one request together
    ranks: int
    file_bytes: int

    def require_ranks(self, ranks: int) -> None:
        """ConfigError for more ranks than it takes."""
        if ranks > self.ranks:
            raise ConfigError(f"ranks={ranks}: {self.where} takes up to {self.ranks:,}; take fewer, or {self.instead}")

    def require_actions(self, count: int, what: str, parts: int = 1) -> None:
        """ConfigError for more actions than it takes, every W in `parts`."""
        if count > self.actions:
            cut, fewer = (f" with W in {parts} parts", "parts, ") if parts > 1 else ("", "")
            raise ConfigError(
                f"{what} would have {count:,} actions{cut}, {self.where} takes up to {self.actions:,}: "
                f"take fewer {fewer}ranks, stages or microbatches, or {self.instead}"
            )

    def require_cells(self, text: str) -> None:
        """Refuse the text of a CSV by its cells, before it is read."""
        cells = text.count(",") + text.count("\n") + 1
        self.require_actions(cells, "it")
        # a complete schedule has no more stages or microbatches than cells; a larger number would make large tables
        huge = re.search(rf"[0-9]{{{len(str(cells)) + 1},}}", text)
        if huge:
            raise ScheduleError(f"the number {huge[0][:20]} is too large: the file has {cells} cells")

    def require_bytes(self, size: int, what: str) -> None:
        """ConfigError for a file that is larger than it takes."""
        if size > self.file_bytes:
            raise ConfigError(
                f"{what} has {-(-size // 2**20):,} MiB: {self.where} takes files up to "
                f"{self.file_bytes // 2**20:,} MiB; take a smaller one, or {self.instead}"
            )


COMMAND_LINE = Limits("the command line", "use Python (zp.build, zp.simulate)", 10_000_000, MAX_STAGES, 256 * 2**20)
PAGE = Limits("the page", "use the command line", 2_000_000, 1024, 64 * 2**20)


def num_actions(splits_backward: bool, ranks: int, microbatches: int, stages_per_rank: int, parts: int = 1) -> int:
    """How many actions a schedule will have at most, every W in `parts`, known before it is built."""
    return ranks * stages_per_rank * microbatches * (2 + parts if splits_backward else 2)


def has_weight_gradients(schedule: Schedule) -> bool:
    """Whether a complete schedule has a W at all."""
    return num_cut(schedule, 2) > num_cut(schedule, 1)


def num_cut(schedule: Schedule, parts: int) -> int:
    """How many actions a complete schedule of whole W will have once each W is in `parts`."""
    others = 2 * schedule.num_stages * schedule.num_microbatches  # F, and B or I
    return others + parts * max(0, schedule.num_actions - others)


def require_costs(data: Mapping[str, Any], where: str = "") -> None:
    """ConfigError for a cost whose sums would leave the range of a float; `data` is Costs as plain data."""
    for name, value in data.items():
        if isinstance(value, Mapping):
            require_costs(value, f"{where}{name}.")
            continue
        for number in value if isinstance(value, (list, tuple)) else [value]:
            usable = type(number) is int or (isinstance(number, float) and isfinite(number))
            if usable and number > 0 and not SMALLEST <= number <= LARGEST:
                raise ConfigError(f"{where}{name}={short(number)}: give 0, or a number from {SMALLEST} to {LARGEST}")


def require_times(timeline: Timeline) -> None:
    """ScheduleError for what cannot be summed up or drawn; that times are finite and in order, `from_json` has seen."""
    first, last = timeline.first_start, timeline.first_start + timeline.makespan
    if not -LONGEST <= first <= last <= LONGEST:
        raise ScheduleError(f"it runs from {first} to {last}: times up to {LONGEST:g} can be drawn")
    if 0 < timeline.makespan <= 1 / LONGEST:
        raise ScheduleError(f"it takes {timeline.makespan}: times from {1 / LONGEST:g} on can be drawn")
    limit = timeline.memory_limit
    if limit is not None and not 0 <= limit < LONGEST:
        raise ScheduleError(f"memory_limit={limit}: give 0 to {LONGEST:g}")
