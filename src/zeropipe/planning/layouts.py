"""How GPUs can be shared out: pipeline x shards x tensor parallelism."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from zeropipe.errors import ConfigError
from zeropipe.sim.costs import Link
from zeropipe.sim.layer_costs import LayerCosts


@dataclass(frozen=True, order=True)
class Layout:
    """Sizes of the mesh's dimensions, the outermost first: tensor parallelism is between neighbours."""

    pp: int
    dp_shard: int
    tp: int
    dp_replicate: int = 1  # plans have none; a training file may

    def __str__(self) -> str:
        return f"pp{self.pp} x dp{self.dp_shard} x tp{self.tp}"

    @property
    def num_gpus(self) -> int:
        return self.pp * self.dp_replicate * self.dp_shard * self.tp

    def is_near(self, number: int, gpus_per_node: int) -> bool:
        """Whether every group of so many neighbours is in one machine."""
        return self.num_gpus <= gpus_per_node or gpus_per_node % number == 0

    def node_size(self, gpus_per_node: int) -> int:
        """Pipeline ranks in a machine: those whose shards all fit into one."""
        number = self.dp_replicate * self.dp_shard * self.tp
        return gpus_per_node // number if self.is_near(number, gpus_per_node) else 1

    def data_link(self, costs: LayerCosts, gpus_per_node: int) -> Link:
        """What gathers and reduces of the shards go through."""
        return costs.link if self.is_near(self.dp_shard * self.tp, gpus_per_node) else costs.inter_node

    def copies_link(self, costs: LayerCosts, gpus_per_node: int) -> Link:
        """What sums of gradients over copies of the model go through."""
        number = self.dp_replicate * self.dp_shard * self.tp
        return costs.link if self.is_near(number, gpus_per_node) else costs.inter_node


def most_stages(num_layers: int) -> int:
    """Every stage in the middle has a layer; the first one may have the embedding alone, the last one the head."""
    return num_layers + 2


def layouts(gpus: int, gpus_per_node: int, tensor_sizes: Sequence[int], num_layers: int) -> list[Layout]:
    """Every layout that uses all GPUs, with tensor parallelism inside a machine."""
    found = []
    for tp in sorted(set(tensor_sizes)):
        if gpus % tp or not Layout(gpus // tp, 1, tp).is_near(tp, gpus_per_node):
            continue
        rest = gpus // tp
        most = min(rest, most_stages(num_layers))
        found += [Layout(pp, rest // pp, tp) for pp in range(1, most + 1) if rest % pp == 0]
    if not found:
        raise ConfigError(
            f"tp={', '.join(map(str, tensor_sizes))}: {gpus} GPUs, {gpus_per_node} in a machine, cannot be shared out "
            "so: give sizes that divide both"
        )
    return found
