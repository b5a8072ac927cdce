"""Layouts of GPUs: pipeline x sharded data x tensor parallelism."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from zeropipe.errors import ConfigError
from zeropipe.sim.costs import Link
from zeropipe.sim.layer_costs import LayerCosts, Shards


@dataclass(frozen=True, order=True)
class Layout:
    """Sizes of the mesh dimensions, outermost first: the GPUs of one tensor-parallel group are neighbours."""

    pp: int
    dp_shard: int
    tp: int
    dp_replicate: int = 1  # plans do not use it; a training file may
    sequence_parallel: bool = False
    ep: int = 1  # divides experts over dp_shard, or without it over dp_replicate
    cp: int = 1  # between dp_shard and tp
    shard_cp: bool = False  # weights are sharded over dp_shard and cp

    def __str__(self) -> str:
        cp = f" x cp{self.cp}" if self.cp > 1 else ""
        text = f"pp{self.pp} x dp{self.dp_shard}{cp} x tp{self.tp}" + (f" with ep{self.ep}" if self.ep > 1 else "")
        return f"{text} with sequence parallelism" if self.sequence_parallel else text

    @property
    def num_gpus(self) -> int:
        return self.pp * self.gpus_per_rank

    @property
    def gpus_per_rank(self) -> int:
        """GPUs of one pipeline rank."""
        return self.dp_replicate * self.dp_shard * self.cp * self.tp

    @property
    def num_copies(self) -> int:
        """GPUs that have the same shard of the same weights, and other tokens."""
        return self.dp_replicate * (1 if self.shard_cp else self.cp)

    @property
    def num_shards(self) -> int:
        """GPUs that weights are sharded over."""
        return self.dp_shard * (self.cp if self.shard_cp else 1)

    @property
    def shards(self) -> Shards:
        """Processes over which parameters, and those of divided experts, are sharded."""
        return Shards.of(self.num_shards, self.ep)

    def is_within_node(self, group_size: int, gpus_per_node: int) -> bool:
        """Whether every group of `group_size` neighbouring GPUs is in one machine."""
        return self.num_gpus <= gpus_per_node or gpus_per_node % group_size == 0

    def node_size(self, gpus_per_node: int) -> int:
        """Pipeline ranks per machine; 1 if a rank's GPUs do not fit into one."""
        if not self.is_within_node(self.gpus_per_rank, gpus_per_node):
            return 1
        return gpus_per_node // self.gpus_per_rank

    def shard_link(self, costs: LayerCosts, gpus_per_node: int) -> Link:
        """The link of gathers and reductions over `dp_shard`."""
        return costs.link if self.is_within_node(self.dp_shard * self.cp * self.tp, gpus_per_node) else costs.inter_node

    def copy_link(self, costs: LayerCosts, gpus_per_node: int) -> Link:
        """The link of gradient all-reduces over `dp_replicate` and `cp`."""
        size = self.cp * self.tp if self.dp_replicate == 1 else self.gpus_per_rank
        return costs.link if self.is_within_node(size, gpus_per_node) else costs.inter_node


def max_stages(num_layers: int) -> int:
    """Every inner stage needs a layer; the first may have only the embedding, the last only the head."""
    return num_layers + 2


def with_experts(layouts: Sequence[Layout], ep_sizes: Sequence[int], gpus_per_node: int) -> list[Layout]:
    """The layouts with experts divided inside a machine, and over all of dp_shard."""
    found = []
    for layout in layouts:
        inside = max(1, gpus_per_node // layout.cp)
        sizes = {min(layout.dp_shard, inside), layout.dp_shard} if layout.tp == 1 else set()
        found += [
            replace(layout, ep=ep, shard_cp=False)
            for ep in sorted(sizes)
            if ep > 1 and ep in ep_sizes and layout.dp_shard % ep == 0
        ]
    return found


def list_layouts(
    gpus: int, gpus_per_node: int, tp_sizes: Sequence[int], num_layers: int, cp_sizes: Sequence[int] = (1,)
) -> list[Layout]:
    """Every layout that uses all GPUs: tensor parallelism inside a machine, weights sharded over dp_shard and cp."""
    found = []
    for tp in sorted(set(tp_sizes)):
        if gpus % tp or not Layout(gpus // tp, 1, tp).is_within_node(tp, gpus_per_node):
            continue
        for cp in sorted(set(cp_sizes)):
            rest, left = divmod(gpus // tp, cp)
            max_pp = 0 if left else min(rest, max_stages(num_layers))
            found += [
                Layout(pp, rest // pp, tp, cp=cp, shard_cp=cp > 1) for pp in range(1, max_pp + 1) if rest % pp == 0
            ]
    if not found and tuple(cp_sizes) != (1,):
        raise ConfigError(f"cp={', '.join(map(str, cp_sizes))}: must divide gpus={gpus}, with tp too")
    if not found:
        sizes = ", ".join(map(str, tp_sizes))
        raise ConfigError(f"tp={sizes}: must divide gpus={gpus} and gpus_per_node={gpus_per_node}")
    return found
