"""The costs of a model's layers, estimated from shapes or measured, from which follow the costs of any stages."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any, Literal

from zeropipe.core.model.checkpointing import Checkpointing
from zeropipe.core.model.layers import layer_counts, layer_ranges, require_layer_counts
from zeropipe.core.placement import Placement, Problem
from zeropipe.errors import ConfigError, require_positive_integers, short
from zeropipe.sim.costs import SAME_LINK, Costs, Link

Source = Literal["estimate", "profile"]
NO_SPREAD: Mapping[str, float] = {}
DTYPE_NAMES = {"bfloat16": "bf16", "fp16": "float16", "fp32": "float32"}  # -> the name in costs of layers


@dataclass(frozen=True)
class LayerCost:
    """The costs of one layer for one microbatch: seconds and bytes, on one GPU.

    `b` defaults to i + w, `overlap` to f + b. F allocates `activation` until I; `stash` remains until W (it may be
    larger: recomputed inputs, and gradients). `workspace` is memory that an action of the layer needs only while it
    runs. `message` are the bytes of the layer's output. `parameters` are those that this GPU computes with. `flops` are
    those of F on this GPU without recomputation; of work that every GPU of `tp` repeats, its part. `trained` are the
    parameters that are not frozen, by default all; `frozen_flops` the FLOPs of F with frozen weights, which have no W.
    `spread` has relative errors of measured times, by name.
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
    trained: int | None = None
    frozen_flops: float = 0.0
    spread: Mapping[str, float] = field(default_factory=lambda: NO_SPREAD)

    @property
    def full_backward(self) -> float:
        """The time of a full backward."""
        return self.i + self.w if self.b is None else self.b

    @property
    def num_trained(self) -> int:
        return self.parameters if self.trained is None else self.trained

    @property
    def num_frozen(self) -> int:
        return self.parameters - self.num_trained

    @property
    def overlapped(self) -> float:
        """The time of an F and a B as one step."""
        return self.f + self.full_backward if self.overlap is None else self.overlap


@dataclass(frozen=True)
class Setting:
    """How the layers run, and the costs of each kind of layer in this setting."""

    kinds: Mapping[str, LayerCost]
    ac: str = "none"
    microbatch_size: int = 1  # sequences
    tp: int = 1
    compile: bool = False
    sequence_parallel: bool = False

    def __str__(self) -> str:
        parts = {
            f"ac {self.ac}": True, f"microbatches of {self.microbatch_size}": True, f"tp {self.tp}": self.tp > 1,
            "sequence parallelism": self.sequence_parallel, "compiled": self.compile,
        }  # fmt: skip
        return ", ".join(part for part, is_there in parts.items() if is_there)


@dataclass(frozen=True)
class ParameterBytes:
    """Bytes per parameter. The optimizer state, with float32 weights beside 16-bit ones, is divided among shards.

    `shard` are those of the weights that shards consist of, if they are not part of the optimizer state; `frozen` those
    of a frozen parameter, which has no gradient and no optimizer state. Beside unsharded 16-bit weights a float32 copy
    needs only the bits that they do not have: the optimizer state is smaller by `saved_unsharded`.
    """

    weights: float = 2.0
    gradients: float = 4.0
    optimizer: float = 12.0
    shard: float = 0.0
    frozen: float = 0.0
    saved_unsharded: float = 0.0

    def full_weights(self, trained: float, frozen: float) -> float:
        """Bytes of the unsharded weights of so many trained and frozen parameters."""
        return trained * self.weights + frozen * self.frozen

    def with_full_weights(self, shards: int, trained: float = 1, frozen: float = 0) -> float:
        """Bytes of parameters within a step that keeps the full weights and gradients, beside the shards."""
        own = self.weights + self.gradients + self.between_steps(shards)
        return trained * own + frozen * (self.frozen * (1 + (1 / shards if shards > 1 else 0.0)))

    def between_steps(self, shards: int) -> float:
        """Resident all the time per trained parameter: a shard of the optimizer state, and of sharded weights."""
        return self.optimizer_state(shards) + (self.shard / shards if shards > 1 else 0.0)

    def optimizer_state(self, shards: int) -> float:
        """The optimizer state per trained parameter."""
        return self.optimizer - self.saved_unsharded if shards == 1 else self.optimizer / shards

    def within_step(self, shards: int, trained: float, frozen: float) -> float:
        """Bytes of sharded parameters within a step, beside full weights and gradients: their shards, also of sums."""
        return trained * (self.between_steps(shards) + self.gradients / shards) + frozen * (self.frozen / shards)


