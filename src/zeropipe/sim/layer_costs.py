"""The costs of a model's layers, estimated from shapes or measured, from which follow the costs of any stages."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import accumulate, pairwise
from math import gcd, inf
from typing import Any, Literal, NamedTuple

from zeropipe.core.action import Kind
from zeropipe.core.gradient_policy import REDUCES_AT_ONCE
from zeropipe.core.model.checkpointing import Checkpointing
from zeropipe.core.model.cp_exchange import RING
from zeropipe.core.model.head import adds_in_forward
from zeropipe.core.model.layers import layer_counts, layer_ranges, require_layer_counts
from zeropipe.core.phases import EXCHANGES, LayerPhases, PhaseTimes
from zeropipe.core.placement import Placement, Problem
from zeropipe.core.schedule import Schedule
from zeropipe.errors import ConfigError, require_positive_integers, short
from zeropipe.sim.costs import SAME_LINK, Costs, Link
from zeropipe.sim.gathered import GatheredPeaks, gathered_peaks
from zeropipe.sim.phase_costs import exchange_times

Source = Literal["estimate", "profile"]
SM_TAX = 20 / 132  # the part of a GPU that exchanges take while they are under way: DeepSeek-V3's report, on H800
NO_SPREAD: Mapping[str, float] = {}
LOW_DTYPES = ("bf16", "float16")
STAGE = "stage"  # the kind that every stage has once
DTYPE_NAMES = {"bfloat16": "bf16", "fp16": "float16", "fp32": "float32"}  # -> the name in costs of layers


@dataclass(frozen=True)
class LayerCost:
    """The costs of one layer for one microbatch: seconds and bytes, on one GPU.

    `b` defaults to i + w, `overlap` to f + b. F allocates `activation` until I; `stash` remains until W (it may be
    larger: recomputed inputs, and gradients). `workspace` is memory that a backward of the layer needs only while it
    runs, `f_workspace` memory that F needs. `message` are the bytes of the layer's output. `parameters` are those that
    this GPU computes with. `flops` are those of F on this GPU without recomputation; of work that every GPU of `tp`
    repeats, its part. `trained` are the parameters that are not frozen, by default all; `frozen_flops` the FLOPs of F
    with frozen weights, which have no W.
    Of divided experts, `experts` are the parameters that this GPU has, and `phases` the phases of the layer. Dispatch
    and combine are bytes there, and not in f and i: `with_exchanges` makes them seconds. So are `f_exchange` and
    `i_exchange`, what attention gets over `cp`, of which as many seconds as `f_hidden` and `i_hidden` are hidden by
    computations. Of a layer that can run in slices of sequences, `f_attention` and
    `i_attention` are the parts of f and i that are attention, `keys` the bytes of keys and values, `repeated_keys`
    those of a copy for all heads that a slice after the first makes while it runs, `attention_workspace` that of the
    backward of attention, and `chunk_workspace` what of `f_workspace` is of one of its `chunks` of logits. `spread` has
    relative errors of measured times, by name.
    """

    f: float
    i: float
    w: float
    b: float | None = None
    overlap: float | None = None
    activation: float = 0.0
    stash: float = 0.0
    workspace: float = 0.0
    f_workspace: float = 0.0
    message: float = 0.0
    parameters: int = 0
    flops: float = 0.0
    trained: int | None = None
    frozen_flops: float = 0.0
    phases: LayerPhases | None = None
    experts: int = 0
    f_exchange: float = 0.0
    i_exchange: float = 0.0
    f_hidden: float = 0.0
    i_hidden: float = 0.0
    f_attention: float = 0.0
    i_attention: float = 0.0
    keys: float = 0.0
    repeated_keys: float = 0.0
    attention_workspace: float = 0.0
    chunk_workspace: float = 0.0
    chunks: float = 0.0
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

    @cached_property
    def held(self) -> Held:
        return Held(self.num_trained - self.experts, self.num_frozen, self.experts)

    def with_exchanges(self, bandwidths: Bandwidths) -> LayerCost:
        """The layer with seconds of its exchanges; those of attention are part of the phase `attention`."""
        parts = PhaseTimes(
            max(0.0, self.f_exchange / bandwidths.parts - self.f_hidden),
            max(0.0, self.i_exchange / bandwidths.parts - self.i_hidden),
        )
        f, i, phases = self.f + parts.f, self.i + parts.i, self.phases
        if phases is not None:
            phases = exchange_times(phases, bandwidths.experts)
            f, i = (
                time + sum(getattr(phases, name).of(kind) for name in EXCHANGES)
                for time, kind in ((f, Kind.F), (i, Kind.I))
            )
            own = phases.attention
            phases = phases._replace(attention=own._replace(f=own.f + parts.f, i=own.i + parts.i))
        return replace(self, phases=phases, f=f, i=i, f_exchange=parts.f, i_exchange=parts.i)

    @property
    def exchanging(self) -> float:
        """The time of the exchanges of experts' rows of an F and a B, if they are priced."""
        return 0.0 if self.phases is None else sum(sum(getattr(self.phases, name)) for name in EXCHANGES)

    @property
    def overlapped(self) -> float:
        """The time of an F and a B as one step."""
        return self.f + self.full_backward if self.overlap is None else self.overlap


