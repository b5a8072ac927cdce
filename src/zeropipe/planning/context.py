"""The context of a plan: what all its candidates share."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from math import isfinite
from typing import Any

from zeropipe.core.placement import Placement
from zeropipe.core.schedule import Schedule
from zeropipe.core.slices import balanced_shares, parse_shares, token_bounds
from zeropipe.planning.rows import Candidate, Run
from zeropipe.sim.costs import Costs
from zeropipe.sim.layer_costs import LayerCost, LayerCosts, Setting

RESERVE = 4e9  # bytes of a GPU that CUDA, NCCL and fragmentation take


@dataclass(frozen=True)
class PlanContext:
    """The costs of layers, and the GPUs."""

    costs: LayerCosts
    gpus_per_node: int
    memory_limit: float  # bytes of a GPU that may be used
    optimizer_bandwidth: float | None  # bytes/s of the GPU's memory; None: the optimizer's time is not counted
    shard_modes: tuple[str, ...] = ("keep",)  # how sharded weights are gathered: the next one where one does not fit
    _settings: dict[tuple[Any, ...], Setting] = field(default_factory=dict, init=False, repr=False, compare=False)

    @classmethod
    def create(
        cls, costs: LayerCosts, gpus_per_node: int, memory_limit: float, shard_modes: Sequence[str] = ("keep",)
    ) -> PlanContext:
        """With the optimizer bandwidth of the costs' machine."""
        return cls(costs, gpus_per_node, memory_limit, _optimizer_bandwidth(costs), tuple(shard_modes))

    def with_shard_modes(self, candidate: Candidate) -> Iterator[Candidate]:
        """The candidate in each way to gather its weights, if they are sharded."""
        for mode in self.shard_modes if candidate.layout.num_shards > 1 else self.shard_modes[:1]:
            yield replace(candidate, shards=mode)

    def for_schedule(self, schedule: Schedule) -> PlanContext:
        """The context with the costs in `schedule`."""
        costs = self.costs.for_schedule(schedule)
        return self if costs is self.costs else replace(self, costs=costs)

    def setting(self, run: Candidate | Run) -> Setting:
        """The setting of the layers, with seconds of exchanges; ConfigError if the costs do not have it."""
        layout = run.layout
        key = (run.ac, run.microbatch_size, layout.tp, layout.sequence_parallel, layout.ep, layout.cp)
        if key not in self._settings:
            found = self.costs.setting(
                ac=run.ac, microbatch_size=run.microbatch_size, tp=layout.tp,
                sequence_parallel=layout.sequence_parallel, ep=layout.ep, cp=layout.cp,
            )  # fmt: skip
            self._settings[key] = self.costs.price_exchanges(found, self.gpus_per_node)
        return self._settings[key]

    def decoder_layers(self, run: Candidate | Run) -> list[LayerCost]:
        """The costs of each decoder layer."""
        return self.costs.layer_list(self.setting(run), run.ac)

    def slice_sizes(self, run: Candidate | Run, slices: int) -> list[int]:
        """The tokens of each slice: attention of later ones takes longer, so they are shorter."""
        shares = balanced_shares(slices, min(1.0, self.costs.attention_share(self.setting(run))))
        return [end - begin for begin, end in pairwise(token_bounds(self.costs.sequence, shares))]

    def slice_shares(self, run: Candidate | Run, slices: int) -> tuple[float, ...]:
        """The shares of slices in the tokens of a sequence."""
        given = run.slice_sizes if isinstance(run, Candidate) else None
        return parse_shares(self.slice_sizes(run, slices) if given is None else given, slices)

    def stage_costs(
        self, candidate: Candidate, counts: Sequence[int], placement: Placement, *, gathers: bool = True
    ) -> Costs:
        """Costs of a candidate's stages; without `gathers`, full weights and gradients are resident all the time."""
        layout = candidate.layout
        return self.costs.costs(
            counts, self.setting(candidate), ac=candidate.ac, placement=placement, shards=layout.num_shards,
            gather=candidate.shards if gathers and layout.num_shards > 1 else None, gradients=candidate.gradients,
            shard_link=layout.shard_link(self.costs, self.gpus_per_node),
            node_size=layout.node_size(self.gpus_per_node),
            memory_limit=self.memory_limit if isfinite(self.memory_limit) else None, turns=candidate.turns,
            slice_shares=() if candidate.slices == 1 else self.slice_shares(candidate, candidate.slices),
            offload_bandwidth=float(self.costs.machine["host_bandwidth"]) if self.has_host_link else None,
            checkpointing=candidate.checkpointing,
        )  # fmt: skip

    @property
    def has_host_link(self) -> bool:
        """Whether the costs have the speed of copies to and from the host."""
        host = self.costs.machine.get("host_bandwidth")
        return isinstance(host, (int, float)) and host > 0


def _optimizer_bandwidth(costs: LayerCosts) -> float | None:
    """Bytes/s of the GPU's memory that an optimizer reaches; None if the costs do not have it."""
    bandwidth = costs.machine.get("bandwidth")
    efficiency = costs.machine.get("efficiency")
    fraction = efficiency.get("memory", 1.0) if isinstance(efficiency, Mapping) else 1.0
    return float(bandwidth) * fraction if isinstance(bandwidth, (int, float)) and bandwidth > 0 else None
