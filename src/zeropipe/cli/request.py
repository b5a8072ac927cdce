"""What a command line asks for: schedules, sizes and costs, from its arguments, its flags and a .toml file."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, NamedTuple

from zeropipe.cli.config import Config, read_config
from zeropipe.cli.cut import Cut
from zeropipe.cli.options import COSTS, Bytes, numbers, settings_of
from zeropipe.core.files import SCHEDULE_SUFFIXES, has_suffix
from zeropipe.errors import ConfigError, short

if TYPE_CHECKING:
    from zeropipe.core.placement import Placement, Problem
    from zeropipe.core.schedule import Schedule
    from zeropipe.core.timeline import Timeline
    from zeropipe.sim.costs import Costs
    from zeropipe.sim.layer_costs import LayerCosts
    from zeropipe.train.stage_costs import RunCosts

LINK = ("p2p", "bandwidth")
OF_LAYERS = "these costs are of layers, and a stage takes what its layers take; leave it out"


class Spec(NamedTuple):
    """One schedule as it is named: `interleaved:v=4:group_size=8` has settings of its own."""

    text: str
    name: str  # of the registry, path/to/mine.py:name, or a file
    stages_per_rank: int | None
    options: Mapping[str, Any]

    @property
    def is_file(self) -> bool:
        return has_suffix(self.name, *SCHEDULE_SUFFIXES)


class Priced(NamedTuple):
    """A schedule and what its stages cost."""

    schedule: Schedule
    costs: Costs
    per: str  # as in a Request, or "recording": it has its own
    recorded: Timeline | None  # a recording of which nothing else is asked
    layers: tuple[int, ...] | None  # of each stage, where costs are of layers

    def simulated(self) -> Timeline:
        from zeropipe.sim.simulate import simulate

        return simulate(self.schedule, self.costs)


@dataclass(frozen=True)
class Request:
    """Schedules, sizes and costs. A command for one schedule has at most one of each size."""

    specs: tuple[Spec, ...]
    ranks: tuple[int, ...]
    microbatches: tuple[int, ...]
    stages_per_rank: tuple[int, ...]
    options: Mapping[str, Any]
    weight_parts: int | None
    per: str  # what costs are of: "rank" or "stage"; or of layers, by "estimate", "profile" or a "training file"
    file_costs: Costs | LayerCosts | RunCosts | None  # of --costs or the .toml file
    cut: Cut  # of the model, where those are of layers
    flags: Mapping[str, Any]  # single costs, which override those
    run: Mapping[str, Any]  # flags of `zeropipe run` that the .toml file gives

    @property
    def costs(self) -> Costs:
        """What was given; the defaults where nothing was. ConfigError for costs of layers: see `costs_of`."""
        from zeropipe.sim.costs import Costs

        given = self.file_costs or Costs()
        if not isinstance(given, Costs):
            raise ConfigError(
                f"these are costs of the layers of {given.model}: name a schedule that cuts it into stages, or give "
                "costs per rank"
            )
        return overridden(given, self.flags)

    def costs_of(self, problem: Problem, placement: Placement | None = None) -> Costs:
        """The costs of each stage; `placement` says which of them share a rank."""
        from zeropipe.core.placement import linear
        from zeropipe.sim.compare import stage_costs
        from zeropipe.sim.costs import PER_STAGE, Costs
        from zeropipe.sim.layer_costs import LayerCosts

        given = self.file_costs
        if given is None or isinstance(given, Costs):
            return stage_costs(self.costs, problem, self.per)
        for name in PER_STAGE:
            if name in self.flags:
                raise ConfigError(f"--{name}: the costs of the layers of {given.model} say that; leave it out")
        if isinstance(given, LayerCosts):
            made = self.cut.costs(given, problem, placement, self.flags.get("node_size"))
        else:
            made = given.of(problem, placement or linear(problem))
        return overridden(made, self.flags)

    def schedule_of(self, spec: Spec) -> Schedule:
        """A schedule alone: costs are looked at only where they say how its W are to be cut."""
        from zeropipe.core.timeline import Timeline

        if self.weight_parts:
            return self.priced(spec).schedule
        found = self.load(spec)
        return found.schedule if isinstance(found, Timeline) else found

    def layers_of(self, problem: Problem, placement: Placement | None) -> tuple[int, ...] | None:
        """The layers of each stage, where costs are of layers."""
        from zeropipe.sim.layer_costs import LayerCosts

        given = self.file_costs
        return self.cut.counts(given, problem, placement) if isinstance(given, LayerCosts) else None

    def cut_text(self, layers: tuple[int, ...] | None = None) -> str:
        """What becomes of costs of layers, in words; `layers` are those of each stage, where one schedule is meant."""
        from zeropipe.sim.layer_costs import LayerCosts

        given = self.file_costs
        return self.cut.text(given, layers) if isinstance(given, LayerCosts) else ""

    @property
    def is_plain(self) -> bool:
        """Nothing but a schedule is asked for."""
        sizes = self.ranks or self.microbatches or self.stages_per_rank or self.options
        return not (sizes or self.file_costs or self.flags or self.weight_parts)

    def load(self, spec: Spec) -> Schedule | Timeline:
        """A schedule at the request's one size, or a recorded timeline."""
        return load(spec, _one(self.ranks), _one(self.microbatches), _one(self.stages_per_rank), self.options)

    def priced(self, spec: Spec | None = None) -> Priced:
        """A schedule (by default the first one) with the costs of its stages, W in parts if asked for."""
        from zeropipe.core.limits import COMMAND_LINE, has_weight_gradients, num_actions_with_parts
        from zeropipe.core.timeline import Timeline
        from zeropipe.sim.compare import stage_costs
        from zeropipe.sim.fill import fill_gaps
        from zeropipe.sim.fit import fit

        found = self.load(spec or self.specs[0])
        recorded = found if isinstance(found, Timeline) else None
        schedule = found.schedule if isinstance(found, Timeline) else found
        if recorded is not None and self.file_costs is None:  # it has its own
            costs, per = stage_costs(overridden(fit(recorded), self.flags), schedule.problem, self.per), "recording"
        else:
            costs, per = self.costs_of(schedule.problem, schedule.placement), self.per
        if self.weight_parts:
            COMMAND_LINE.require_actions(
                num_actions_with_parts(schedule, self.weight_parts), schedule.name, self.weight_parts
            )
            schedule = fill_gaps(schedule, costs, weight_parts=self.weight_parts)
            if not has_weight_gradients(schedule):
                raise ConfigError(
                    f"weight_parts={self.weight_parts}: {schedule.name} has whole backwards and no W: leave it out, or "
                    "give a schedule with W, like zb-h1"
                )
        layers = self.layers_of(schedule.problem, schedule.placement)
        return Priced(schedule, costs, per, recorded if self.is_plain else None, layers)


