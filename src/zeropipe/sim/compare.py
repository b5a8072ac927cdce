"""Several schedules of one model under the same costs."""

from __future__ import annotations

from collections.abc import Iterable

from zeropipe.core.placement import Placement, Problem
from zeropipe.core.ranking import Ranking, Standing, rank_timelines
from zeropipe.core.schedule import Schedule
from zeropipe.core.timeline import Timeline
from zeropipe.sim.costs import Costs
from zeropipe.sim.fill import fill_gaps
from zeropipe.sim.layer_costs import LayerCosts
from zeropipe.sim.simulate import simulate

__all__ = ["Ranking", "Standing", "compare", "rank_timelines", "stage_costs"]


def stage_costs(
    costs: Costs | LayerCosts, problem: Problem, per: str = "rank", placement: Placement | None = None
) -> Costs:
    """The costs of each stage, from costs that are of a rank's part of the model, or ("stage") of a stage already.

    Costs of layers are those of a cut that is as even as can be; `placement` says which stages share a rank.
    """
    if isinstance(costs, LayerCosts):
        return costs.even(problem, placement)
    return costs if per == "stage" else costs.regrouped(problem)


def compare(
    schedules: Iterable[Schedule], costs: Costs, *, weight_parts: int | None = None, per: str = "rank"
) -> list[Timeline]:
    """Simulate each with `costs` given per rank, so that every schedule does the same work however it is cut.

    With `per="stage"` they are taken as they are, and a schedule with more stages does more work. With `weight_parts`,
    each whose W are whole is first handed to `fill_gaps`.
    """
    timelines = []
    for schedule in schedules:
        own = stage_costs(costs, schedule.problem, per, schedule.placement)
        if weight_parts and schedule.problem.num_weight_parts == 1:
            schedule = fill_gaps(schedule, own, weight_parts=weight_parts)
        timelines.append(simulate(schedule, own))
    return timelines