class Bandwidths(NamedTuple):
    """Bytes per second of exchanges: of experts' rows over `ep`, and of attention over `cp`."""

    experts: float = inf
    parts: float = inf


@dataclass(frozen=True)
class Setting:
    """How the layers run, and the costs of each kind of layer in this setting."""

    kinds: Mapping[str, LayerCost]
    ac: str = "none"
    microbatch_size: int = 1  # sequences
    tp: int = 1
    compile: bool = False
    sequence_parallel: bool = False
    ep: int = 1
    cp: int = 1
    exchange: str = ""  # what attention exchanges over cp; empty: not known, or nothing
    bandwidths: Bandwidths | None = None  # of priced exchanges

    def with_exchanges(self, bandwidths: Bandwidths) -> Setting:
        """The setting with seconds of its exchanges."""
        kinds = {name: kind.with_exchanges(bandwidths) for name, kind in self.kinds.items()}
        return replace(self, kinds=kinds, bandwidths=bandwidths)

    def __str__(self) -> str:
        parts = {
            f"ac {self.ac}": True, f"microbatches of {self.microbatch_size}": True, f"tp {self.tp}": self.tp > 1,
            f"cp {self.cp}": self.cp > 1, f"exchange {self.exchange}": bool(self.exchange),
            f"ep {self.ep}": self.ep > 1,
            "sequence parallelism": self.sequence_parallel, "compiled": self.compile,
        }  # fmt: skip
        return ", ".join(part for part, is_there in parts.items() if is_there)


class Held(NamedTuple):
    """Numbers of parameters: trained ones beside divided experts, frozen ones, and those of divided experts."""

    trained: float = 0
    frozen: float = 0
    experts: float = 0

    @staticmethod
    def sum(parts: Iterable[Held]) -> Held:
        return Held(*map(sum, zip(Held(), *parts)))

    def count_stepped(self, shards: Shards) -> float:
        """The parameters that a process's optimizer steps: its shards."""
        return self.trained / shards.rest + self.experts / shards.experts