def load(
    spec: Spec, ranks: int | None, microbatches: int | None, stages_per_rank: int | None, options: Mapping[str, Any]
) -> Schedule | Timeline:
    """The schedule of a spec; its own settings come before those given for all."""
    from zeropipe.schedules.user import load_any

    for name in ("ranks", "microbatches", "stages_per_rank"):
        if name in options or name in spec.options:
            raise ConfigError(f"{name} is a size, not an option: give --{name.replace('_', '-')} N")
    per_rank = stages_per_rank if spec.stages_per_rank is None else spec.stages_per_rank
    return load_any(
        spec.name, ranks=ranks, microbatches=microbatches, stages_per_rank=per_rank, **{**options, **spec.options}
    )


def request_of(schedules: Sequence[str], given: Mapping[str, Any], several: Sequence[str] = ()) -> Request:
    """The request of a command's arguments and keywords. One argument may be a .toml file; flags override it.

    `several` are the fields of the file of which the command takes more than one.
    """
    texts = list(schedules)
    files = [text for text in texts if has_suffix(text, ".toml")]
    if len(files) > 1:
        raise ConfigError(f"{files[1]}: {files[0]} gives schedules, sizes and costs already; give one such file")
    config = read_config(files[0]) if files else Config()
    if files:
        place = texts.index(files[0])
        if not config.schedule and len(texts) == 1:
            raise ConfigError(f'{files[0]}: schedule is missing: write a line like schedule = "zbv"')
        texts[place : place + 1] = config.schedule
    for name in ("schedule", "ranks", "microbatches", "stages_per_rank"):
        values = getattr(config, name)
        if len(values) > 1 and name not in several:
            listed = short(list(values))
            raise ConfigError(f"{files[0]}: {name}={listed}: one is needed here; `zeropipe compare` takes several")
    file_costs = _load_costs(given.get("costs_file")) or config.costs
    return Request(
        tuple(map(spec_of, texts)),
        given["ranks"] or config.ranks,
        given["microbatches"] or config.microbatches,
        given["stages_per_rank"] or config.stages_per_rank,
        {**config.options, **settings_of(given["pairs"], "--option")},
        given.get("weight_parts") or config.weight_parts,
        _per(file_costs, given.get("per") or config.per),
        file_costs,
        _cut(given, file_costs),
        _flags(given),
        config.run,
    )


