"""Options for per-layer costs: which setting to use, and how to cut the model."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Any

from zeropipe.cli.options import flag_of, require_single
from zeropipe.core.model.layers import format_counts, layer_counts, require_layer_counts
from zeropipe.errors import ConfigError, short

if TYPE_CHECKING:
    from zeropipe.core.placement import Placement, Problem
    from zeropipe.core.schedule import Schedule
    from zeropipe.core.timeline import Origin
    from zeropipe.sim.costs import Costs
    from zeropipe.sim.layer_costs import LayerCosts, Setting

_OLD_LAYERS = {"even": "even", "balanced": "time"}  # values of --layers -> of --balance


@dataclass(frozen=True)
class LayerOptions:
    """Options of a command line; None where not set."""

    ac: str | None = None
    microbatch: int | None = None
    tp: int | None = None
    layers: str | None = None  # like 2,3,3,2
    balance: str | None = None  # "even" or "time"
    sequence_parallel: bool | None = None

    @staticmethod
    def from_values(values: Mapping[str, Any]) -> LayerOptions:
        """From a command's keywords."""
        layers, balance = values.get("layers"), values.get("balance")
        if layers is not None and layers in _OLD_LAYERS:
            balance = balance or _OLD_LAYERS[layers]
            layers = None
        if layers is not None and balance is not None:
            raise ConfigError(f"--balance {balance} and --layers {layers}: use one of them")
        microbatch, tp = (
            require_single(name, values.get(name), "estimate and plan take") for name in ("microbatch", "tp")
        )
        return LayerOptions(values.get("ac"), microbatch, tp, layers, balance, values.get("sequence_parallel"))

    def require_unset(self, reason: str) -> None:
        """ConfigError for an option that is set."""
        for field in fields(self):
            value = getattr(self, field.name)
            if value is not None:
                raise ConfigError(f"{flag_of(field.name)} {value}: {reason}")

    def count_layers(self, costs: LayerCosts, problem: Problem, placement: Placement | None) -> tuple[int, ...]:
        """The number of layers of each stage; `placement` says which stages share a rank."""
        if self.balance != "time":
            return count_layers(self.layers, costs.num_layers, problem.num_stages)
        from zeropipe.balancing.balance import balanced_counts
        from zeropipe.core.placement import linear

        if placement is None and problem.stages_per_rank > 1:
            raise ConfigError("--balance time depends on which stages share a rank: pass --placement vee or loop")
        return balanced_counts(costs, problem, placement or linear(problem), self._find_setting(costs), self.ac)

    def stage_costs(
        self, costs: LayerCosts, problem: Problem, placement: Placement | None, node_size: int | None,
        checkpointing: bool = False,
    ) -> Costs:  # fmt: skip
        """The costs of each stage; with `checkpointing` also those of checkpointed F."""
        return costs.costs(
            self.count_layers(costs, problem, placement), self._find_setting(costs), ac=self.ac, placement=placement,
            node_size=node_size, checkpointing=checkpointing,
        )  # fmt: skip

    def describe(self, costs: LayerCosts, counts: tuple[int, ...] | None) -> str:
        """How layers are cut, into `counts` if they are known, and the setting if there are several."""
        if self.balance == "time":
            cut = "balanced over the stages" + (f": {format_counts(counts)}" if counts else "")
        else:
            cut = f"{self.layers} in the stages" if self.layers else "spread evenly over the stages"
        if len(costs.settings) == 1:
            return cut
        setting = self._find_setting(costs)
        text = str(setting).replace(f"ac {setting.ac}", f"ac {self.ac or setting.ac}", 1)
        is_default = self.ac is self.microbatch is self.tp is self.sequence_parallel is None
        return f"{cut}; setting: {text}{', the first in the file' if is_default else ''}"

    def _find_setting(self, costs: LayerCosts) -> Setting:
        return costs.setting(
            ac=self.ac, microbatch_size=self.microbatch, tp=self.tp, sequence_parallel=self.sequence_parallel
        )


@dataclass(frozen=True)
class RecordedSetting:
    """How a recorded run cut its model, and the setting of its costs."""

    counts: tuple[int, ...]
    setting: Setting
    ac: str | None = None


def find_recorded_setting(
    costs: LayerCosts, schedule: Schedule, origin: Origin | None, layers: str | None, modes: Sequence[str] = (),
    sizes: Sequence[int] = (),
) -> RecordedSetting:  # fmt: skip
    """The setting that a recording names; else the command line's, of which `modes` and `sizes` may have several."""
    from zeropipe.sim.refit import find_run_setting

    if origin is None:
        counts = count_layers(layers, costs.num_layers, schedule.num_stages)
        ac, microbatch = next(iter(modes), None), next(iter(sizes), None)
        return RecordedSetting(counts, find_run_setting(costs, None, ac, microbatch), ac)
    recorded = ",".join(map(str, origin.layers))
    for flag, given, value in (
        ("--layers", (layers,) if layers else (), recorded),
        ("--ac", modes, origin.ac),
        ("--microbatch", sizes, origin.microbatch_size),
    ):
        if given and value not in given:
            raise ConfigError(f"{flag} {','.join(map(str, given))}: the run had {value}; leave it out")
    num_layers = sum(origin.layers)
    if num_layers != costs.num_layers:
        raise ConfigError(
            f"the run's model has {num_layers} layers, {costs.model} has {costs.num_layers}: use costs of that model"
        )
    return RecordedSetting(origin.layers, find_run_setting(costs, origin), origin.ac)


def count_layers(layers: str | None, num_layers: int, num_stages: int) -> tuple[int, ...]:
    """The number of layers of each stage as --layers says, or spread evenly."""
    if layers is None or layers == "even":
        return layer_counts(num_layers, num_stages)
    return require_layer_counts(parse_layers(layers), num_layers, num_stages)


def parse_layers(layers: str) -> tuple[int, ...]:
    """Parse `2,3,3,2`."""
    try:
        return tuple(int(part) for part in layers.split(","))
    except ValueError:
        raise ConfigError(f"--layers {short(layers)}: must be one number per stage, like 2,3,3,2") from None
