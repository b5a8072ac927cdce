"""Warnings about schedules that are valid and slow."""

from __future__ import annotations

from zeropipe.core.schedule import Schedule, require_schedule
from zeropipe.core.units import count_text


def advice(schedule: Schedule) -> tuple[str, ...]:
    """Warnings about a schedule, one line each; none for a sound one."""
    require_schedule(schedule)
    num_microbatches, num_stages = schedule.num_microbatches, schedule.num_stages
    if num_microbatches < num_stages and schedule.num_ranks > 1:
        return (
            f"{count_text(num_microbatches, 'microbatch')} for {num_stages} stages cannot fill the pipeline, so ranks "
            f"may be idle; use {num_stages} or more, or use fewer stages",
        )
    return ()
