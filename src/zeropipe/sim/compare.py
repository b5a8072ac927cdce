"""Several schedules of one model under the same costs."""

from __future__ import annotations

from collections.abc import Iterable

from zeropipe.core.schedule import Schedule
from zeropipe.core.timeline import Timeline
from zeropipe.sim.costs import Costs
from zeropipe.sim.simulate import simulate


def compare(schedules: Iterable[Schedule], costs: Costs) -> list[Timeline]:
    """Simulate each with `costs` given per rank, so that every schedule does the same work however it is cut."""
    return [simulate(schedule, costs.regrouped(schedule.problem)) for schedule in schedules]
