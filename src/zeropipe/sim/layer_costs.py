"""What the layers of a model cost, one by one: estimated from shapes or measured. Any cut into stages has Costs."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any, Literal

from zeropipe.core.model.checkpointing import Checkpointing
from zeropipe.core.model.layers import layer_counts, require_layer_counts
from zeropipe.core.placement import Placement, Problem
from zeropipe.errors import ConfigError, short
from zeropipe.sim.costs import INSIDE, Costs, Link

Source = Literal["estimate", "profile"]
NO_SPREAD: Mapping[str, float] = {}
SHORT_DTYPES = {"bfloat16": "bf16", "fp16": "float16", "fp32": "float32"}  # as costs of layers name them


@dataclass(frozen=True)
class LayerCost:
    """What one layer of a kind takes for one microbatch: seconds and bytes, on one GPU.

    `b` defaults to i + w, `overlap` to f + b. F holds `activation` until I, of which `stash` (which may be more: inputs
    that were computed again, and gradients) is there until W. `workspace` is memory that only exists while an action of
    the layer runs. `message` is what the layer hands on. `parameters` are those that this GPU computes with. `flops`
    are those of F on this GPU, without what activation checkpointing computes again; of what every GPU of `tp` computes
    it has its share.
    `spread` says of single times how far measurements lie apart, relative to them.
    """

    f: float
    i: float
    w: float
    b: float | None = None
    overlap: float | None = None
    activation: float = 0.0
    stash: float = 0.0
    workspace: float = 0.0
    message: float = 0.0
    parameters: int = 0
    flops: float = 0.0
    spread: Mapping[str, float] = field(default_factory=lambda: NO_SPREAD)

    @property
    def whole(self) -> float:
        """The time of a whole backward."""
        return self.i + self.w if self.b is None else self.b

    @property
    def pair(self) -> float:
        """The time of an F and a B as one step."""
        return self.f + self.whole if self.overlap is None else self.overlap


@dataclass(frozen=True)
class Setting:
    """How the layers run, and what each kind of them costs then."""

    kinds: Mapping[str, LayerCost]
    ac: str = "none"
    microbatch_size: int = 1  # sequences
    tp: int = 1
    compile: bool = False

    def __str__(self) -> str:
        how = [f"ac {self.ac}", f"microbatches of {self.microbatch_size}"]
        return ", ".join([*how, *([f"tp {self.tp}"] if self.tp > 1 else []), *(["compiled"] if self.compile else [])])


@dataclass(frozen=True)
class State:
    """Bytes that a parameter takes. Weights and gradients are whole within a step; shards share the optimizer's part.

    The optimizer's part includes float32 weights beside 16-bit ones.
    """

    weights: float = 2.0
    gradients: float = 4.0
    optimizer: float = 12.0

    def of_shards(self, shards: int) -> float:
        """With everything kept whole within the step."""
        return self.weights + self.gradients + self.between_steps(shards)

    def between_steps(self, shards: int) -> float:
        """What is there all the time: a shard of the optimizer's part, and of the gradients if they are sharded."""
        return (self.optimizer + (self.gradients if shards > 1 else 0.0)) / shards


