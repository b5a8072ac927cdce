"""Proves schedules that users registered, where ours need no proof."""

from __future__ import annotations

from zeropipe.core.check import check
from zeropipe.core.schedule import Schedule
from zeropipe.errors import ScheduleError
from zeropipe.schedules.registry import find


def require_right(schedule: Schedule) -> None:
    """ScheduleError, with its name, for a schedule of a user's that is wrong; ours are right at every size."""
    if find(schedule.name).is_ours:
        return
    try:
        check(schedule)
    except ScheduleError as error:
        raise ScheduleError(f"{schedule.name}: {error}") from None
