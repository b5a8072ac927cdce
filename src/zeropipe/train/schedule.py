"""The schedule that a run executes: that of the training file, with `schedule.offload`."""

from __future__ import annotations

from math import inf

from zeropipe.core.schedule import Schedule
from zeropipe.errors import ConfigError
from zeropipe.planning.context import PlanContext
from zeropipe.sim.costs import Costs
from zeropipe.sim.offload import parse_offload, with_offload
from zeropipe.train.config.tables import RunConfig
from zeropipe.train.inputs import build_schedule, choose_layers, load_layer_costs
from zeropipe.train.stage_costs import explain_mismatch, make_candidate, memory_limit


def build_run_schedule(config: RunConfig) -> Schedule:
    """The schedule of one pipeline, with OFFLOAD and RELOAD if the training file says so."""
    schedule, offload = build_schedule(config), config.schedule.offload
    if offload is None:
        return schedule
    offload = parse_offload(offload)
    costs = None if isinstance(offload, float) else _stage_costs(config, schedule)
    return with_offload(schedule, costs, offload)


def _stage_costs(config: RunConfig, schedule: Schedule) -> Costs:
    """The costs of the run's stages; ConfigError if they cannot say which copies hide."""
    costs, field = load_layer_costs(config), f"offload={config.schedule.offload!r}"
    if costs is None:
        raise ConfigError(f"{field} needs the times of layers: set schedule.costs to a GPU like h100, or use a share")
    if reason := explain_mismatch(config, costs):
        raise ConfigError(f"{field}: {reason}; use a share from 0 to 1")
    limit = memory_limit(costs)
    context = PlanContext.create(costs, config.schedule.gpus_per_node, inf if limit is None else limit)
    candidate = make_candidate(config, schedule.problem, schedule.name)
    found = context.for_schedule(schedule).stage_costs(candidate, choose_layers(config, schedule), schedule.placement)
    if found.offload_bandwidth is None:
        raise ConfigError(f"{field} needs the speed of the link to the host, which these costs lack: use a share")
    return found
