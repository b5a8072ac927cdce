"""Several schedules of one model under the same costs."""

from __future__ import annotations

from collections.abc import Iterable

from zeropipe.core.model.layers import layer_counts
from zeropipe.core.schedule import Schedule
from zeropipe.core.timeline import Timeline
from zeropipe.sim.costs import Costs
from zeropipe.sim.fill import fill_gaps
from zeropipe.sim.layer_costs import LayerCosts
from zeropipe.sim.simulate import simulate


def compare(
    schedules: Iterable[Schedule], costs: Costs | LayerCosts, *, weight_parts: int | None = None, per: str = "rank"
) -> list[Timeline]:
    """Simulate each schedule with costs per rank, so that all do the same work whatever their number of stages.

    With `per="stage"` costs are per stage, and a schedule with more stages does more work. With `weight_parts`,
    schedules with undivided W are passed through `fill_gaps`.
    """
    timelines = []
    for schedule in schedules:
        if isinstance(costs, LayerCosts):
            own = costs.schedule_costs(schedule, layer_counts(costs.num_layers, schedule.num_stages))
        else:
            own = costs.stage_costs(schedule.problem, schedule.placement, per)
        if weight_parts and schedule.problem.num_weight_parts == 1:
            schedule = fill_gaps(schedule, own, weight_parts=weight_parts)
        timelines.append(simulate(schedule, own))
    return timelines
