"""A command line as one value: schedules, sizes and costs, from arguments, options and a .toml file."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, NamedTuple

from zeropipe.cli.cost_source import CostSource, PlainCosts, create_source
from zeropipe.cli.job_file import JobFile, read_job_file
from zeropipe.cli.layer_options import LayerOptions
from zeropipe.cli.options import COSTS, flag_of, parse_pairs
from zeropipe.cli.param_types import parse_numbers
from zeropipe.core.files import SCHEDULE_SUFFIXES, has_suffix
from zeropipe.errors import ConfigError, short

if TYPE_CHECKING:
    from zeropipe.core.schedule import Schedule
    from zeropipe.core.timeline import Timeline
    from zeropipe.sim.costs import Costs

SIZES = ("ranks", "microbatches", "stages_per_rank")


class Spec(NamedTuple):
    """A schedule as the user names it: `interleaved:v=4:group_size=8` has settings of its own."""

    text: str
    name: str  # of the registry, path/to/mine.py:name, or a file
    stages_per_rank: int | None = None
    options: Mapping[str, Any] = {}

    @property
    def is_file(self) -> bool:
        return has_suffix(self.name, *SCHEDULE_SUFFIXES)


class PricedSchedule(NamedTuple):
    """A schedule and the costs of its stages."""

    schedule: Schedule
    costs: Costs
    source: CostSource
    recording: Timeline | None  # the recorded timeline itself, if nothing else is requested
    layers: tuple[int, ...] | None  # of each stage, if the command line cuts a model

    def simulate(self) -> Timeline:
        from zeropipe.sim.simulate import simulate

        return simulate(self.schedule, self.costs)

    def describe_costs(self) -> str:
        return self.source.describe(self.layers)


@dataclass(frozen=True)
class Request:
    """Schedules, sizes and costs. A command for one schedule has at most one of each size."""

    specs: tuple[Spec, ...]
    ranks: tuple[int, ...]
    microbatches: tuple[int, ...]
    stages_per_rank: tuple[int, ...]
    options: Mapping[str, Any]
    weight_parts: int | None
    offload: str | float | None
    checkpointing: bool
    overlaps: bool
    source: CostSource
    has_costs_file: bool
    flags: Mapping[str, Any]  # single costs
    run: Mapping[str, Any]  # options of `zeropipe run` in the .toml file

    def load(self, spec: Spec) -> Schedule | Timeline:
        """A schedule at the request's one size, or a recorded timeline."""
        ranks, microbatches, per_rank = (next(iter(getattr(self, name)), None) for name in SIZES)
        return load(spec, ranks, microbatches, per_rank, self.options)

    def load_schedule(self, spec: Spec) -> Schedule:
        """A schedule without its costs, unless they change it."""
        from zeropipe.core.timeline import Timeline

        if self._changes_schedule:
            return self.price(spec).schedule
        found = self.load(spec)
        return found.schedule if isinstance(found, Timeline) else found

    def price(self, spec: Spec | None = None) -> PricedSchedule:
        """A schedule (by default the first one) with the costs of its stages, changed as requested by these."""
        from zeropipe.core.timeline import Timeline
        from zeropipe.sim.checkpointing import with_checkpointing
        from zeropipe.sim.fit import fit
        from zeropipe.sim.offload import with_offload
        from zeropipe.sim.overlaps import with_overlaps

        found = self.load(spec or self.specs[0])
        recording = found if isinstance(found, Timeline) else None
        schedule = found.schedule if isinstance(found, Timeline) else found
        source = self.source
        if recording is not None and not self.has_costs_file:
            assert isinstance(source, PlainCosts)
            source = replace(source, costs=fit(recording), is_recorded=True)
        costs = source.stage_costs(schedule.problem, schedule.placement, schedule, self.checkpointing)
        if self.weight_parts:
            schedule = self._divide_weights(schedule, costs)
        if self.overlaps:
            schedule = with_overlaps(schedule, costs)
        if self.offload is not None:
            schedule = with_offload(schedule, costs, self.offload)
        if self.checkpointing:
            if costs.memory_limit is None:
                raise ConfigError("checkpointing=fit without a limit to keep: pass --memory-limit")
            schedule = with_checkpointing(schedule, costs)
        layers = source.count_layers(schedule.problem, schedule.placement)
        return PricedSchedule(schedule, costs, source, recording if self._is_bare else None, layers)

    @property
    def _is_bare(self) -> bool:
        """Whether the command line has no sizes and costs."""
        sizes = any(getattr(self, name) for name in SIZES)
        return not (sizes or self.options or self.has_costs_file or self.flags or self._changes_schedule)

    @property
    def _changes_schedule(self) -> bool:
        """Whether the command line changes schedules by their costs."""
        return bool(self.weight_parts or self.overlaps or self.checkpointing or self.offload is not None)

    def _divide_weights(self, schedule: Schedule, costs: Costs) -> Schedule:
        from zeropipe.core.limits import COMMAND_LINE, has_weight_gradients, num_actions_with_parts
        from zeropipe.sim.fill import fill_gaps

        parts = self.weight_parts
        assert parts is not None
        COMMAND_LINE.require_actions(num_actions_with_parts(schedule, parts), schedule.name, parts)
        if not has_weight_gradients(schedule):
            raise ConfigError(
                f"weight_parts={parts}: {schedule.name} has full backwards and no W; leave it out, or use a schedule "
                "with W, like zb-h1"
            )
        return fill_gaps(schedule, costs, weight_parts=parts)


