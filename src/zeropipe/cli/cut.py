"""How a model runs of which a file tells what its layers cost: --ac, --microbatch-size, --tp, and --layers, its cut."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Any

from zeropipe.core.model.layers import format_counts, layer_counts, require_layer_counts
from zeropipe.errors import ConfigError, short

if TYPE_CHECKING:
    from zeropipe.core.placement import Placement, Problem
    from zeropipe.core.schedule import Schedule
    from zeropipe.core.timeline import Origin
    from zeropipe.sim.costs import Costs
    from zeropipe.sim.layer_costs import LayerCosts, Setting

EVEN, BALANCED = "even", "balanced"


@dataclass(frozen=True)
class Cut:
    """What a command line says of it; None where it says nothing."""

    ac: str | None = None
    microbatch_size: int | None = None
    tp: int | None = None
    layers: str | None = None  # EVEN, BALANCED, or numbers like 2,3,3,2

    @staticmethod
    def of(given: Mapping[str, Any]) -> Cut:
        """From a command's keywords."""
        return Cut(**{one.name: given.get(one.name) for one in fields(Cut)})

    def require_nothing_said(self, why: str) -> None:
        """ConfigError for costs that know nothing of it."""
        for one in fields(self):
            value = getattr(self, one.name)
            if value is not None:
                raise ConfigError(f"--{one.name.replace('_', '-')} {value}: {why}")

    def _setting(self, costs: LayerCosts) -> Setting:
        return costs.setting(ac=self.ac, microbatch_size=self.microbatch_size, tp=self.tp)

    def counts(self, costs: LayerCosts, problem: Problem, placement: Placement | None) -> tuple[int, ...]:
        """The layers of each stage; `placement` says which stages share a rank."""
        if self.layers != BALANCED:
            return stage_counts(self.layers, costs.num_layers, problem.num_stages)
        from zeropipe.balancing.balance import balanced_counts
        from zeropipe.core.placement import linear

        if placement is None and problem.stages_per_rank > 1:
            raise ConfigError("--layers balanced depends on which stages share a rank: give --placement vee or loop")
        return balanced_counts(costs, problem, placement or linear(problem), self._setting(costs), self.ac)

    def costs(
        self, costs: LayerCosts, problem: Problem, placement: Placement | None, node_size: int | None = None
    ) -> Costs:
        """The costs of each stage."""
        counts = self.counts(costs, problem, placement)
        return costs.costs(counts, self._setting(costs), ac=self.ac, placement=placement, node_size=node_size)

    def text(self, costs: LayerCosts, counts: tuple[int, ...] | None = None) -> str:
        """How layers are shared out, into `counts`, and which setting counts where there are several."""
        if self.layers == BALANCED:
            shared = "balanced over the stages" + (f": {format_counts(counts)}" if counts else "")
        else:
            shared = f"{'spread evenly over' if self.layers in (None, EVEN) else f'{self.layers} in'} the stages"
        if len(costs.settings) == 1:
            return shared
        setting = self._setting(costs)
        named = str(setting).replace(f"ac {setting.ac}", f"ac {self.ac or setting.ac}", 1)
        first = Cut(layers=self.layers) == self
        return f"{shared}; of {named}{', the first of their settings' if first else ''}"


@dataclass(frozen=True)
class AsRun:
    """How a recorded run cut its model, and which setting it had."""

    counts: tuple[int, ...]
    setting: Setting
    ac: str | None = None


def as_run(
    costs: LayerCosts, schedule: Schedule, origin: Origin | None, layers: str | None, modes: Sequence[str] = (),
    sizes: Sequence[int] = (),
) -> AsRun:  # fmt: skip
    """As the recording tells; of one that does not, as the command line: the first of its modes and of its sizes."""
    from zeropipe.sim.refit import setting_of_run

    if origin is None:
        counts = stage_counts(layers, costs.num_layers, schedule.num_stages)
        ac, size = next(iter(modes), None), next(iter(sizes), None)
        return AsRun(counts, setting_of_run(costs, None, ac, size), ac)
    own = ",".join(map(str, origin.layers))
    for flag, said, had in (
        ("--layers", (layers,) if layers else (), own),
        ("--ac", modes, origin.ac),
        ("--microbatch-size", sizes, origin.microbatch_size),
    ):
        if said and had not in said:
            raise ConfigError(f"{flag} {','.join(map(str, said))}: the run had {had}; leave it out")
    number = sum(origin.layers)
    if number != costs.num_layers:
        raise ConfigError(f"the run's model has {number} layers, {costs.model} has {costs.num_layers}: give its costs")
    return AsRun(origin.layers, setting_of_run(costs, origin), origin.ac)


def stage_counts(layers: str | None, num_layers: int, num_stages: int) -> tuple[int, ...]:
    """The layers of each stage as --layers says, or spread evenly."""
    if layers is None or layers == EVEN:
        return layer_counts(num_layers, num_stages)
    return require_layer_counts(numbers_of(layers), num_layers, num_stages)


def numbers_of(layers: str) -> tuple[int, ...]:
    """`2,3,3,2`, read."""
    try:
        return tuple(int(part) for part in layers.split(","))
    except ValueError:
        raise ConfigError(f"--layers {short(layers)}: write one number per stage, like 2,3,3,2") from None
