"""Checks of schedules that users registered; built-in schedules are valid at every size."""

from __future__ import annotations

from zeropipe.core.check import check
from zeropipe.core.schedule import Schedule
from zeropipe.errors import ScheduleError
from zeropipe.schedules.registry import find


def validate_user_schedule(schedule: Schedule) -> None:
    """Raise ScheduleError, with its name, unless a registered schedule is built-in or valid."""
    if find(schedule.name).is_ours:
        return
    try:
        check(schedule)
    except ScheduleError as error:
        raise ScheduleError(f"{schedule.name}: {error}") from None
