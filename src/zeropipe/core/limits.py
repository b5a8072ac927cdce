"""Limits of the sizes that the command line and the page accept. The Python interface has none of them."""

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
MAX_TOML_CHARACTERS = 2**18  # its parser is slow
MIN_COST, MAX_COST = 1e-18, 1e18  # of a cost that is not 0
MAX_TIME = 1e15  # in a timeline
# files that the page plans: a config.json or costs of layers
MAX_PLAN_CHARACTERS = 2**18  # the longest config.json of a published model has a tenth of that
MAX_PLAN_DEPTH = 16  # nested tables; transformers writes up to 5
MAX_PLAN_LAYERS = 512  # balancing takes memory with the square of their number
MAX_PLAN_SETTINGS = 256


@dataclass(frozen=True)
class Limits:
    """Limits of one interface."""

    interface: str  # as in messages
    way_out: str  # an interface with higher limits
    actions: int  # of all schedules of a request together
    ranks: int
    file_bytes: int

    def require_ranks(self, ranks: int) -> None:
        """ConfigError for too many ranks."""
        if ranks > self.ranks:
            raise ConfigError(
                f"ranks={ranks}: {self.interface} takes up to {self.ranks:,}; use fewer, or {self.way_out}"
            )

    def require_actions(self, count: int, what: str, parts: int = 1) -> None:
        """ConfigError for too many actions, if every W has `parts`."""
        if count > self.actions:
            having, fewer = (f" with W in {parts} parts", "parts, ") if parts > 1 else ("", "")
            raise ConfigError(
                f"{what} would have {count:,} actions{having}, {self.interface} takes up to {self.actions:,}; "
                f"use fewer {fewer}ranks, stages or microbatches, or {self.way_out}"
            )

    def require_cells(self, text: str) -> None:
        """ConfigError for a CSV with too many cells, before it is parsed."""
        cells = text.count(",") + text.count("\n") + 1
        self.require_actions(cells, "it")
        # a complete schedule has no more stages or microbatches than cells; a larger number would need large tables
        too_long = re.search(rf"[0-9]{{{len(str(cells)) + 1},}}", text)
        if too_long:
            raise ScheduleError(f"the number {too_long[0][:20]} is too large: the file has {cells} cells")

    def require_bytes(self, size: int, what: str) -> None:
        """ConfigError for a file that is too large."""
        if size > self.file_bytes:
            raise ConfigError(
                f"{what} has {-(-size // 2**20):,} MiB: {self.interface} takes files up to "
                f"{self.file_bytes // 2**20:,} MiB; use a smaller one, or {self.way_out}"
            )


COMMAND_LINE = Limits("the command line", "use Python (zp.build, zp.simulate)", 10_000_000, MAX_STAGES, 256 * 2**20)
PAGE = Limits("the page", "use the command line", 2_000_000, 1024, 64 * 2**20)


def num_actions(splits_backward: bool, ranks: int, microbatches: int, stages_per_rank: int, parts: int = 1) -> int:
    """An upper bound of the actions of a schedule, before it is built, if every W has `parts`."""
    return ranks * stages_per_rank * microbatches * (2 + parts if splits_backward else 2)


def has_weight_gradients(schedule: Schedule) -> bool:
    """Whether a complete schedule has a W."""
    return num_actions_with_parts(schedule, 2) > num_actions_with_parts(schedule, 1)


def num_actions_with_parts(schedule: Schedule, parts: int) -> int:
    """The number of actions of a complete schedule when each W is divided into `parts`."""
    others = 2 * schedule.num_stages * schedule.problem.total_slices  # F, and B or I
    return others + parts * max(0, schedule.num_actions - others)


def require_costs(data: Mapping[str, Any], where: str = "") -> None:
    """ConfigError for a cost whose sums would leave the range of a float; `data` is Costs as plain data."""
    for name, value in data.items():
        if isinstance(value, Mapping):
            require_costs(value, f"{where}{name}.")
            continue
        for number in value if isinstance(value, (list, tuple)) else [value]:
            if isinstance(number, (Mapping, list)):  # the phases of layers
                require_costs(number if isinstance(number, Mapping) else {name: number}, f"{where}{name}.")
                continue
            is_number = type(number) is int or (isinstance(number, float) and isfinite(number))
            if is_number and number > 0 and not MIN_COST <= number <= MAX_COST:
                raise ConfigError(f"{where}{name}={short(number)}: must be 0, or from {MIN_COST} to {MAX_COST}")


def require_times(timeline: Timeline) -> None:
    """ScheduleError for times that cannot be summed or drawn. `from_json` has checked that they are finite."""
    first, last = timeline.first_start, timeline.first_start + timeline.makespan
    if not -MAX_TIME <= first <= last <= MAX_TIME:
        raise ScheduleError(f"it runs from {first} to {last}: times must be at most {MAX_TIME:g}")
    if 0 < timeline.makespan <= 1 / MAX_TIME:
        raise ScheduleError(f"it takes {timeline.makespan}: times must be at least {1 / MAX_TIME:g}")
    limit = timeline.memory_limit
    if limit is not None and not 0 <= limit < MAX_TIME:
        raise ScheduleError(f"memory_limit={limit}: must be from 0 to {MAX_TIME:g}")