@dataclass(frozen=True)
class LayerCosts:
    """A model's layers in order, and what each kind of them costs in some settings.

    `layers` names the kind of each decoder layer; `before` and `after` are what the first and the last stage have
    beside them, and `each` is what every stage has (masks, rotary embeddings). With `tied`, head and embedding are one
    weight: a rank that has both has it once. `sending` and `receiving` are seconds of a rank's own time for a message
    to or from another one: it computes nothing meanwhile, so they are part of its F, I and B.
    """

    model: str
    source: Source
    layers: tuple[str, ...]
    settings: tuple[Setting, ...]
    before: tuple[str, ...] = ("embedding",)
    after: tuple[str, ...] = ("head", "loss")
    each: tuple[str, ...] = ()
    tied: bool = False
    sequence: int = 0
    dtype: str = "bf16"
    link: Link = INSIDE
    inter_node: Link = INSIDE
    sending: float = 0.0
    receiving: float = 0.0
    state: State = State()
    machine: Mapping[str, Any] = field(default_factory=dict)  # gpu, peak_flops, memory, efficiency, ...
    versions: Mapping[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if not self.layers or not self.settings:
            raise ConfigError(f"the costs of {self.model} have no layers or no settings: give at least one of each")
        for setting in self.settings:
            missing = sorted({*self.layers, *self.before, *self.after, *self.each} - set(setting.kinds))
            if missing:
                what = f"the layer kind {short(missing[0])}"
                raise ConfigError(f"the costs of {self.model} ({setting}) lack {what}: add it")
        if self.tied and not (self.before and self.after):
            raise ConfigError(f"the costs of {self.model} are tied: name the embedding in before, the head in after")

    @property
    def num_layers(self) -> int:
        return len(self.layers)

    @property
    def num_parameters(self) -> int | None:
        """Of the model, a tied weight once; None where all costs are of parts of layers, over `tp`."""
        whole = next((setting.kinds for setting in self.settings if setting.tp == 1), None)
        if whole is None:
            return None
        first, layers, last = (
            sum(whole[kind].parameters for kind in part) for part in (self.before, self.layers, self.after)
        )
        return first + layers + last - (min(first, last) if self.tied else 0)

    def setting(
        self, *, ac: str | None = None, microbatch_size: int | None = None, tp: int | None = None,
        compile: bool | None = None,
    ) -> Setting:  # fmt: skip
        """The first setting with these properties; ConfigError if there is none.

        `selective:N` is put together from `none` and `full`: see `kind_costs`.
        """
        wish = {"ac": ac, "microbatch_size": microbatch_size, "tp": tp, "compile": compile}
        base = {**wish, "ac": "none"} if ac is not None and Checkpointing.parse(ac).every > 1 else wish
        for setting in self.settings:
            if all(value is None or getattr(setting, name) == value for name, value in base.items()):
                return setting
        asked = ", ".join(f"{name}={value}" for name, value in base.items() if value is not None)
        known = "; ".join(map(str, self.settings[:8]))
        raise ConfigError(f"the costs of {self.model} have no setting with {asked}: they have {known}")

    def layer_list(self, setting: Setting, ac: str | None = None) -> list[LayerCost]:
        """What each decoder layer costs, in order. With `ac` selective:N every Nth layer is a checkpointed one."""
        wish = Checkpointing.parse(ac or setting.ac)
        if wish.every == 1:
            return [setting.kinds[kind] for kind in self.layers]
        same = {"microbatch_size": setting.microbatch_size, "tp": setting.tp, "compile": setting.compile}
        by_mode = {mode: self.setting(ac=mode, **same).kinds for mode in ("none", "full")}  # type: ignore[arg-type]
        return [by_mode[wish.of_layer(layer)][kind] for layer, kind in enumerate(self.layers)]

    def stage_layers(
        self, counts: Sequence[int], setting: Setting | None = None, ac: str | None = None
    ) -> list[list[LayerCost]]:
        """What is in each stage: its layers, embedding first, head and loss last."""
        chosen = setting or self.settings[0]
        layers = self.layer_list(chosen, ac)
        stages, start = [], 0
        for count in require_layer_counts(counts, len(layers)):
            stages.append([*(chosen.kinds[kind] for kind in self.each), *layers[start : start + count]])
            start += count
        stages[0] = [*(chosen.kinds[kind] for kind in self.before), *stages[0]]
        stages[-1] = [*stages[-1], *(chosen.kinds[kind] for kind in self.after)]
        return stages

    def costs(
        self,
        counts: Sequence[int],
        setting: Setting | None = None,
        *,
        ac: str | None = None,
        placement: Placement | None = None,
        shards: int = 1,
        gather: str | None = None,
        shard_link: Link = INSIDE,
        node_size: int | None = None,
        memory_limit: float | None = None,
    ) -> Costs:
        """Costs of stages with so many layers each (by default in the first setting), in seconds and bytes.

        `placement` says which stages share a rank (none do, by default): they share workspace, and a tied weight.
        `shards` is the size of `dp_shard`; with `gather` ("keep" or "regather") gathers and reduces go through
        `shard_link` and are simulated, without it weights and gradients are whole all the time.
        `node_size` is the number of pipeline ranks in a machine.
        """
        if not isinstance(shards, int) or shards < 1:
            raise ConfigError(f"shards={short(shards)}: a whole number from 1 on is needed")
        chosen = setting or self.settings[0]
        stages = self.stage_layers(counts, chosen, ac)
        if placement is not None and len(placement.copies[0]) != len(stages):
            places = len(placement.copies[0])
            raise ConfigError(f"layers={short(list(counts))} is of {len(stages)} stages: the placement has {places}")
        parameters = [float(sum(layer.parameters for layer in stage)) for stage in stages]
        together = _together(placement, len(stages))
        if self.tied and any(held[0] == 0 and held[-1] == len(stages) - 1 for held in together):
            parameters[-1] -= min(
                sum(chosen.kinds[kind].parameters for kind in part) for part in (self.before, self.after)
            )
        each = self.state.of_shards(shards) if gather is None else self.state.between_steps(shards)
        weights = [number * each for number in parameters]
        for held in together:
            needs = [max((layer.workspace for layer in stages[stage]), default=0.0) for stage in held]
            weights[held[needs.index(max(needs))]] += max(needs)
        up, back = self._handling(range(len(stages)) if placement is None else placement.copies[0])
        return Costs(
            f=_sums(stages, lambda layer: layer.f, up), i=_sums(stages, lambda layer: layer.i, back),
            w=_sums(stages, lambda layer: layer.w), b=_sums(stages, lambda layer: layer.whole, back),
            overlap=_sums(stages, lambda layer: layer.pair, [a + b for a, b in zip(up, back)]),
            activation=_sums(stages, lambda layer: layer.activation), stash=_sums(stages, lambda layer: layer.stash),
            message=self.message(chosen), weights=weights,
            p2p=self.link.p2p or 0.0, bandwidth=self.link.bandwidth, node_size=node_size,
            inter_node=INSIDE if node_size is None else self.inter_node,
            memory_limit=memory_limit, unit="s", memory_unit="B",
            **({} if gather is None else self._sharded(parameters, gather, shards, shard_link, max(counts))),
        )  # fmt: skip

    def _handling(self, table: Sequence[int]) -> tuple[list[float], list[float]]:
        """What messages add to the forward and to the backward of stages on these ranks."""
        away = [False, *(a != b for a, b in pairwise(table)), False]  # the boundaries that messages cross
        return (
            [before * self.receiving + behind * self.sending for before, behind in pairwise(away)],
            [before * self.sending + behind * self.receiving for before, behind in pairwise(away)],
        )

    def _sharded(self, parameters: list[float], gather: str, shards: int, link: Link, units: int) -> dict[str, Any]:
        """What the simulator is told about gathers and reduces: each moves all but a rank's own shard."""
        reached = link.bandwidth * shards / (shards - 1) if link.bandwidth and shards > 1 else None
        return {
            "shards": gather, "units": max(1, units), "shard_bandwidth": reached,
            "whole_weights": [number * self.state.weights for number in parameters],
            "whole_gradients": [number * self.state.gradients for number in parameters],
        }  # fmt: skip

    def even(self, problem: Problem, placement: Placement | None = None) -> Costs:
        """Costs of a cut into stages that is as even as can be."""
        return self.costs(layer_counts(self.num_layers, problem.num_stages), placement=placement)

    def message(self, setting: Setting) -> float:
        """Bytes from stage to stage: what a decoder layer hands on."""
        return max(setting.kinds[kind].message for kind in self.layers)


def _together(placement: Placement | None, num_stages: int) -> list[tuple[int, ...]]:
    """Which stages share a rank, in order. A rank and its mirror image hold the same ones."""
    if placement is None:
        return [(stage,) for stage in range(num_stages)]
    ranks = {rank for table in placement.copies for rank in table}
    return sorted({placement.stages_of(rank) for rank in ranks})


def _sums(
    stages: Sequence[Iterable[LayerCost]], value: Callable[[LayerCost], float], more: Sequence[float] = ()
) -> list[float]:
    return [float(sum(map(value, stage))) + extra for stage, extra in zip(stages, more or [0.0] * len(stages))]
