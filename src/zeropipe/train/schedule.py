"""The schedule that a run executes: that of the training file, with `schedule.offload` and `schedule.checkpointing`."""

from __future__ import annotations

from dataclasses import replace
from math import inf

from zeropipe.core.schedule import Schedule
from zeropipe.errors import ConfigError
from zeropipe.planning.context import PlanContext
from zeropipe.sim.checkpointing import with_checkpointing
from zeropipe.sim.costs import Costs
from zeropipe.sim.offload import parse_offload, with_offload
from zeropipe.train.config.tables import RunConfig
from zeropipe.train.inputs import build_schedule, choose_layers, load_layer_costs
from zeropipe.train.stage_costs import explain_mismatch, make_candidate, memory_limit, state_bytes


def build_run_schedule(config: RunConfig) -> Schedule:
    """The schedule of one pipeline, with OFFLOAD and RELOAD, or checkpointed F, if the training file says so."""
    schedule, offload = build_schedule(config), config.schedule.offload
    if config.schedule.checkpointing is not None:
        return with_checkpointing(schedule, _checkpointed_costs(config, schedule))
    if offload is None:
        return schedule
    offload = parse_offload(offload)
    costs = None if isinstance(offload, float) else _offload_costs(config, schedule)
    return with_offload(schedule, costs, offload)


def _offload_costs(config: RunConfig, schedule: Schedule) -> Costs:
    """The costs of the run's stages; ConfigError if they cannot say which copies hide."""
    field = f"offload={config.schedule.offload!r}"
    found = _stage_costs(config, schedule, field, "use a share from 0 to 1")
    if found.offload_bandwidth is None:
        raise ConfigError(f"{field} needs the speed of the link to the host, which these costs lack: use a share")
    return found


def _checkpointed_costs(config: RunConfig, schedule: Schedule) -> Costs:
    """The costs of the run's stages; ConfigError if they do not know a memory limit."""
    found = _stage_costs(config, schedule, "checkpointing='fit'", "use engine.ac")
    if found.memory_limit is None:
        raise ConfigError("checkpointing='fit' needs the memory of the GPU, which these costs lack: use engine.ac")
    return found


def _stage_costs(config: RunConfig, schedule: Schedule, field: str, way_out: str) -> Costs:
    """The costs of the run's stages; ConfigError if they are not known."""
    costs = load_layer_costs(config)
    if costs is None:
        raise ConfigError(f"{field} needs the times of layers: set schedule.costs to a GPU like h100, or {way_out}")
    if reason := explain_mismatch(config, costs):
        raise ConfigError(f"{field}: {reason}; {way_out}")
    costs, limit = replace(costs, state=state_bytes(config)), memory_limit(costs)
    context = PlanContext.create(costs, config.schedule.gpus_per_node, inf if limit is None else limit)
    candidate = make_candidate(config, schedule.problem, schedule.name, config.schedule.checkpointing is not None)
    return context.for_schedule(schedule).stage_costs(candidate, choose_layers(config, schedule), schedule.placement)
