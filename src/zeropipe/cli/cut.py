"""How a model runs of which a file tells what its layers cost: --ac, --microbatch-size, --tp, and --layers, its cut."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Any

from zeropipe.core.layers import check_counts, layer_counts
from zeropipe.errors import ConfigError, short

if TYPE_CHECKING:
    from zeropipe.core.placement import Placement, Problem
    from zeropipe.sim.costs import Costs
    from zeropipe.sim.layer_costs import LayerCosts

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

    def counts(self, costs: LayerCosts, problem: Problem, placement: Placement | None) -> tuple[int, ...]:
        """The layers of each stage; `placement` says which stages share a rank."""
        if self.layers != BALANCED:
            return stage_counts(self.layers, costs.num_layers, problem.num_stages)
        from zeropipe.core.placement import linear
        from zeropipe.search.balance.balance import balanced_counts

        if placement is None and problem.stages_per_rank > 1:
            raise ConfigError("--layers balanced depends on which stages share a rank: give --placement vee or loop")
        setting = costs.setting(ac=self.ac, microbatch_size=self.microbatch_size, tp=self.tp)
        return balanced_counts(costs, problem, placement or linear(problem), setting, self.ac)

    def costs(
        self, costs: LayerCosts, problem: Problem, placement: Placement | None, node_size: int | None = None
    ) -> Costs:
        """The costs of each stage."""
        setting = costs.setting(ac=self.ac, microbatch_size=self.microbatch_size, tp=self.tp)
        counts = self.counts(costs, problem, placement)
        return costs.costs(counts, setting, ac=self.ac, placement=placement, node_size=node_size)

    def text(self, costs: LayerCosts, counts: tuple[int, ...] | None = None) -> str:
        """How layers are shared out, into `counts`, and which setting counts where there are several."""
        shared = "balanced over" if self.layers == BALANCED else "spread evenly over"
        if self.layers not in (None, EVEN, BALANCED):
            shared = f"{self.layers} in"
        shared += " the stages"
        if self.layers == BALANCED and counts:
            shared += f": {','.join(map(str, counts))}"
        if len(costs.settings) == 1:
            return shared
        setting = costs.setting(ac=self.ac, microbatch_size=self.microbatch_size, tp=self.tp)
        named = str(setting).replace(f"ac {setting.ac}", f"ac {self.ac or setting.ac}", 1)
        first = Cut(layers=self.layers) == self
        return f"{shared}; of {named}{', the first of their settings' if first else ''}"


def stage_counts(layers: str | None, num_layers: int, num_stages: int) -> tuple[int, ...]:
    """The layers of each stage as --layers says, or spread evenly."""
    if layers is None or layers == EVEN:
        return layer_counts(num_layers, num_stages)
    return check_counts(numbers_of(layers), num_layers, num_stages)


def numbers_of(layers: str) -> tuple[int, ...]:
    """`2,3,3,2`, read."""
    try:
        return tuple(int(part) for part in layers.split(","))
    except ValueError:
        raise ConfigError(f"--layers {short(layers)}: write one number per stage, like 2,3,3,2") from None