BF16_STATE = ParameterBytes(weights=2, gradients=4, optimizer=12, saved_unsharded=2)  # AdamW in float32


@dataclass(frozen=True)
class LayerCosts:
    """A model's layers in order, and the costs of each kind of layer in some settings.

    `layers` has the kind of each decoder layer. The first stage also has the kinds `before`, the last one `after`, and
    every stage `each` (masks, rotary embeddings). If `tied`, head and embedding are one weight, and a rank with both
    has it once. `sending` and `receiving` are seconds that a rank spends on a message to or from another rank: it
    computes nothing meanwhile, so they are part of its F, I and B.
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
    lora_rank: int | None = None  # of the adapters that are trained instead of the model
    link: Link = SAME_LINK
    inter_node: Link = SAME_LINK
    sending: float = 0.0
    receiving: float = 0.0
    state: ParameterBytes = BF16_STATE
    machine: Mapping[str, Any] = field(default_factory=dict)  # gpu, peak_flops, memory, efficiency, ...
    versions: Mapping[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if not self.layers or not self.settings:
            raise ConfigError(f"the costs of {self.model} have no layers or no settings: must have one of each")
        for setting in self.settings:
            missing = sorted({*self.layers, *self.before, *self.after, *self.each} - set(setting.kinds))
            if missing:
                raise ConfigError(f"the costs of {self.model} ({setting}) lack the layer kind {short(missing[0])}")
        if self.tied and not (self.before and self.after):
            raise ConfigError(
                f"the costs of {self.model} are tied: must have the embedding in before, the head in after"
            )

    @property
    def num_layers(self) -> int:
        return len(self.layers)

    @property
    def has_overlaps(self) -> bool:
        """Whether the time of an F and a B as one step is known."""
        return any(kind.overlap is not None for setting in self.settings for kind in setting.kinds.values())

    @property
    def num_parameters(self) -> int | None:
        """The parameters of the model, a tied weight once; None if all settings shard layers over `tp`."""
        kinds = next((setting.kinds for setting in self.settings if setting.tp == 1), None)
        if kinds is None:
            return None
        first, layers, last = (
            sum(kinds[kind].parameters for kind in part) for part in (self.before, self.layers, self.after)
        )
        return first + layers + last - (min(first, last) if self.tied else 0)

    def setting(
        self, *, ac: str | None = None, microbatch_size: int | None = None, tp: int | None = None,
        compile: bool | None = None, sequence_parallel: bool | None = None,
    ) -> Setting:  # fmt: skip
        """The first setting with these properties; ConfigError if there is none.

        For `selective:N` it is the one with ac `none`: see `layer_list`.
        """
        wanted = {
            "ac": ac, "microbatch_size": microbatch_size, "tp": tp, "compile": compile,
            "sequence_parallel": sequence_parallel,
        }  # fmt: skip
        if ac is not None and Checkpointing.parse(ac).every > 1:
            wanted["ac"] = "none"
        for setting in self.settings:
            if all(value is None or getattr(setting, name) == value for name, value in wanted.items()):
                return setting
        text = ", ".join(f"{name}={value}" for name, value in wanted.items() if value is not None)
        known = "; ".join(map(str, self.settings[:8]))
        raise ConfigError(f"the costs of {self.model} have no setting with {text}: must be one of {known}")

    def layer_list(self, setting: Setting, ac: str | None = None) -> list[LayerCost]:
        """The costs of each decoder layer. `selective:N` combines ac `none` with `full` for every Nth layer."""
        mode = Checkpointing.parse(ac or setting.ac)
        if mode.every == 1:
            return [setting.kinds[kind] for kind in self.layers]
        same = {name: getattr(setting, name) for name in ("microbatch_size", "tp", "compile", "sequence_parallel")}
        by_mode = {name: self.setting(ac=name, **same).kinds for name in ("none", "full")}
        return [by_mode[mode.of_layer(layer)][kind] for layer, kind in enumerate(self.layers)]

    def stage_kinds(self, counts: Sequence[int]) -> list[list[tuple[str, int | None]]]:
        """(kind, index of the decoder layer or None) of each stage's layers, embedding first, head and loss last."""
        counts = require_layer_counts(counts, self.num_layers)
        stages: list[list[tuple[str, int | None]]] = [
            [*((kind, None) for kind in self.each), *((self.layers[n], n) for n in layers)]
            for layers in layer_ranges(counts)
        ]
        stages[0] = [*((kind, None) for kind in self.before), *stages[0]]
        stages[-1] = [*stages[-1], *((kind, None) for kind in self.after)]
        return stages

    def stage_layers(
        self, counts: Sequence[int], setting: Setting | None = None, ac: str | None = None
    ) -> list[list[LayerCost]]:
        """The costs of the layers of each stage, embedding first, head and loss last."""
        chosen = setting or self.settings[0]
        layers = self.layer_list(chosen, ac)
        return [
            [chosen.kinds[kind] if layer is None else layers[layer] for kind, layer in stage]
            for stage in self.stage_kinds(counts)
        ]

    def costs(
        self,
        counts: Sequence[int],
        setting: Setting | None = None,
        *,
        ac: str | None = None,
        placement: Placement | None = None,
        shards: int = 1,
        gather: str | None = None,
        shard_link: Link = SAME_LINK,
        node_size: int | None = None,
        memory_limit: float | None = None,
    ) -> Costs:
        """Costs of stages with `counts` layers, by default in the first setting, in seconds and bytes.

        Stages on one rank of `placement` (by default each has its own) share a tied weight. `shards` is
        the size of `dp_shard`. With `gather` ("keep" or "regather"), gathers and reductions use `shard_link` and are
        simulated; without it, full weights and gradients are resident all the time. `node_size` is the number of
        pipeline ranks per machine.
        """
        require_positive_integers(shards=shards)
        chosen = setting or self.settings[0]
        stages = self.stage_layers(counts, chosen, ac)
        if placement is not None and len(placement.copies[0]) != len(stages):
            raise ConfigError(
                f"layers={short(list(counts))} has {len(stages)} stages: the placement has {len(placement.copies[0])}"
            )
        parameters = [float(sum(layer.num_trained for layer in stage)) for stage in stages]
        frozen = [float(sum(layer.num_frozen for layer in stage)) for stage in stages]
        held_stages = _held_stages(placement, len(stages))
        if self.tied and any(held[0] == 0 and held[-1] == len(stages) - 1 for held in held_stages):
            ends = [[chosen.kinds[kind] for kind in part] for part in (self.before, self.after)]
            shared = min(sum(layer.num_trained for layer in part) for part in ends)
            parameters[-1] -= shared
            frozen[-1] -= min(sum(layer.parameters for layer in part) for part in ends) - shared
        resident = self.state.with_full_weights if gather is None else self.state.within_step
        weights = [resident(shards, *numbers) for numbers in zip(parameters, frozen)]
        forward, backward = self._message_overheads(range(len(stages)) if placement is None else placement.copies[0])
        full = [self.state.full_weights(*numbers) for numbers in zip(parameters, frozen)]
        blocks = [
            [
                self.state.full_weights(chosen.kinds[kind].num_trained, chosen.kinds[kind].num_frozen)
                for kind, n in stage if n is not None
            ]
            for stage in self.stage_kinds(counts)
        ]  # fmt: skip
        sharding = {} if gather is None else self._sharding(parameters, full, blocks, gather, shards, shard_link)
        return Costs(
            f=_sums(stages, lambda layer: layer.f, forward), i=_sums(stages, lambda layer: layer.i, backward),
            w=_sums(stages, lambda layer: layer.w), b=_sums(stages, lambda layer: layer.full_backward, backward),
            overlap=_sums(stages, lambda layer: layer.overlapped, [a + b for a, b in zip(forward, backward)]),
            activation=_sums(stages, lambda layer: layer.activation), stash=_sums(stages, lambda layer: layer.stash),
            workspace=[_workspace(stage, is_split=False) for stage in stages],
            i_workspace=[_workspace(stage, is_split=True) for stage in stages],
            message=self.message_bytes(chosen), weights=weights,
            p2p=self.link.p2p or 0.0, bandwidth=self.link.bandwidth, node_size=node_size,
            inter_node=SAME_LINK if node_size is None else self.inter_node,
            memory_limit=memory_limit, unit="s", memory_unit="B", **sharding,
        )  # fmt: skip

    def _message_overheads(self, ranks: Sequence[int]) -> tuple[list[float], list[float]]:
        """The time that messages add to the forward and to the backward of each stage, by the ranks of the stages."""
        crosses = [False, *(a != b for a, b in pairwise(ranks)), False]  # whether a message crosses each boundary
        return (
            [previous * self.receiving + following * self.sending for previous, following in pairwise(crosses)],
            [previous * self.sending + following * self.receiving for previous, following in pairwise(crosses)],
        )

    def _sharding(
        self,
        parameters: list[float],
        full: list[float],
        blocks: list[list[float]],
        gather: str,
        shards: int,
        link: Link,
    ) -> dict[str, Any]:
        """The fields of Costs for sharded stages, from their trained parameters and bytes of full weights.

        A gather or reduction moves all but a rank's own shard. While a stage runs with "regather", it has what is
        outside of its `blocks`, one block, and the messages of this and of the next one.
        """
        bandwidth = link.bandwidth * shards / (shards - 1) if link.bandwidth and shards > 1 else None
        gradients = [number * self.state.gradients for number in parameters]
        return {
            "shards": gather, "units": max(1, *map(len, blocks)), "shard_bandwidth": bandwidth,
            "full_weights": full,
            "gathered_weights": [
                size - sum(sizes) + min(3, 2 * len(sizes)) * max(sizes, default=0)
                for size, sizes in zip(full, blocks, strict=True)
            ],
            "full_gradients": [size * (1 - 1 / shards) for size in gradients],  # beside the shards of the sum
            "reduce": [size / bandwidth if bandwidth else 0.0 for size in gradients],
        }  # fmt: skip

    def stage_costs(self, problem: Problem, placement: Placement | None = None, per: str = "rank") -> Costs:
        """Costs of stages with layers divided as evenly as possible; `per` has no effect on costs of layers."""
        return self.costs(layer_counts(self.num_layers, problem.num_stages), placement=placement)

    def message_bytes(self, setting: Setting) -> float:
        """Bytes from stage to stage: the output of a decoder layer."""
        return max(setting.kinds[kind].message for kind in self.layers)


def _workspace(layers: Sequence[LayerCost], is_split: bool) -> float:
    """The memory that a backward of a stage needs beside what it had before.

    It begins with the last layer, and what that frees is there for the others. Of a split backward the stash remains,
    which may be larger than what was there.
    """
    largest = level = 0.0
    for layer in reversed(layers):
        largest = max(largest, level + layer.workspace)
        level += (layer.stash if is_split else 0.0) - layer.activation
    return largest


def _held_stages(placement: Placement | None, num_stages: int) -> list[tuple[int, ...]]:
    """The stages of each rank. In a mirrored placement, two ranks hold the same stages, which are listed once."""
    if placement is None:
        return [(stage,) for stage in range(num_stages)]
    ranks = {rank for table in placement.copies for rank in table}
    return sorted({placement.stages_of(rank) for rank in ranks})


def _sums(
    stages: Sequence[Iterable[LayerCost]], value: Callable[[LayerCost], float], extras: Sequence[float] = ()
) -> list[float]:
    return [float(sum(map(value, stage))) + extra for stage, extra in zip(stages, extras or [0.0] * len(stages))]
