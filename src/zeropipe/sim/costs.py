"""What actions, messages and activations cost.

A number is for every stage alike, a list has one entry per stage, and a table like {0: 0.8} names some stages.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from sys import float_info
from typing import Any, NamedTuple

from zeropipe.core.placement import Problem
from zeropipe.core.shard_actions import require_policy
from zeropipe.core.units import count_text, to_python
from zeropipe.errors import ConfigError, short, suggest

MAX_UNITS = 10_000
NO_BANDWIDTH = "a message would never arrive; leave it out for no limit"
DEFAULT = "default"  # in a table of stages: what the others have
_MAX_STAGE_DIGITS = 9
SHARDS = ("unshard", "reduce", "whole_weights", "whole_gradients")  # of sharded stages
OF_SHARDS = (*SHARDS, "shard_bandwidth", "units")
PER_STAGE = ("f", "i", "w", "b", "overlap", "message", "activation", "stash", "weights", *SHARDS)


@dataclass(frozen=True)
class Sparse:
    """Numbers of some stages. The others have the default: the table's own, or else the field's."""

    entries: tuple[tuple[int, float], ...]
    default: float | None = None


PerStage = float | Sequence[float] | Mapping[Any, float] | Sparse


class Link(NamedTuple):
    """One direction between two ranks: its latency, and bytes per unit of time. None: as in the costs around it."""

    p2p: float | None = None
    bandwidth: float | None = None


INSIDE = Link()  # as within a machine


@dataclass(frozen=True)
class Costs:
    """Time per kind and stage, the price of messages, and what memory a microbatch takes.

    `b` defaults to i + w, `overlap` (an F and a B as one step) to f + b. A message takes `p2p` plus
    `message`/`bandwidth`; `edges` overrides single directions, and with `node_size` every edge between two nodes is
    an `inter_node` link. `blocking` keeps the sender busy until its message has arrived; `blocking_ends` does so in
    warm-up and cool-down only, as Megatron-LM does. With `serial_links` each direction transfers one message at a time:
    it is taken for `message`/`bandwidth`, while the latency passes beside others. F allocates `activation`; I frees all
    but `stash` (default: frees nothing), W frees the rest. `weights` is there all the time: parameters, gradients and
    optimizer state of a stage.

    `shards`: weights are sharded over data-parallel ranks, and gathered as it says: "keep" or "regather", as in
    `lower`. Each rank has one link to those that share its stages: gathering a stage takes it for `unshard`, summing
    its gradients for `reduce`; by default for `whole_weights` and `whole_gradients` over `shard_bandwidth`. These two
    are memory, too: from UNSHARD to RESHARD, and from the first gradient to the end of REDUCE_GRAD. A stage is
    gathered and reduced in `units` equal pieces: F starts with the first of them, and within the last W each is
    reduced when it is complete. With "regather" two of them are whole at a time.
    """

    f: PerStage = 1.0
    i: PerStage = 1.0
    w: PerStage = 1.0
    b: PerStage | None = None
    overlap: PerStage | None = None
    p2p: float = 0.0
    bandwidth: float | None = None
    message: PerStage = 0.0
    edges: Mapping[tuple[int, int], Link] = field(default_factory=dict)
    node_size: int | None = None
    inter_node: Link = INSIDE
    blocking: bool = False
    blocking_ends: bool = False
    serial_links: bool = False
    activation: PerStage = 1.0
    stash: PerStage | None = None
    weights: PerStage = 0.0
    shards: str | None = None
    unshard: PerStage | None = None
    reduce: PerStage | None = None
    whole_weights: PerStage = 0.0
    whole_gradients: PerStage = 0.0
    shard_bandwidth: float | None = None
    units: int = 1
    memory_limit: float | None = None
    unit: str = ""
    memory_unit: str = ""

    def __post_init__(self) -> None:
        for name in PER_STAGE:
            object.__setattr__(self, name, _per_stage(name, to_python(getattr(self, name))))
        for name in ("p2p", "bandwidth", "memory_limit", "shard_bandwidth"):
            value = to_python(getattr(self, name))
            object.__setattr__(self, name, value)
            if value is not None or _DEFAULTS[name] is not None:
                _number(name, value)
        for name in ("node_size", "units"):
            object.__setattr__(self, name, to_python(getattr(self, name)))
        object.__setattr__(self, "edges", _edges(self.edges))
        object.__setattr__(self, "inter_node", _link(self.inter_node, "inter_node"))
        bandwidths = {"bandwidth": self.bandwidth, "shard_bandwidth": self.shard_bandwidth}
        bandwidths["inter_node.bandwidth"] = self.inter_node.bandwidth
        bandwidths |= {f"edges.{a}-{b}.bandwidth": link.bandwidth for (a, b), link in self.edges.items()}
        for name, bandwidth in bandwidths.items():
            if bandwidth == 0:
                raise ConfigError(f"{name}=0: {NO_BANDWIDTH}")
        for name in ("unit", "memory_unit"):
            if not isinstance(getattr(self, name), str):
                raise ConfigError(f'{name}={short(getattr(self, name))}: a text is needed, like "s" or "B"')
        for name in ("blocking", "blocking_ends", "serial_links"):
            if not isinstance(getattr(self, name), bool):
                raise ConfigError(f"{name}={short(getattr(self, name))}: true or false is needed")
        if self.blocking and self.blocking_ends:
            raise ConfigError("blocking and blocking_ends are both on: the first blocks everywhere; give one of them")
        if self.node_size is not None and (type(self.node_size) is not int or self.node_size < 1):
            raise ConfigError(f"node_size={short(self.node_size)}: a whole number of ranks from 1 on is needed")
        if self.node_size is None and self.inter_node != INSIDE:
            raise ConfigError("inter_node is of links between machines: say how many ranks one has, node_size=8")
        if type(self.units) is not int or not 1 <= self.units <= MAX_UNITS:
            raise ConfigError(f"units={short(self.units)}: a whole number from 1 to {MAX_UNITS} is needed")
        if self.shards is not None:
            require_policy(self.shards)
        elif given := [name for name in OF_SHARDS if getattr(self, name) != _DEFAULTS[name]]:
            raise ConfigError(
                f"{given[0]} is of sharded stages: say when they are gathered, shards='keep' or 'regather'"
            )

    def link(self, source: int, target: int) -> Link:
        """What the direction from rank `source` to rank `target` is like."""
        own = Link()
        if (source, target) in self.edges:
            own = self.edges[source, target]
        elif self.node_size is not None and source // self.node_size != target // self.node_size:
            own = self.inter_node
        return Link(
            self.p2p if own.p2p is None else own.p2p, self.bandwidth if own.bandwidth is None else own.bandwidth
        )

    def require_ranks(self, num_ranks: int) -> None:
        """ConfigError for an edge that leads to a rank that is not there."""
        for source, target in self.edges:
            if source >= num_ranks or target >= num_ranks:
                raise ConfigError(
                    f"edge {source}-{target}: there are {num_ranks} ranks, 0 to {num_ranks - 1}; leave it out"
                )

    def column(self, name: str, num_stages: int) -> list[float]:
        """One number per stage, defaults filled in."""
        value = getattr(self, name)
        if isinstance(value, Sparse):
            rest: dict[str, Any] = {name: _DEFAULTS[name] if value.default is None else value.default}
            column = replace(self, **rest).column(name, num_stages)
            for stage, number in value.entries:
                if stage >= num_stages:
                    raise ConfigError(f"{name} names stage {stage}: there are {num_stages}, 0 to {num_stages - 1}")
                column[stage] = number
            return column
        if value is None:
            if name == "b":
                return _plus(self.column("i", num_stages), self.column("w", num_stages))
            if name == "overlap":
                return _plus(self.column("f", num_stages), self.column("b", num_stages))
            if name in ("unshard", "reduce"):
                sizes = self.column("whole_weights" if name == "unshard" else "whole_gradients", num_stages)
                return [size / self.shard_bandwidth if self.shard_bandwidth else 0.0 for size in sizes]
            return self.column("activation", num_stages)  # stash
        if isinstance(value, tuple):
            if len(value) != num_stages:
                raise ConfigError(
                    f"{name} has {count_text(len(value), 'entry')}, the schedule has "
                    f"{count_text(num_stages, 'stage')}: give one number, or one per stage"
                )
            return list(value)
        return [float(value)] * num_stages

    def unsharded(self) -> Costs:
        """The same costs of stages that are not sharded."""
        return replace(self, shards=None, **{name: _DEFAULTS[name] for name in OF_SHARDS})  # type: ignore[arg-type]

    def regrouped(self, problem: Problem) -> Costs:
        """The same model cut into `problem.num_stages` stages.

        A number is of one of `num_ranks` equal parts of the model, and a list with an entry per rank of these parts in
        order: they are shared out over a part's stages. Lists of finer pieces are added up. What a message takes does
        not depend on the cut.
        """
        changes: dict[str, Any] = {}
        for name in PER_STAGE:
            value = getattr(self, name)
            if name == "message" or value is None:
                continue
            if isinstance(value, Sparse):  # it names parts of the model, as many as ranks
                changes[name] = _cut(name, tuple(self.column(name, problem.num_ranks)), problem)
            elif isinstance(value, tuple):
                changes[name] = _cut(name, value, problem)
            else:
                changes[name] = value * problem.num_ranks / problem.num_stages
        return replace(self, **changes)


def given_costs(costs: Costs | None) -> Costs:
    """Costs that were given, or the default ones; ConfigError for anything else."""
    if costs is None:
        return Costs()
    if not isinstance(costs, Costs):
        layers = hasattr(costs, "settings")
        way = "theirs are of layers; .costs(counts) gives those of stages" if layers else "give zp.Costs(f=1, i=1, w=1)"
        raise ConfigError(f"costs={short(costs)}: costs of stages are needed, {way}")
    return costs


def costs_from(data: Mapping[str, Any], where: str = "costs") -> Costs:
    """Costs from plain data, as in a costs file.

    `edges` is a table like {"0-1" = {p2p = 1e-5, bandwidth = 5e10}}.
    """
    known = sorted(f.name for f in fields(Costs))
    for name in data:
        if name not in known:
            raise ConfigError(f"{where}: unknown field {short(name)}: {suggest(name, known)}")
    return Costs(**data)


def costs_data(costs: Costs) -> dict[str, Any]:
    """Costs as plain data that `costs_from` reads: what differs from the defaults."""
    found: dict[str, Any] = {}
    for part in fields(Costs):
        value = getattr(costs, part.name)
        if isinstance(value, Sparse):
            rest = {} if value.default is None else {DEFAULT: value.default}
            value = {**{str(stage): number for stage, number in value.entries}, **rest}
        elif part.name == "edges":
            value = {f"{a}-{b}": _link_data(link) for (a, b), link in value.items()} or None
        elif isinstance(value, Link):
            value = _link_data(value) or None
        elif isinstance(value, tuple):
            value = list(value)
        if value is not None and value != part.default:
            found[part.name] = value
    return found


def read_costs(path: str) -> dict[str, Any]:
    """The table of a .toml or .json file."""
    from zeropipe.core.files import has_suffix, read_text
    from zeropipe.core.formats.parse import parse_json, parse_toml
    from zeropipe.core.limits import COMMAND_LINE

    text, is_json = read_text(path, COMMAND_LINE, "the costs file"), has_suffix(path, ".json")
    try:
        data = parse_json(text) if is_json else parse_toml(text)
    except ValueError as error:
        raise ConfigError(f"{path} is not {'JSON' if is_json else 'TOML'}: {error}") from None
    if not isinstance(data, dict):
        raise ConfigError(f"{path} holds no table of costs: write fields like f = 1.0")
    return data


_DEFAULTS = {field.name: field.default for field in fields(Costs)}


def _plus(a: list[float], b: list[float]) -> list[float]:
    return [x + y for x, y in zip(a, b, strict=True)]


def _per_stage(name: str, value: Any) -> Any:
    """A number, a tuple of one per stage, or a table of some; None where that is the default."""
    if isinstance(value, Mapping):
        return _sparse(name, value)
    if isinstance(value, Sequence) and not isinstance(value, (str, bytes, bytearray)):
        return tuple(_number(name, to_python(number)) for number in value)
    if not isinstance(value, Sparse) and (value is not None or _DEFAULTS[name] is not None):
        _number(name, value)
    return value


def _number(name: str, value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 <= value <= float_info.max:
        raise ConfigError(f"{name}={short(value)}: a number from 0 on is needed")
    return float(value)


def _sparse(name: str, table: Mapping[Any, Any]) -> Sparse:
    entries, default = [], None
    for key, value in table.items():
        if key == DEFAULT:
            default = _number(f"{name}.{DEFAULT}", to_python(value))
        elif str(key).isdecimal() and len(str(key)) <= _MAX_STAGE_DIGITS:
            entries.append((int(key), _number(f"{name}.{key}", to_python(value))))
        else:
            raise ConfigError(
                f"{name}={short(dict(table))}: {short(key)} is no stage; name stages by number, like {{0: 0.8}}, "
                f"and what the others have {DEFAULT!r}"
            )
    return Sparse(tuple(sorted(entries)), default)


def _cut(name: str, pieces: tuple[float, ...], problem: Problem) -> tuple[float, ...]:
    """What each stage takes of a model whose pieces, in order, take `pieces`."""
    ranks, stages = problem.num_ranks, problem.num_stages
    if len(pieces) == ranks and stages % ranks == 0:
        return tuple(piece * ranks / stages for piece in pieces for _ in range(stages // ranks))
    size, rest = divmod(len(pieces), stages)
    if rest:
        one_each = f"{ranks} (one per rank), " if stages != ranks and stages % ranks == 0 else ""
        raise ConfigError(
            f"{name} has {count_text(len(pieces), 'entry')}, which {count_text(stages, 'stage')} on "
            f"{count_text(ranks, 'rank')} cannot share: give 1, {one_each}{stages} (one per stage), or a multiple of "
            "that"
        )
    return tuple(sum(pieces[s * size : (s + 1) * size]) for s in range(stages))


def _edges(table: Any) -> dict[tuple[int, int], Link]:
    """The links of single directions, named by two ranks: (0, 1) or "0-1"."""
    if not isinstance(table, Mapping):
        raise ConfigError(f"edges={short(table)}: a table like 0-1 = {{p2p = 1e-5}} is needed")
    found = {}
    for name, link in table.items():
        source, target = _edge(name)
        found[source, target] = _link(link, f"edges.{source}-{target}")
    return found


def _edge(name: Any) -> tuple[int, int]:
    written = re.fullmatch(rf"(\d{{1,{_MAX_STAGE_DIGITS}}})-(\d{{1,{_MAX_STAGE_DIGITS}}})", str(name))
    pair = tuple(map(int, written.groups())) if written else name
    if isinstance(pair, tuple) and len(pair) == 2:
        source, target = map(to_python, pair)
        if type(source) is type(target) is int and min(source, target) >= 0 and source != target:
            return source, target
    raise ConfigError(f"edge {short(name)}: name it by two different ranks, from 0 on, like 0-1")


def _link_data(link: Link) -> dict[str, float]:
    return {name: value for name, value in link._asdict().items() if value is not None}


def _link(data: Any, where: str) -> Link:
    if isinstance(data, Mapping) and set(data) <= set(Link._fields):
        data = Link(**data)
    if not isinstance(data, tuple) or len(data) != len(Link._fields):
        raise ConfigError(f"{where}={short(data)}: a table with p2p and bandwidth is needed")
    found = Link(*map(to_python, data))
    for part, value in zip(Link._fields, found, strict=True):
        if value is not None:
            _number(f"{where}.{part}", value)
    return found
