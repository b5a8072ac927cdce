"""Several schedules of one model under the same costs."""

from __future__ import annotations

from collections.abc import Iterable

from zeropipe.core.ranking import Ranking, Standing, ranking
from zeropipe.core.schedule import Schedule
from zeropipe.core.timeline import Timeline
from zeropipe.sim.costs import Costs
from zeropipe.sim.fill import fill_gaps
from zeropipe.sim.simulate import simulate

__all__ = ["Ranking", "Standing", "compare", "ranking"]


def compare(schedules: Iterable[Schedule], costs: Costs, *, weight_parts: int | None = None) -> list[Timeline]:
    """Simulate each with `costs` given per rank, so that every schedule does the same work however it is cut.

    With `weight_parts`, each whose W are whole is first handed to `fill_gaps`.
    """
    timelines = []
    for schedule in schedules:
        own = costs.regrouped(schedule.problem)
        if weight_parts and schedule.problem.num_weight_parts == 1:
            schedule = fill_gaps(schedule, own, weight_parts=weight_parts)
        timelines.append(simulate(schedule, own))
    return timelines
