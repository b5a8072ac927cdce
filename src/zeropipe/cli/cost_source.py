"""The costs of a command line, whatever they are of: ranks, stages, layers of a costs file, or a training file."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Protocol

from zeropipe.cli.options import flag_of
from zeropipe.cli.param_types import Bytes
from zeropipe.errors import ConfigError

if TYPE_CHECKING:
    from zeropipe.cli.layer_options import LayerOptions
    from zeropipe.core.placement import Placement, Problem
    from zeropipe.core.schedule import Schedule
    from zeropipe.sim.costs import Costs
    from zeropipe.sim.layer_costs import LayerCosts
    from zeropipe.train.stage_costs import RunCosts

HAVE_LAYERS = "these costs are per layer, and a stage costs what its layers cost; leave it out"
_LINK = ("p2p", "bandwidth")


class CostSource(Protocol):
    """Costs of any schedule. `name` is the `costs_per` of JSON output."""

    @property
    def name(self) -> str: ...

    @property
    def plain_costs(self) -> Costs:
        """The costs per rank or stage; ConfigError if they are per layer."""

    def stage_costs(
        self, problem: Problem, placement: Placement | None = None, schedule: Schedule | None = None,
        checkpointing: bool = False,
    ) -> Costs:  # fmt: skip
        """The costs of each stage, of `schedule` if it is known; `placement` says which stages share a rank.

        With `checkpointing` the costs of checkpointed F are there too, also if the schedule has none.
        """

    def count_layers(self, problem: Problem, placement: Placement | None) -> tuple[int, ...] | None:
        """The number of layers of each stage, if the command line cuts a model."""

    def describe(self, layers: tuple[int, ...] | None = None) -> str:
        """What the costs are of, in one line; `layers` are those of each stage."""


@dataclass(frozen=True)
class PlainCosts:
    """Costs per rank or per stage; those of a recording, if `is_recorded`."""

    costs: Costs
    per: str
    flags: Mapping[str, Any]  # single costs of the command line
    is_recorded: bool = False

    @property
    def name(self) -> str:
        return "recording" if self.is_recorded else self.per

    @property
    def plain_costs(self) -> Costs:
        return _override_costs(self.costs, self.flags)

    def stage_costs(
        self, problem: Problem, placement: Placement | None = None, schedule: Schedule | None = None,
        checkpointing: bool = False,
    ) -> Costs:  # fmt: skip
        return self.plain_costs.stage_costs(problem, per=self.per)

    def count_layers(self, problem: Problem, placement: Placement | None) -> tuple[int, ...] | None:
        return None

    def describe(self, layers: tuple[int, ...] | None = None) -> str:
        if self.is_recorded:
            return "costs of the recording"
        return "costs per stage" if self.per == "stage" else "costs per rank, divided among its stages"


@dataclass(frozen=True)
class LayerFileCosts:
    """Costs per layer of a file that `estimate` or `profile` wrote."""

    costs: LayerCosts
    options: LayerOptions
    flags: Mapping[str, Any]  # single costs of the command line

    @property
    def name(self) -> str:
        return self.costs.source

    @property
    def plain_costs(self) -> Costs:
        raise _per_layer(self.costs.model)

    def stage_costs(
        self, problem: Problem, placement: Placement | None = None, schedule: Schedule | None = None,
        checkpointing: bool = False,
    ) -> Costs:  # fmt: skip
        _require_no_stage_costs(self.flags, self.costs.model)
        costs = self.costs
        if schedule is not None:
            costs, checkpointing = costs.for_schedule(schedule), checkpointing or bool(schedule.checkpointed)
        found = self.options.stage_costs(costs, problem, placement, self.flags.get("node_size"), checkpointing)
        return _override_costs(found, self.flags)

    def count_layers(self, problem: Problem, placement: Placement | None) -> tuple[int, ...] | None:
        return self.options.count_layers(self.costs, problem, placement)

    def describe(self, layers: tuple[int, ...] | None = None) -> str:
        kind = "estimated" if self.costs.source == "estimate" else "measured"
        return f"{kind} costs of layers, {self.options.describe(self.costs, layers)}"


@dataclass(frozen=True)
class TrainingFileCosts:
    """Costs of the run of a training file."""

    costs: RunCosts
    flags: Mapping[str, Any]  # single costs of the command line
    name: str = "training file"

    @property
    def plain_costs(self) -> Costs:
        raise _per_layer(self.costs.model)

    def stage_costs(
        self, problem: Problem, placement: Placement | None = None, schedule: Schedule | None = None,
        checkpointing: bool = False,
    ) -> Costs:  # fmt: skip
        from zeropipe.core.placement import linear

        _require_no_stage_costs(self.flags, self.costs.model)
        found = self.costs.of(problem, placement or linear(problem), None, schedule, checkpointing)
        return _override_costs(found, self.flags)

    def count_layers(self, problem: Problem, placement: Placement | None) -> tuple[int, ...] | None:
        return None

    def describe(self, layers: tuple[int, ...] | None = None) -> str:
        return "costs and layers of the training file; for other numbers of stages, spread evenly"


def create_source(
    costs: Costs | LayerCosts | RunCosts | None, per: str | None, options: LayerOptions, flags: Mapping[str, Any]
) -> CostSource:
    """The source for the costs of a file, or for the default costs, with single costs of the command line."""
    from zeropipe.sim.costs import Costs
    from zeropipe.sim.layer_costs import LayerCosts

    if costs is None or isinstance(costs, Costs):
        options.require_unset("only costs of layers depend on it; pass --costs FILE of estimate or profile")
        return PlainCosts(costs or Costs(), per or "rank", flags)
    if per:
        raise ConfigError(f"--per {per}: {HAVE_LAYERS}")
    if isinstance(costs, LayerCosts):
        return LayerFileCosts(costs, options, flags)
    options.require_unset("set by the training file; change it there, or pass --costs")
    return TrainingFileCosts(costs, flags)


def _override_costs(costs: Costs, flags: Mapping[str, Any]) -> Costs:
    """`costs` with single costs replaced."""
    inter = costs.inter_node._replace(**{name: flags[f"inter_{name}"] for name in _LINK if f"inter_{name}" in flags})
    others = {name: value for name, value in flags.items() if not name.startswith("inter_")}
    for name in _LINK:
        if f"inter_{name}" in flags and others.get("node_size", costs.node_size) is None:
            raise ConfigError(f"--inter-{name} is for links between machines: pass their ranks, --node-size N")
    found = replace(costs, inter_node=inter, **others)
    for name in ("bandwidth", "inter_bandwidth"):
        if name in flags and found.message == 0:
            raise ConfigError(f"{flag_of(name)} {flags[name]:g} has no effect on messages of size 0: pass --message N")
    require_unit("--memory-limit", found.memory_limit, found)
    return found


def require_unit(flag: str, limit: float | None, costs: Costs) -> None:
    """ConfigError for a limit in bytes if memory has another unit."""
    has_default_memory = not costs.memory_unit and costs.activation == 1 and costs.weights == 0
    if isinstance(limit, Bytes) and (has_default_memory or costs.memory_unit not in ("", "B")):
        unit = repr(costs.memory_unit) if costs.memory_unit else "activations"
        raise ConfigError(f"{flag} is in bytes, but memory of these costs is in {unit}: use that unit, like 8")


def _per_layer(model: str) -> ConfigError:
    return ConfigError(f"these are costs of the layers of {model}: name a schedule, or use costs per rank")


def _require_no_stage_costs(flags: Mapping[str, Any], model: str) -> None:
    from zeropipe.sim.costs import PER_STAGE

    for name in PER_STAGE:
        if name in flags:
            raise ConfigError(f"{flag_of(name)}: set by the costs of the layers of {model}; leave it out")