def spec_of(text: str) -> Spec:
    """`interleaved:v=4` in its parts."""
    parts = text.split(":")
    while len(parts) > 1 and "=" in parts[-1]:
        parts.pop()
    name = ":".join(parts)
    settings = settings_of(tuple(text.split(":")[len(parts) :]), f"{short(name)}:")
    if settings and has_suffix(name, *SCHEDULE_SUFFIXES):
        raise ConfigError(f"{text}: {name} is a finished schedule and has no settings")
    if {"v", "stages_per_rank"} <= settings.keys():
        raise ConfigError(f"{text}: v and stages_per_rank are the same; give one of them")
    short_v = settings.pop("v", None)
    per_rank = settings.pop("stages_per_rank", short_v)
    if per_rank is not None and (type(per_rank) is not int or per_rank < 1):
        raise ConfigError(f"{text}: v={per_rank}: a whole number of stages per rank from 1 on is needed")
    return Spec(text, name, per_rank, settings)


def _per(costs: Costs | LayerCosts | RunCosts | None, wish: str | None) -> str:
    """What costs are of. Those of layers say so, and cannot be taken for another's."""
    source: str | None = getattr(costs, "source", None)
    if source and wish:
        raise ConfigError(f"--per {wish}: {OF_LAYERS}")
    return source or wish or "rank"


def _cut(given: Mapping[str, Any], costs: Costs | LayerCosts | RunCosts | None) -> Cut:
    from zeropipe.sim.costs import Costs
    from zeropipe.sim.layer_costs import LayerCosts

    cut = Cut.of(given)
    if costs is None or isinstance(costs, Costs):
        cut.require_nothing_said("only costs of layers know what it changes: give --costs, made by estimate or profile")
    elif not isinstance(costs, LayerCosts):
        cut.require_nothing_said("the training file says that: change it there, or give --costs")
    return cut


def _load_costs(path: str | None) -> Costs | LayerCosts | None:
    from zeropipe.sim.fit import load_costs

    return load_costs(path) if path else None


def _flags(given: Mapping[str, Any]) -> dict[str, Any]:
    """The single costs of a command line, read and in bounds."""
    from zeropipe.core.limits import require_costs

    flags: dict[str, Any] = {}
    for name, (kind, _) in COSTS.items():
        value = given.get(name)
        if value is not None:
            flags[name] = numbers("--" + name.replace("_", "-"), value) if kind is str else value
    require_costs(flags)
    return flags


def overridden(costs: Costs, flags: Mapping[str, Any]) -> Costs:
    """`costs` with single ones exchanged."""
    inter = costs.inter_node._replace(**{name: flags[f"inter_{name}"] for name in LINK if f"inter_{name}" in flags})
    others = {name: value for name, value in flags.items() if not name.startswith("inter_")}
    for name in LINK:
        if f"inter_{name}" in flags and others.get("node_size", costs.node_size) is None:
            raise ConfigError(f"--inter-{name} is of links between machines: say how many ranks one has, --node-size N")
    made = replace(costs, inter_node=inter, **others)
    for name in ("bandwidth", "inter_bandwidth"):
        if name in flags and made.message == 0:
            flag = "--" + name.replace("_", "-")
            raise ConfigError(f"{flag} {flags[name]:g} changes nothing while messages have no size: give --message N")
    require_unit("--memory-limit", made.memory_limit, made)
    return made


def require_unit(flag: str, limit: float | None, costs: Costs) -> None:
    """ConfigError for a limit in bytes where memory is counted in something else."""
    is_plain = not costs.memory_unit and costs.activation == 1 and costs.weights == 0
    if isinstance(limit, Bytes) and (is_plain or costs.memory_unit not in ("", "B")):
        counted = f"in {costs.memory_unit!r}" if costs.memory_unit else "in activations"
        raise ConfigError(f"{flag} is in bytes, memory of these costs {counted}: give a limit in that, like 8")


def _one(sizes: tuple[int, ...]) -> int | None:
    return sizes[0] if sizes else None
