"""The costs of actions, messages and memory.

A cost per stage is one number for all stages, a list with one number per stage, or a table like {0: 0.8} with numbers
of some stages.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from functools import wraps
from operator import add
from sys import float_info
from typing import Any, Literal, NamedTuple
from warnings import warn

from zeropipe.core.action import Kind
from zeropipe.core.gradient_policy import GRADIENTS, REDUCES_AT_ONCE, GradientPolicy
from zeropipe.core.phases import StagePhases
from zeropipe.core.placement import Placement, Problem
from zeropipe.core.shard_actions import require_policy
from zeropipe.core.slices import require_sizes
from zeropipe.core.units import count_text, to_python
from zeropipe.errors import ConfigError, short
from zeropipe.sim.phase_costs import RULE as PHASES_RULE
from zeropipe.sim.phase_costs import divide_phases, parse_phases, stage_phases

DEFAULT = "default"  # in a table of stages: the number of the stages that it does not name
OLD_NAMES = {"whole_weights": "full_weights", "whole_gradients": "full_gradients"}  # of fields, still accepted
_MAX_STAGE_DIGITS = 9


@dataclass(frozen=True)
class StageTable:
    """Numbers of some stages. The others have the default of the table, or else that of the field."""

    entries: tuple[tuple[int, float], ...]
    default: float | None = None


PerStage = float | Sequence[float] | Mapping[Any, float] | StageTable


_UNSET = StageTable(())  # names no stage


class Link(NamedTuple):
    """One direction between two ranks: latency, and bytes per unit of time. None: as in the costs."""

    p2p: float | None = None
    bandwidth: float | None = None


SAME_LINK = Link()  # as in the costs

FieldType = Literal[
    "per stage",
    "number",
    "memory",
    "bandwidth",
    "integer",
    "switch",
    "choice",
    "text",
    "link",
    "links",
    "phases",
    "sizes",
]
_RULES: dict[FieldType, str] = {
    "per stage": "must be a non-negative number",
    "number": "must be a non-negative number",
    "memory": "must be a non-negative number",
    "bandwidth": "must be a positive number; leave it out for no limit",
    "integer": "must be a positive integer",
    "switch": "must be true or false",
    "text": 'must be a string, like "s" or "B"',
    "link": "must be a table with p2p and bandwidth",
    "links": "must be a table like 0-1 = {p2p = 1e-5}",
    "phases": PHASES_RULE,
    "sizes": "must be positive numbers, one for each slice",
}


class CostField(NamedTuple):
    """A field of Costs: the command line, the page and their errors are derived from it."""

    type: FieldType
    help: str
    default: Any = None
    choices: tuple[str, ...] = ()
    max_value: int | None = None  # of an integer

    @property
    def rule(self) -> str:
        """The rule for its value, as in errors."""
        if self.choices:
            return f"must be {' or '.join(self.choices)}"
        return f"must be an integer from 1 to {self.max_value}" if self.max_value else _RULES[self.type]


def _field(type: FieldType, default: Any, help: str, **limits: Any) -> Any:
    metadata = {"cost": CostField(type, help, default, **limits)}
    if type == "links":
        return field(default_factory=dict, metadata=metadata)
    return field(default=default, metadata=metadata)


def _time(help: str) -> Any:
    """A time that is 1 by default; with phases, the sum of theirs."""
    return field(default=_UNSET, metadata={"cost": CostField("per stage", help, 1.0)})


@dataclass(frozen=True)
class Costs:
    """Time per kind and stage, the time of messages, and the memory of a microbatch.

    A message takes `p2p` plus `message`/`bandwidth`. `edges` overrides single directions; with `node_size`, every edge
    between two nodes is an `inter_node` link. `blocking` keeps the sender busy until its message has arrived;
    `blocking_ends` does so in warm-up and cool-down only, as Megatron-LM does. With `serial_links` each direction
    transfers one message at a time: it is occupied for `message`/`bandwidth`, while latencies overlap. F allocates
    `activation`; I frees all but `stash`, W frees the rest. `weights` are resident all the time. While a B or
    an I runs, its rank needs `workspace` or `i_workspace` beside what it had before; while an F runs, `f_workspace`
    beside what it has after it.

    An F that the schedule marks as checkpointed allocates `checkpointed_activation`, and its B or I takes `recompute`
    more, with `checkpointed_workspace` or `checkpointed_i_workspace` in place of the others.

    `shards`: weights are sharded over data-parallel ranks, and gathered as in `lower`, "keep" or "regather". Each rank
    has one link to those that share its stages: a gather occupies it for `unshard`, a reduction for `reduce`. The full
    weights are in memory from UNSHARD to RESHARD, the full gradients from the first gradient to the end of REDUCE_GRAD.
    A stage is gathered and reduced in `units` of equal size: F starts with the first of them, and within the last W
    each is reduced when it is complete. With "regather", `gathered_weights` are in memory while it runs, of two
    units by default, and before that `started_weights`, of the units whose gather starts at the UNSHARD.
    `gradients` are reduced as in `lower`. With "rolling", `rolling_gradients` are in memory while a B or W runs, and a
    rank computes no more gradients while more than two of its units are being reduced.

    An OFFLOAD copies `offload_size` to the host, on one lane per rank; a RELOAD copies it back on another one. Memory
    falls when the OFFLOAD has ended and rises at the RELOAD.

    `phases` are those of the layers of each stage: attention, dispatch, experts, combine. They are a part of f, i and
    w, which are their sums by default, and the time of an Overlap follows from them. Dispatch and combine are times, or
    with `exchange_bandwidth` bytes; under way, they take `sm_tax` of the GPU from computations.

    In a schedule with slices, a slice has its share of a microbatch's times, messages and memory: equal shares, or
    those of `slice_sizes`. But `f_attention` and `i_attention`, parts of f and i, grow with the square of the tokens: a
    slice attends to all before it, too. The slices of a microbatch share `keys`, from the first F to the last backward,
    and `key_gradients`, from the first backward to the last.
    """

    f: PerStage | None = _time("Time of a forward.")
    i: PerStage | None = _time("Time of an input gradient.")
    w: PerStage | None = _time("Time of a weight gradient.")
    b: PerStage | None = _field("per stage", None, "Time of a full backward; i + w by default.")
    overlap: PerStage | None = _field("per stage", None, "Time of an F and a B as one step; f + b by default.")
    p2p: float = _field("number", 0.0, "Latency of a message between ranks.")
    bandwidth: float | None = _field("bandwidth", None, "Bytes per unit of time; no limit by default.")
    message: PerStage = _field("per stage", 0.0, "Bytes of a message.")
    edges: Mapping[tuple[int, int], Link] = _field("links", {}, "Links of single directions.")
    node_size: int | None = _field("integer", None, "Ranks per machine.")
    inter_node: Link = _field("link", SAME_LINK, "between machines")
    blocking: bool = _field("switch", False, "A sender waits for its transfer.")
    blocking_ends: bool = _field(
        "switch", False, "A sender waits for its transfer in warm-up and cool-down only, as in Megatron-LM."
    )
    serial_links: bool = _field("switch", False, "One transfer at a time in each direction of a link.")
    activation: PerStage = _field("per stage", 1.0, "Memory that a forward allocates.")
    stash: PerStage | None = _field("per stage", None, "Memory kept from I until W; activation by default.")
    f_workspace: PerStage = _field("per stage", 0.0, "Memory in use only while a forward runs.")
    workspace: PerStage = _field("per stage", 0.0, "Memory in use only while a full backward runs.")
    i_workspace: PerStage | None = _field(
        "per stage", None, "Memory in use only while an input gradient runs; workspace by default."
    )
    recompute: PerStage | None = _field(
        "per stage", None, "Time that the backward of a checkpointed forward takes more; f by default."
    )
    checkpointed_activation: PerStage | None = _field(
        "per stage", None, "Memory that a checkpointed forward allocates; activation by default."
    )
    checkpointed_workspace: PerStage | None = _field(
        "per stage", None,
        "Memory in use only while the full backward of a checkpointed forward runs; by default workspace and what the "
        "forward did not keep.",
    )  # fmt: skip
    checkpointed_i_workspace: PerStage | None = _field(
        "per stage", None,
        "Memory in use only while the input gradient of a checkpointed forward runs; by default i_workspace and what "
        "the forward did not keep.",
    )  # fmt: skip
    weights: PerStage = _field("per stage", 0.0, "Constant memory: parameters, gradients, optimizer.")
    first_gradients: PerStage = _field(
        "per stage", 0.0, "The part of weights that the first B or W of a stage allocates: gradients."
    )
    shards: str | None = _field(
        "choice", None, "Stages are sharded; weights are gathered once per step (keep) or for every microbatch.",
        choices=("keep", "regather"),
    )  # fmt: skip
    unshard: PerStage | None = _field(
        "per stage", None, "Time to gather a stage; full_weights / shard_bandwidth by default."
    )
    reduce: PerStage | None = _field(
        "per stage", None, "Time to reduce the gradients of a stage; full_gradients / shard_bandwidth by default."
    )
    full_weights: PerStage = _field("per stage", 0.0, "Memory of the gathered weights of a stage.")
    gathered_weights: PerStage | None = _field(
        "per stage", None, "Memory of the weights gathered at a time with regather; two units by default."
    )
    started_weights: PerStage | None = _field(
        "per stage",
        None,
        "Memory of the weights that are gathered before their stage runs with regather; gathered_weights by default.",
    )
    full_gradients: PerStage = _field("per stage", 0.0, "Memory of the gradients of a stage until they are reduced.")
    gradients: str = _field(
        "choice", "whole", "Gradients of sharded stages are reduced once per step (whole), after every microbatch "
        "(rolling), or so often that at most N stages of a rank have whole ones (rolling:N).",
        choices=GRADIENTS,
    )  # fmt: skip
    rolling_gradients: PerStage | None = _field(
        "per stage",
        None,
        "Memory of full gradients while a B or W runs with rolling gradients; three units by default.",
    )
    shard_bandwidth: float | None = _field(
        "bandwidth", None, "Bytes per unit of time between ranks that share stages; no limit by default."
    )
    units: int = _field("integer", 1, "FSDP units in which a stage is gathered and reduced.", max_value=10_000)
    offload_size: PerStage | None = _field(
        "per stage", None, "Memory that an OFFLOAD copies to the host and frees; activation by default."
    )
    offload_time: PerStage | None = _field(
        "per stage",
        None,
        "Time to copy activations to the host; offload_size / offload_bandwidth by default.",
    )
    reload_time: PerStage | None = _field(
        "per stage", None, "Time to copy them back; offload_size / reload_bandwidth by default."
    )
    offload_bandwidth: float | None = _field(
        "bandwidth", None, "Bytes per unit of time from a device to its host; no limit by default."
    )
    reload_bandwidth: float | None = _field(
        "bandwidth", None, "Bytes per unit of time from the host to the device; offload_bandwidth by default."
    )
    phases: Sequence[Any] | None = _field("phases", None, "Phases of layers, by stage.")
    exchange_bandwidth: float | None = _field(
        "bandwidth", None, "Bytes per unit of time of dispatch and combine; without it they are times."
    )
    sm_tax: float = _field("number", 0.0, "Part of a GPU that an exchange under way takes from computations.")
    slice_sizes: Sequence[float] | None = _field(
        "sizes", None, "Tokens of each slice, or numbers in their ratio; equal by default."
    )
    f_attention: PerStage = _field("per stage", 0.0, "Part of f that is attention between tokens.")
    i_attention: PerStage = _field("per stage", 0.0, "Part of i that is attention between tokens.")
    keys: PerStage = _field("per stage", 0.0, "Memory of a microbatch's keys and values, which its slices share.")
    key_gradients: PerStage = _field("per stage", 0.0, "Memory of the gradients of these keys and values.")
    memory_limit: float | None = _field(
        "memory", None, "Memory of a rank, like 40 or 40GB; a schedule that needs more cannot win."
    )
    unit: str = _field("text", "", "Unit of time.")
    memory_unit: str = _field("text", "", "Unit of memory.")

    def __post_init__(self) -> None:
        for name, cost in COST_FIELDS.items():
            value = getattr(self, name)
            if name in PHASE_TIMES and (value is _UNSET or (value is None and self.phases is not None)):
                value = cost.default if self.phases is None else None  # the sum of the phases
                object.__setattr__(self, name, value)
            else:
                object.__setattr__(self, name, _parse_field(name, cost, value))
        self._require_phases()
        if self.blocking and self.blocking_ends:
            raise ConfigError("blocking and blocking_ends are both set: the first blocks everywhere; set one of them")
        if self.node_size is None and self.inter_node != SAME_LINK:
            raise ConfigError("inter_node is set without node_size: set the ranks per machine, like node_size=8")
        if self.shards is not None:
            require_policy(self.shards)
            GradientPolicy.parse(self.gradients)
        elif changed := [name for name in SHARD_FIELDS if getattr(self, name) != COST_FIELDS[name].default]:
            raise ConfigError(f"{changed[0]} is set for unsharded stages: set shards='keep' or 'regather'")

    def _require_phases(self) -> None:
        """ConfigError for fields that do not go with phases, or not without them."""
        if self.sm_tax >= 1:
            raise ConfigError(f"sm_tax={self.sm_tax:g}: must be less than 1, like 0.15 for 20 of 132 SMs")
        if self.phases is None:
            for name in ("exchange_bandwidth", "sm_tax"):
                if getattr(self, name):
                    raise ConfigError(f"{name} is set without phases: set phases, or leave {name} out")
        elif self.overlap is not None:
            raise ConfigError("overlap and phases are both set: the time of an Overlap follows from its phases")

    def link(self, source: int, target: int) -> Link:
        """The link from rank `source` to rank `target`."""
        own = SAME_LINK
        if (source, target) in self.edges:
            own = self.edges[source, target]
        elif self.node_size is not None and source // self.node_size != target // self.node_size:
            own = self.inter_node
        return Link(
            self.p2p if own.p2p is None else own.p2p, self.bandwidth if own.bandwidth is None else own.bandwidth
        )

    def require_ranks(self, num_ranks: int) -> None:
        """ConfigError for an edge of a rank that does not exist."""
        for source, target in self.edges:
            if source >= num_ranks or target >= num_ranks:
                raise ConfigError(f"edge {source}-{target}: ranks are 0 to {num_ranks - 1}")

    def column(self, name: str, num_stages: int) -> list[float]:
        """One number per stage, with defaults filled in."""
        value = getattr(self, name)
        if isinstance(value, StageTable):
            default = COST_FIELDS[name].default if value.default is None else value.default
            values: dict[str, Any] = {name: default}
            column = replace(self, **values).column(name, num_stages)
            for stage, number in value.entries:
                if stage >= num_stages:
                    raise ConfigError(f"{name} has stage {stage}: stages are 0 to {num_stages - 1}")
                column[stage] = number
            return column
        if value is None:
            return self._default_column(name, num_stages)
        if isinstance(value, tuple):
            if len(value) != num_stages:
                raise ConfigError(
                    f"{name} has {count_text(len(value), 'entry')}, the schedule has "
                    f"{count_text(num_stages, 'stage')}: must be one number, or one per stage"
                )
            return list(value)
        return [float(value)] * num_stages

    def stage_phases(self, num_stages: int) -> list[StagePhases]:
        """The phases of the layers of each stage, as times; ConfigError if a stage takes less than they do."""
        if self.phases is None:
            return [()] * num_stages
        stages = stage_phases(self.phases, num_stages, self.exchange_bandwidth)
        for name, kind in PHASE_TIMES.items():
            for stage, total in enumerate(self.column(name, num_stages)) if getattr(self, name) is not None else ():
                least = sum(layer.total(kind) for layer in stages[stage])
                if total < least * (1 - _ROUNDING):
                    raise ConfigError(f"{name}={total:g} of stage {stage} is less than the {least:g} of its phases")
        return stages

    def _default_column(self, name: str, num_stages: int) -> list[float]:
        if name in PHASE_TIMES:
            return [
                float(sum(layer.total(PHASE_TIMES[name]) for layer in stage)) for stage in self.stage_phases(num_stages)
            ]
        if name in ("b", "overlap"):
            first, second = ("i", "w") if name == "b" else ("f", "b")
            return [x + y for x, y in zip(self.column(first, num_stages), self.column(second, num_stages), strict=True)]
        if name in ("unshard", "reduce"):
            sizes = self.column("full_weights" if name == "unshard" else "full_gradients", num_stages)
            return [size / self.shard_bandwidth if self.shard_bandwidth else 0.0 for size in sizes]
        if name in ("offload_time", "reload_time"):
            bandwidth = self.offload_bandwidth
            if name == "reload_time" and self.reload_bandwidth is not None:
                bandwidth = self.reload_bandwidth
            return [size / bandwidth if bandwidth else 0.0 for size in self.column("offload_size", num_stages)]
        if name == "rolling_gradients":
            units = min(1 + REDUCES_AT_ONCE, self.units) / self.units
            return [units * size for size in self.column("full_gradients", num_stages)]
        if name in CHECKPOINTED_WORKSPACES:
            kept, less = (self.column(one, num_stages) for one in ("activation", "checkpointed_activation"))
            own = self.column(name.removeprefix("checkpointed_"), num_stages)
            return [size + max(0.0, x - y) for size, x, y in zip(own, kept, less, strict=True)]
        if name == "gathered_weights":
            return [min(2, self.units) / self.units * size for size in self.column("full_weights", num_stages)]
        others = {"i_workspace": "workspace", "started_weights": "gathered_weights", "recompute": "f"}
        # stash, offload_size, checkpointed_activation
        return self.column(others.get(name, "activation"), num_stages)

    def with_checkpointed(self, full: Costs, num_stages: int) -> Costs:
        """The same costs with those of checkpointed F, by the costs of stages whose F all are: `full`."""
        again, once = ([sum(pair) for pair in zip(*(one.column(n, num_stages) for n in "fb"))] for one in (full, self))
        sizes: dict[str, Any] = {
            f"checkpointed_{name}": full.column(name, num_stages) for name in ("activation", "workspace", "i_workspace")
        }
        return replace(self, recompute=[max(0.0, x - y) for x, y in zip(again, once, strict=True)], **sizes)

    def with_all_checkpointed(self, num_stages: int) -> Costs:
        """The costs of a schedule without marks that are those of all F being checkpointed under these costs."""
        f, recompute, attention = (self.column(name, num_stages) for name in ("f", "recompute", "f_attention"))
        more: dict[str, Any] = dict.fromkeys(("b", "i", *(() if self.phases else ("overlap",))), recompute)
        parts = [min(1.0, again / time) if time else 0.0 for again, time in zip(recompute, f, strict=True)]
        more["i_attention"] = [part * time for part, time in zip(parts, attention, strict=True)]
        changes: dict[str, Any] = {
            name: list(map(add, self.column(name, num_stages), added)) for name, added in more.items()
        }
        for name in ("activation", "workspace", "i_workspace"):
            changes[name] = self.column(f"checkpointed_{name}", num_stages)
        for name in ("stash", "offload_size"):
            changes[name] = self.column(name, num_stages)
        return replace(self, **changes)

    def with_reserved_workspace(self, placement: Placement) -> Costs:
        """The same costs with the largest workspace of each rank resident all the time.

        The search and the filling of gaps know the memory between actions only.
        """
        num_stages = len(placement.copies[0])
        forward, workspace, i_workspace, stash, activation = (
            self.column(name, num_stages) for name in (*WORKSPACES, "stash", "activation")
        )
        own = [max(0.0, size - max(0.0, kept - freed)) for size, kept, freed in zip(i_workspace, stash, activation)]
        largest = list(map(max, forward, workspace, own))
        if not any(largest):
            return self
        weights = self.column("weights", num_stages)
        for held in {placement.stages_of(rank) for table in placement.copies for rank in table}:
            stage = max(held, key=largest.__getitem__)
            weights[stage] += largest[stage]
        return replace(self, weights=weights, f_workspace=0.0, workspace=0.0, i_workspace=None)

    def without_sharding(self) -> Costs:
        """The same costs with unsharded stages."""
        return replace(self, shards=None, **{name: COST_FIELDS[name].default for name in SHARD_FIELDS})

    def stage_costs(self, problem: Problem, placement: Placement | None = None, per: str = "rank") -> Costs:
        """The costs of each stage, from costs per rank: `regroup`; or with `per="stage"` the costs as they are."""
        return self if per == "stage" else self.regroup(problem)

    def regroup(self, problem: Problem) -> Costs:
        """The costs of the same model divided into `problem.num_stages` stages.

        A number is the cost of one of `num_ranks` equal parts of the model; a list with an entry per rank has the
        costs of these parts, in order. Each part is divided evenly among its stages. Entries of longer lists are added
        up. The cost of a message and the workspace do not depend on the number of stages.
        """
        changes: dict[str, Any] = {}
        for name in PER_STAGE:
            value = getattr(self, name)
            if name == "message" or value is None or (name in _ALL_WORKSPACES and isinstance(value, (int, float))):
                continue
            if isinstance(value, StageTable):  # its stages are the parts of the model, one per rank
                value = tuple(self.column(name, problem.num_ranks))
            if isinstance(value, tuple):
                changes[name] = _divide_parts(name, value, problem)
            else:
                changes[name] = value * problem.num_ranks / problem.num_stages
        if self.phases is not None:
            changes["phases"] = divide_phases(self.phases, problem)
        return replace(self, **changes)

    def __getattr__(self, name: str) -> Any:
        if name in OLD_NAMES:
            _warn_old_name(name)
            return getattr(self, OLD_NAMES[name])
        raise AttributeError(f"'Costs' object has no attribute {name!r}")


COST_FIELDS: dict[str, CostField] = {one.name: one.metadata["cost"] for one in fields(Costs)}
PER_STAGE = tuple(name for name, cost in COST_FIELDS.items() if cost.type == "per stage")
PHASE_TIMES = {"f": Kind.F, "i": Kind.I, "w": Kind.W}  # which are sums of phases by default
PHASE_FIELDS = ("phases", "exchange_bandwidth", "sm_tax")
SLICE_FIELDS = ("slice_sizes", "f_attention", "i_attention", "keys", "key_gradients")
_ROUNDING = 1e-9  # of sums
WORKSPACES = ("f_workspace", "workspace", "i_workspace")  # of the action that runs: stages on one rank share it
CHECKPOINTED_WORKSPACES = ("checkpointed_workspace", "checkpointed_i_workspace")
_ALL_WORKSPACES = (*WORKSPACES, *CHECKPOINTED_WORKSPACES)
SHARD_COLUMNS = (
    "unshard", "reduce", "full_weights", "gathered_weights", "started_weights", "full_gradients", "rolling_gradients",
)  # fmt: skip
OFFLOAD_COLUMNS = ("offload_time", "reload_time", "offload_size")
SHARD_FIELDS = (*SHARD_COLUMNS, "gradients", "shard_bandwidth", "units")
TIME_FIELDS = ("f", "i", "w", "b", "overlap")


def flat_fields() -> dict[str, CostField]:
    """The fields as a form has them: one value each. `inter_node` is `inter_p2p` and `inter_bandwidth`.

    It has neither `edges` nor what goes with phases or slices.
    """
    flat: dict[str, CostField] = {}
    for name, cost in COST_FIELDS.items():
        if cost.type == "link":
            for part, quantity in (("p2p", "Latency"), ("bandwidth", "Bandwidth")):
                help = f"{quantity} {cost.help}; {part} by default."
                flat[f"inter_{part}"] = CostField(COST_FIELDS[part].type, help)
        elif cost.type != "links" and name not in (*PHASE_FIELDS, *SLICE_FIELDS):
            flat[name] = cost
    return flat


def _accept_old_names(init: Any) -> Any:
    """Let the constructor take the former names of fields, with a DeprecationWarning."""

    @wraps(init)
    def wrapper(self: Costs, *args: Any, **values: Any) -> None:
        for old in OLD_NAMES.keys() & values.keys():
            _warn_old_name(old)
            values[OLD_NAMES[old]] = values.pop(old)
        init(self, *args, **values)

    return wrapper


def _warn_old_name(name: str) -> None:
    warn(f"{name} of Costs is {OLD_NAMES[name]} now", DeprecationWarning, stacklevel=3)


Costs.__init__ = _accept_old_names(Costs.__init__)  # type: ignore[method-assign]


def require_stage_costs(costs: Costs | None) -> Costs:
    """The costs, or the default ones for None; ConfigError for anything else."""
    if costs is None:
        return Costs()
    if not isinstance(costs, Costs):
        is_per_layer = hasattr(costs, "settings")
        way_out = "use .costs(counts) of these costs of layers" if is_per_layer else "use zp.Costs(f=1, i=1, w=1)"
        raise ConfigError(f"costs={short(costs)}: must be costs of stages; {way_out}")
    return costs


def _parse_field(name: str, cost: CostField, value: Any) -> Any:
    """The value as it is stored; ConfigError if it breaks the rule of its field."""
    if cost.type == "links":
        return _parse_links(value)
    if cost.type == "link":
        return _parse_link(value, name)
    value = to_python(value)
    if value is None and cost.default is None:
        return None
    if cost.type == "phases":
        return parse_phases(value)
    if cost.type == "sizes":
        return require_sizes(value)
    if cost.type == "per stage":
        return _parse_per_stage(name, value)
    if cost.type in ("number", "memory", "bandwidth"):
        _require_number(name, value, is_positive=cost.type == "bandwidth")
    elif cost.type == "integer":
        if type(value) is not int or not 1 <= value <= (cost.max_value or value):
            raise ConfigError(f"{name}={short(value)}: {cost.rule}")
    elif not isinstance(value, bool if cost.type == "switch" else str):
        raise ConfigError(f"{name}={short(value)}: {cost.rule}")
    return value


def _parse_per_stage(name: str, value: Any) -> Any:
    """A number, a tuple of numbers, or a StageTable."""
    if isinstance(value, Mapping):
        return _parse_stage_table(name, value)
    if isinstance(value, Sequence) and not isinstance(value, (str, bytes, bytearray)):
        is_plain = value and all(type(number) is float for number in value)
        if is_plain and min(value) >= 0 and sum(value) <= float_info.max:
            return tuple(value)  # at once, as plans make many; a nan makes the sum nan
        return tuple(_require_number(name, to_python(number)) for number in value)
    if not isinstance(value, StageTable):
        _require_number(name, value)
    return value


def _require_number(name: str, value: Any, is_positive: bool = False) -> float:
    """The value as a float; ConfigError unless it is a finite non-negative (or positive) number."""
    is_number = isinstance(value, (int, float)) and not isinstance(value, bool) and 0 <= value <= float_info.max
    if not is_number or (is_positive and value == 0):
        raise ConfigError(f"{name}={short(value)}: {_RULES['bandwidth' if is_positive else 'number']}")
    return float(value)


def _parse_stage_table(name: str, table: Mapping[Any, Any]) -> StageTable:
    entries, default = [], None
    for key, value in table.items():
        if key == DEFAULT:
            default = _require_number(f"{name}.{DEFAULT}", to_python(value))
        elif str(key).isdecimal() and len(str(key)) <= _MAX_STAGE_DIGITS:
            entries.append((int(key), _require_number(f"{name}.{key}", to_python(value))))
        else:
            raise ConfigError(
                f"{name}={short(dict(table))}: {short(key)} must be the number of a stage, like {{0: 0.8}}, or "
                f"{DEFAULT!r} for the other stages"
            )
    return StageTable(tuple(sorted(entries)), default)


def _divide_parts(name: str, parts: tuple[float, ...], problem: Problem) -> tuple[float, ...]:
    """The cost of each stage of a model whose parts, in order, cost `parts`."""
    ranks, stages = problem.num_ranks, problem.num_stages
    if name in _ALL_WORKSPACES and len(parts) == ranks and stages % ranks == 0:
        return tuple(part for part in parts for _ in range(stages // ranks))
    if len(parts) == ranks and stages % ranks == 0:
        return tuple(part * ranks / stages for part in parts for _ in range(stages // ranks))
    size, rest = divmod(len(parts), stages)
    if rest:
        per_rank = f"{ranks} (one per rank), " if stages != ranks and stages % ranks == 0 else ""
        raise ConfigError(
            f"{name} has {count_text(len(parts), 'entry')}, which {count_text(stages, 'stage')} on "
            f"{count_text(ranks, 'rank')} cannot share: must be 1, {per_rank}{stages} (one per stage), or a multiple"
        )
    combine = max if name in _ALL_WORKSPACES else sum
    return tuple(combine(parts[s * size : (s + 1) * size]) for s in range(stages))


def _parse_links(table: Any) -> dict[tuple[int, int], Link]:
    """The links of single directions, by two ranks: (0, 1) or "0-1"."""
    if not isinstance(table, Mapping):
        raise ConfigError(f"edges={short(table)}: {_RULES['links']}")
    links = {}
    for name, link in table.items():
        source, target = _parse_edge(name)
        links[source, target] = _parse_link(link, f"edges.{source}-{target}")
    return links


def _parse_edge(name: Any) -> tuple[int, int]:
    text = re.fullmatch(rf"(\d{{1,{_MAX_STAGE_DIGITS}}})-(\d{{1,{_MAX_STAGE_DIGITS}}})", str(name))
    pair = tuple(map(int, text.groups())) if text else name
    if isinstance(pair, tuple) and len(pair) == 2:
        source, target = map(to_python, pair)
        if type(source) is type(target) is int and min(source, target) >= 0 and source != target:
            return source, target
    raise ConfigError(f"edge {short(name)}: must be two different ranks, like 0-1")


def _parse_link(data: Any, where: str) -> Link:
    if isinstance(data, Mapping) and set(data) <= set(Link._fields):
        data = Link(**data)
    if not isinstance(data, tuple) or len(data) != len(Link._fields):
        raise ConfigError(f"{where}={short(data)}: {_RULES['link']}")
    link = Link(*map(to_python, data))
    for part, value in zip(Link._fields, link, strict=True):
        if value is not None:
            _require_number(f"{where}.{part}", value, is_positive=part == "bandwidth")
    return link
