"""What is allowed and still unwise."""

from __future__ import annotations

from zeropipe.core.schedule import Schedule, require_schedule


def advice(schedule: Schedule) -> tuple[str, ...]:
    """Warnings about a schedule, one line each; none for a sound one."""
    require_schedule(schedule)
    num_microbatches, num_stages = schedule.num_microbatches, schedule.num_stages
    if num_microbatches < num_stages and schedule.num_ranks > 1:
        return (
            f"{num_microbatches} microbatches for {num_stages} stages do not fill the pipeline, so ranks may be idle: "
            f"give {num_stages} or more, or use fewer stages",
        )
    return ()