class Shards(NamedTuple):
    """Numbers of processes over which parameters are sharded: those of divided experts over what `ep` leaves."""

    rest: int = 1
    experts: int = 1

    @staticmethod
    def of(dp_shard: int, ep: int) -> Shards:
        return Shards(dp_shard, max(1, dp_shard // ep))


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

    def resident(self, held: Held, shards: Shards) -> float:
        """Bytes of parameters whose full weights and gradients are there all the time."""
        rest = self.with_full_weights(shards.rest, held.trained, held.frozen)
        return rest + self.with_full_weights(shards.experts, held.experts)

    def resident_shards(self, held: Held, shards: Shards) -> float:
        """The same without full weights and gradients of what is sharded."""
        rest = self.within_step(shards.rest, held.trained, held.frozen)
        if shards.experts == 1:
            return rest + self.with_full_weights(1, held.experts)
        return rest + self.within_step(shards.experts, held.experts, 0)

    def optimizer_bytes(self, held: Held, shards: Shards) -> float:
        """Bytes of the optimizer's state."""
        rest = held.trained * self.optimizer_state(shards.rest)
        return rest + held.experts * self.optimizer_state(shards.experts)

    def sum_bytes(self, held: Held, shards: Shards) -> float:
        """Bytes of summed gradients."""
        return self.gradients * held.count_stepped(shards)

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
    every stage `each` (masks, rotary embeddings). `after_full` are in place of `after` where no backward of the last
    stage's ranks is split: a fused head then computes its weight gradients in F (`for_schedule`). If `tied`, head and
    embedding are one weight, and a rank with both has it once. `sending` and `receiving` are seconds that a rank spends
    on a message to or from another rank: it computes nothing meanwhile, so they are part of its F, I and B.
    """

    model: str
    source: Source
    layers: tuple[str, ...]
    settings: tuple[Setting, ...]
    before: tuple[str, ...] = ("embedding",)
    after: tuple[str, ...] = ("head", "loss")
    after_full: tuple[str, ...] = ()  # empty: the same as after
    each: tuple[str, ...] = ()
    fused_head: bool = False  # whether the loss is computed in chunks of tokens, where the model allows it
    tied: bool = False
    sequence: int = 0
    dtype: str = "bf16"
    lora_rank: int | None = None  # of the adapters that are trained instead of the model
    dispatch: str = "expert"  # with divided experts: a token is sent once to each "expert", or to each "process"
    sample: int | None = None  # tokens of a packed sample; None: a sequence is one
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
            ends = (*self.before, *self.after, *self.after_full, *self.each)
            missing = sorted({*self.layers, *ends} - set(setting.kinds))
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

    def for_schedule(self, schedule: Schedule) -> LayerCosts:
        """The costs in `schedule`: those of a head depend on whether backwards are split."""
        has_others = self.after_full not in ((), self.after)
        return replace(self, after=self.after_full) if has_others and adds_in_forward(schedule) else self

    def state_of(self, tp: int) -> ParameterBytes:
        """Bytes per parameter with `tp`: float32 copies of weights that it shards keep all their bits."""
        return self.state if tp == 1 else replace(self.state, saved_unsharded=0.0)

    def setting(
        self, *, ac: str | None = None, microbatch_size: int | None = None, tp: int | None = None,
        compile: bool | None = None, sequence_parallel: bool | None = None, ep: int | None = None,
        cp: int | None = None,
    ) -> Setting:  # fmt: skip
        """The first setting with these properties; ConfigError if there is none.

        For `selective:N` it is the one with ac `none`: see `layer_list`.
        """
        wanted = {
            "ac": ac, "microbatch_size": microbatch_size, "tp": tp, "compile": compile,
            "sequence_parallel": sequence_parallel, "ep": ep, "cp": cp,
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
        found = {name: self._with_mode(setting, name) for name in ("none", "full")}
        by_mode = {name: one.kinds for name, one in found.items()}
        return [by_mode[mode.of_layer(layer)][kind] for layer, kind in enumerate(self.layers)]

    def checkpointed_setting(self, setting: Setting, ac: str | None = None) -> Setting:
        """The setting with ac full of the same sizes, for F that a schedule says are checkpointed.

        ConfigError if there is none, or for other modes than `none`: both choose what is computed again.
        """
        mode = ac or setting.ac
        if mode != "none":
            raise ConfigError(f"ac={mode!r} with a schedule that says which F are checkpointed: use ac='none'")
        return self._with_mode(setting, "full")

    def _with_mode(self, setting: Setting, ac: str) -> Setting:
        names = ("microbatch_size", "tp", "compile", "sequence_parallel", "ep", "cp")
        found = self.setting(ac=ac, **{name: getattr(setting, name) for name in names})
        return found if setting.bandwidths is None else found.with_exchanges(setting.bandwidths)

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
        gradients: str = "whole",
        shard_link: Link = SAME_LINK,
        node_size: int | None = None,
        memory_limit: float | None = None,
        turns: bool = True,
        slice_shares: Sequence[float] = (),
        offload_bandwidth: float | None = None,
        checkpointing: bool = False,
    ) -> Costs:
        """Costs of stages with `counts` layers, by default in the first setting, in seconds and bytes.

        Stages on one rank of `placement` (by default each has its own) share a tied weight. `shards` is
        the size of `dp_shard`. With `gather` ("keep" or "regather"), gathers and reductions use `shard_link` and are
        simulated, reductions where `gradients` says, as in `lower`; without it, full weights and gradients are resident
        all the time. `node_size` is the number of pipeline ranks per machine. With divided experts, F and B of an
        Overlap take `turns`, so that exchanges are hidden behind computations. `slice_shares` are the tokens of each
        slice of a sequence, in shares; `offload_bandwidth` the bytes per second of copies to the host and back. With
        `checkpointing` the costs of F that a schedule says are checkpointed are there too.
        """
        require_positive_integers(shards=shards)
        if checkpointing:
            options: dict[str, Any] = {
                "placement": placement, "shards": shards, "gather": gather, "gradients": gradients,
                "shard_link": shard_link, "node_size": node_size, "memory_limit": memory_limit, "turns": turns,
                "slice_shares": slice_shares, "offload_bandwidth": offload_bandwidth,
            }  # fmt: skip
            full = self.checkpointed_setting(setting or self.settings[0], ac)
            plain = self.costs(counts, setting, ac=ac, **options)
            return plain.with_checkpointed(self.costs(counts, full, **options), len(counts))
        chosen = self.price_exchanges(setting or self.settings[0])
        stages = self.stage_layers(counts, chosen, ac)
        if placement is not None and len(placement.copies[0]) != len(stages):
            raise ConfigError(
                f"layers={short(list(counts))} has {len(stages)} stages: the placement has {len(placement.copies[0])}"
            )
        sizes, split = Shards.of(shards, chosen.ep), [Held.sum(layer.held for layer in stage) for stage in stages]
        held_stages = _held_stages(placement, len(stages))
        if self.tied and any(held[0] == 0 and held[-1] == len(stages) - 1 for held in held_stages):
            ends = [[chosen.kinds[kind] for kind in part] for part in (self.before, self.after)]
            shared = min(sum(layer.num_trained for layer in part) for part in ends)
            not_trained = min(sum(layer.parameters for layer in part) for part in ends) - shared
            last = split[-1]
            split[-1] = last._replace(trained=last.trained - shared, frozen=last.frozen - not_trained)
        state = self.state_of(chosen.tp)
        resident = state.resident if gather is None else state.resident_shards
        weights = [resident(numbers, sizes) for numbers in split]
        first = [0.0] * len(stages)
        if shards == 1:  # sharded gradients are simulated, and the shards of their sums small
            first = [state.sum_bytes(numbers, sizes) for numbers in self._without_head(split, chosen)]
        forward, backward = self._message_overheads(range(len(stages)) if placement is None else placement.copies[0])
        blocks = self._held_blocks(counts, chosen, sizes)
        more: dict[str, Any] = (
            {} if gather is None else self._sharding(split, blocks, gather, sizes, shard_link, gradients)
        )
        if turns and chosen.ep > 1:
            more |= {"phases": self._phases(counts, stages), "sm_tax": SM_TAX}
        if "phases" not in more:
            pairs = [a + b for a, b in zip(forward, backward)]
            more["overlap"] = _sums(stages, lambda layer: layer.overlapped, pairs)
        if len(slice_shares) > 1:
            more |= self._slicing(stages, slice_shares)
            stages = [[_slice_workspaces(layer, slice_shares) for layer in stage] for stage in stages]
        if gather == "regather":
            peaks = self.gathered_peaks(counts, chosen, ac, shards, slice_shares)
        else:
            peaks = [gathered_peaks(stage) for stage in stages]
        workspaces = [[getattr(stage, name).total for stage in peaks] for name in GatheredPeaks._fields]
        return Costs(
            f=_sums(stages, lambda layer: layer.f, forward), i=_sums(stages, lambda layer: layer.i, backward),
            w=_sums(stages, lambda layer: layer.w), b=_sums(stages, lambda layer: layer.full_backward, backward),
            activation=_sums(stages, lambda layer: layer.activation), stash=_sums(stages, lambda layer: layer.stash),
            f_workspace=workspaces[0], workspace=workspaces[1], i_workspace=workspaces[2],
            message=self.message_bytes(chosen), weights=weights, first_gradients=first,
            p2p=self.link.p2p or 0.0, bandwidth=self.link.bandwidth, node_size=node_size,
            inter_node=SAME_LINK if node_size is None else self.inter_node,
            memory_limit=memory_limit, offload_bandwidth=offload_bandwidth, unit="s", memory_unit="B", **more,
        )  # fmt: skip

    def gathered_peaks(
        self, counts: Sequence[int], setting: Setting, ac: str | None, shards: int, slice_shares: Sequence[float]
    ) -> list[GatheredPeaks]:
        """The peaks of each stage whose blocks are gathered one by one; a slice has its share of them."""
        stages = self.stage_layers(counts, setting, ac)
        if len(slice_shares) > 1:
            stages = [[_slice_workspaces(layer, slice_shares) for layer in stage] for stage in stages]
        blocks = self._held_blocks(counts, setting, Shards.of(shards, setting.ep))
        return [
            gathered_peaks(
                layers, [index for index, (_, n) in enumerate(kinds) if n is not None],
                max(map(self._full_bytes, own), default=0.0),
            )
            for layers, kinds, own in zip(stages, self.stage_kinds(counts), blocks, strict=True)
        ]  # fmt: skip

    def _held_blocks(self, counts: Sequence[int], setting: Setting, shards: Shards) -> list[list[Held]]:
        """The parameters of the blocks of each stage that are sharded."""
        blocks = [
            [setting.kinds[kind].held for kind, n in stage if n is not None] for stage in self.stage_kinds(counts)
        ]
        if shards.experts == 1:  # experts are not sharded: they are resident
            blocks = [[one._replace(experts=0) for one in stage] for stage in blocks]
        return blocks

    @property
    def can_slice(self) -> bool:
        """Whether the costs of some setting are known for slices of sequences."""
        return any(map(self.has_slices, self.settings))

    def has_slices(self, setting: Setting) -> bool:
        """Whether the costs of a setting are known for slices of sequences."""
        return all(setting.kinds[kind].keys > 0 for kind in self.layers)

    def attention_share(self, setting: Setting) -> float:
        """The part of the time of all layers that is attention."""
        layers = [setting.kinds[kind] for kind in self.layers]
        return sum(layer.f_attention + layer.i_attention for layer in layers) / sum(
            layer.f + layer.full_backward for layer in layers
        )

    def _slicing(self, stages: list[list[LayerCost]], shares: Sequence[float]) -> dict[str, Any]:
        """The fields of Costs for slices. Gradients of keys are added up in float32, but those of the last slice."""
        keys = _sums(stages, lambda layer: layer.keys)
        wider = 2 if self.dtype in LOW_DTYPES else 1
        return {
            "slice_sizes": list(shares),
            "keys": keys,
            "key_gradients": [size * wider * (1 - shares[-1]) for size in keys],
            "f_attention": _sums(stages, lambda layer: layer.f_attention),
            "i_attention": _sums(stages, lambda layer: layer.i_attention),
        }

    def _without_head(self, split: list[Held], setting: Setting) -> list[Held]:
        """The parameters of stages whose gradients the first B or W allocates: F allocates those of some heads."""
        if self.after != self.after_full:
            return split
        in_forward = sum(setting.kinds[kind].num_trained for kind in self.after)
        return [*split[:-1], split[-1]._replace(trained=max(0, split[-1].trained - in_forward))]

    def _message_overheads(self, ranks: Sequence[int]) -> tuple[list[float], list[float]]:
        """The time that messages add to the forward and to the backward of each stage, by the ranks of the stages."""
        crosses = [False, *(a != b for a, b in pairwise(ranks)), False]  # whether a message crosses each boundary
        return (
            [previous * self.receiving + following * self.sending for previous, following in pairwise(crosses)],
            [previous * self.sending + following * self.receiving for previous, following in pairwise(crosses)],
        )

    def price_exchanges(self, setting: Setting, gpus_per_node: int = 8) -> Setting:
        """The setting with seconds of the exchanges of divided experts, and of attention over `cp`.

        The GPUs of `tp` are neighbours, then those of `cp`, then those of `ep`.
        """
        if setting.ep == setting.cp == 1 or setting.bandwidths is not None:
            return setting
        find_bandwidth = self._ring_bandwidth if setting.exchange == RING else self._exchange_bandwidth
        parts = find_bandwidth(setting.cp, gpus_per_node // setting.tp)
        experts = self._exchange_bandwidth(setting.ep, gpus_per_node // (setting.tp * setting.cp))
        return setting.with_exchanges(Bandwidths(experts, parts))

    def _exchange_bandwidth(self, size: int, num_inside: int) -> float:
        """Bytes per second of an exchange between `size` GPUs, of which `num_inside` neighbours share a machine.

        What stays in the machine and what leaves it travel at the same time.
        """
        inside = gcd(size, max(1, num_inside))
        links = ((inside - 1, self.link.bandwidth), (size - inside, self.inter_node.bandwidth))
        seconds = max(part / size / bandwidth if bandwidth else 0.0 for part, bandwidth in links)
        return 1 / seconds if seconds else inf

    def _ring_bandwidth(self, size: int, num_inside: int) -> float:
        """The same, of parts that are passed round a ring: one message after the other, each over the slowest link."""
        link = self.link if gcd(size, max(1, num_inside)) == size else self.inter_node
        return link.bandwidth * size / (size - 1) if link.bandwidth else inf

    def _phases(self, counts: Sequence[int], stages: list[list[LayerCost]]) -> list[list[LayerPhases]]:
        """The phases of the decoder layers of each stage; one without divided experts is all attention."""
        return [
            [
                layer.phases or LayerPhases(attention=PhaseTimes(layer.f, layer.i, layer.w))
                for (_, n), layer in zip(kinds, stage, strict=True) if n is not None
            ]
            for kinds, stage in zip(self.stage_kinds(counts), stages, strict=True)
        ]  # fmt: skip

    def _sharding(
        self, split: list[Held], blocks: list[list[Held]], gather: str, shards: Shards, link: Link, policy: str
    ) -> dict[str, Any]:
        """The fields of Costs for sharded stages, from the parameters of each and of its blocks.

        A gather or reduction moves all but a rank's own shard. While a stage runs with "regather", it has what is
        outside of its `blocks`, one block, and the message of the next one; before that, the messages of what is
        outside and of one block. More or less than that is workspace (`gathered_peaks`). While a B or W runs with
        rolling gradients, it has those of what is outside of the blocks, of one block, and of those being reduced.
        """
        state = self.state
        bandwidths = [link.bandwidth * n / (n - 1) if link.bandwidth and n > 1 else None for n in shards]
        if shards.experts == 1:  # experts are not sharded: they are resident
            split = [one._replace(experts=0) for one in split]
        full = [self._full_bytes(one) for one in split]
        sizes = [[self._full_bytes(one) for one in stage] for stage in blocks]
        gradients = [(one.trained * state.gradients, one.experts * state.gradients) for one in split]
        fields = {
            "shards": gather, "units": max(1, *map(len, blocks)), "shard_bandwidth": bandwidths[0],
            "full_weights": full,
            "gathered_weights": [
                size - sum(own) + min(2, len(own)) * max(own, default=0)
                for size, own in zip(full, sizes, strict=True)
            ],
            "started_weights": [
                size - sum(own) + max(own, default=0) for size, own in zip(full, sizes, strict=True)
            ],
            "full_gradients": [  # beside the shards of the sum; rolling ones are added to shards that are there
                sum(size * (1 - 1 / n * (policy == "whole")) for size, n in zip(both, shards, strict=True))
                for both in gradients
            ],
            "reduce": [_transfer_seconds(both, bandwidths) for both in gradients],
        }  # fmt: skip
        if policy != "whole":
            rolling = [self._rolling_bytes(one, own) for one, own in zip(split, blocks, strict=True)]
            fields |= {"gradients": policy, "rolling_gradients": rolling}
        if any(one.experts for one in split):
            weights = [(state.full_weights(one.trained, one.frozen), one.experts * state.weights) for one in split]
            fields["unshard"] = [_transfer_seconds(both, bandwidths) for both in weights]
        return fields

    def _rolling_bytes(self, held: Held, blocks: Sequence[Held]) -> float:
        """Bytes of the gradients that are not reduced while a B or W runs."""
        each = [(one.trained + one.experts) * self.state.gradients for one in blocks]
        outside = (held.trained + held.experts) * self.state.gradients - sum(each)
        return outside + min(1 + REDUCES_AT_ONCE, len(each)) * max(each, default=0.0)

    def _full_bytes(self, held: Held) -> float:
        """Bytes of the unsharded weights."""
        return self.state.full_weights(held.trained + held.experts, held.frozen)

    def schedule_costs(
        self, schedule: Schedule, counts: Sequence[int], setting: Setting | None = None, *, ac: str | None = None,
        node_size: int | None = None,
    ) -> Costs:  # fmt: skip
        """`costs` of the stages of a schedule: of a head as it runs it, and with those of its checkpointed F."""
        return self.for_schedule(schedule).costs(
            counts, setting, ac=ac, placement=schedule.placement, node_size=node_size,
            checkpointing=bool(schedule.checkpointed),
        )  # fmt: skip

    def stage_costs(self, problem: Problem, placement: Placement | None = None, per: str = "rank") -> Costs:
        """Costs of stages with layers divided as evenly as possible; `per` has no effect on costs of layers."""
        return self.costs(layer_counts(self.num_layers, problem.num_stages), placement=placement)

    def message_bytes(self, setting: Setting) -> float:
        """Bytes from stage to stage: the output of a decoder layer."""
        return max(setting.kinds[kind].message for kind in self.layers)


def _transfer_seconds(sizes: Sequence[float], bandwidths: Sequence[float | None]) -> float:
    return sum(size / bandwidth if bandwidth else 0.0 for size, bandwidth in zip(sizes, bandwidths, strict=True))


def _slice_workspaces(layer: LayerCost, shares: Sequence[float]) -> LayerCost:
    """The layer with workspaces of which the share of each slice is enough for it.

    A slice has the keys of all tokens up to its end for all heads, and the gradients of these in the backward of
    attention, when what later operators keep is gone; its chunks of logits are as large as those of whole sequences, or
    the slice.
    """
    keys = layer.repeated_keys * max(end / share for end, share in zip(accumulate(shares), shares, strict=True))
    chunk = layer.chunk_workspace * (min(1 / min(shares), max(1.0, layer.chunks)) - 1)
    return replace(
        layer, f_workspace=layer.f_workspace + keys + chunk,
        workspace=max(layer.workspace + keys, layer.attention_workspace + 2 * keys),
    )  # fmt: skip


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