def load(
    spec: Spec, ranks: int | None, microbatches: int | None, stages_per_rank: int | None, options: Mapping[str, Any]
) -> Schedule | Timeline:
    """Load the schedule of a spec, whose own settings override the others."""
    from zeropipe.schedules.user import load_any

    for name in SIZES:
        if name in options or name in spec.options:
            raise ConfigError(f"{name} is a size, not an option: use {flag_of(name)} N")
    per_rank = stages_per_rank if spec.stages_per_rank is None else spec.stages_per_rank
    return load_any(
        spec.name, ranks=ranks, microbatches=microbatches, stages_per_rank=per_rank, **{**options, **spec.options}
    )


def create_request(schedules: Sequence[str], values: Mapping[str, Any], several: Sequence[str] = ()) -> Request:
    """The request of a command's arguments and options. One argument may be a .toml file; options override it.

    `several` are the fields of which the command takes more than one value.
    """
    texts, job, path = _insert_job_file(list(schedules))
    sizes = {name: values.get(name) or getattr(job, name) for name in SIZES}
    for name, found in {"schedule": job.schedule, **sizes}.items():
        if len(found) > 1 and name not in several:
            where, listed = ("", ",".join(map(str, found))) if values.get(name) else (f"{path}: ", list(found))
            raise ConfigError(f"{where}{name}={short(listed)}: must be a single one here; compare takes several")
    flags = _parse_flags(values)
    costs = _load_costs(values.get("costs_file")) or job.costs
    return Request(
        tuple(map(parse_spec, texts)),
        sizes["ranks"],
        sizes["microbatches"],
        sizes["stages_per_rank"],
        {**job.options, **parse_pairs(values.get("pairs", ()), "--option"), **_slices(values)},
        values.get("weight_parts") or job.weight_parts,
        _parse_offload(values.get("offload")),
        values.get("checkpointing") is not None,
        bool(values.get("overlaps")),
        create_source(costs, values.get("per") or job.per, LayerOptions.from_values(values), flags),
        costs is not None,
        flags,
        job.run,
    )


def _slices(values: Mapping[str, Any]) -> dict[str, int]:
    """The option of the schedules that --slices sets."""
    numbers = values.get("slices") or ()
    if len(numbers) > 1:
        raise ConfigError(
            f"slices={','.join(map(str, numbers))}: must be a single number here; plan and search take several"
        )
    return {"slices": numbers[0]} if numbers else {}


def _insert_job_file(texts: list[str]) -> tuple[list[str], JobFile, str]:
    """Replace a .toml file among the schedules by the schedules that it names."""
    files = [text for text in texts if has_suffix(text, ".toml")]
    if not files:
        return texts, JobFile(), ""
    if len(files) > 1:
        raise ConfigError(f"{files[1]}: {files[0]} has schedules, sizes and costs already; use one such file")
    job = read_job_file(files[0])
    if not job.schedule and len(texts) == 1:
        raise ConfigError(f'{files[0]}: schedule is missing: write a line like schedule = "zbv"')
    index = texts.index(files[0])
    return [*texts[:index], *job.schedule, *texts[index + 1 :]], job, files[0]


def parse_spec(text: str) -> Spec:
    """Parse `interleaved:v=4`."""
    parts = text.split(":")
    while len(parts) > 1 and "=" in parts[-1]:
        parts.pop()
    name = ":".join(parts)
    settings = parse_pairs(tuple(text.split(":")[len(parts) :]), f"{short(name)}:")
    if settings and has_suffix(name, *SCHEDULE_SUFFIXES):
        raise ConfigError(f"{text}: {name} is a complete schedule and has no settings")
    if {"v", "stages_per_rank"} <= settings.keys():
        raise ConfigError(f"{text}: v and stages_per_rank are the same; use one of them")
    v = settings.pop("v", None)
    per_rank = settings.pop("stages_per_rank", v)
    if per_rank is not None and (type(per_rank) is not int or per_rank < 1):
        raise ConfigError(f"{text}: v={per_rank}: must be a positive integer, the stages per rank")
    return Spec(text, name, per_rank, settings)


def _parse_offload(value: str | None) -> str | float | None:
    from zeropipe.sim.offload import parse_offload

    return None if value is None else parse_offload(value)


def _load_costs(path: str | None) -> Any:
    from zeropipe.sim.costs_file import load_costs

    return load_costs(path) if path else None


def _parse_flags(values: Mapping[str, Any]) -> dict[str, Any]:
    """The single costs of a command line, within bounds."""
    from zeropipe.core.limits import require_costs

    flags: dict[str, Any] = {}
    for name, (kind, _) in COSTS.items():
        value = values.get(name)
        if value is not None:
            flags[name] = parse_numbers(flag_of(name), value) if kind is str else value
    require_costs(flags)
    return flags
