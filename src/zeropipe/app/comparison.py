"""From a request to timelines, figures and the chart. A schedule is built only after its size was checked."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, NamedTuple

from zeropipe.app.errors import Refusal, cost_field
from zeropipe.app.models import Choice, CompareRequest, CostFields, Per, SizeRequest
from zeropipe.app.uploads import LoadedFiles
from zeropipe.core.explain import Idle, idle_times
from zeropipe.core.limits import PAGE, num_actions, num_actions_with_parts, require_costs
from zeropipe.core.ranking import rank_timelines
from zeropipe.core.schedule import Schedule
from zeropipe.core.timeline import Timeline
from zeropipe.errors import ConfigError, ScheduleError
from zeropipe.schedules.advice import advice
from zeropipe.schedules.registry import Entry, build_entry, entries, find, slices_of
from zeropipe.sim.compare import compare
from zeropipe.sim.costs import Costs
from zeropipe.sim.costs_file import costs_from_data

Options = tuple[tuple[str, bool | int | float | str], ...]
FILL_SIMULATIONS = 7  # about how often `fill_gaps` simulates a schedule
MAX_CACHED_ACTIONS = 50_000


def create_costs(given: CostFields) -> Costs:
    """The request's costs; Refusal names the field."""
    data = given.model_dump()
    try:
        require_costs(data)
        return costs_from_data(data)
    except ConfigError as error:
        raise Refusal((cost_field(str(error)), str(error))) from None


class ShownTimeline(NamedTuple):
    """The timeline of a choice: simulated, or as it was recorded."""

    choice: int  # index in the request
    timeline: Timeline
    recorded: bool
    filled: bool  # by `fill_gaps`


def build_timelines(request: CompareRequest, files: LoadedFiles) -> tuple[list[ShownTimeline], list[tuple[str, str]]]:
    """Return the timelines, and field and message of the choices that have none; Refusal if no choice has one."""
    costs = create_costs(request.costs)
    choices = resolve_choices(request, files)
    shown, errors = [], []
    for n, (choice, title) in enumerate(zip(choices, _titles(choices), strict=True)):
        try:
            timeline = _simulate(choice, costs, request.per).with_label(title)
            recorded = isinstance(choice.loaded, Timeline)
            shown.append(ShownTimeline(n, timeline, recorded, choice.weight_parts is not None))
        except (ConfigError, ScheduleError) as error:
            errors.append((f"schedules.{n}", str(error)))
    if not shown:
        raise Refusal(*{_field_of(message, field): message for field, message in errors}.items())
    return shown, errors


@dataclass(frozen=True)
class ResolvedChoice:
    """What will be simulated for a choice: a registered schedule at a size, or a file's schedule or timeline."""

    title: str
    num_base_actions: int = 0  # counting every W once
    num_actions: int = 0  # counting the parts of every W
    weight_parts: int | None = None  # for `fill_gaps`; None leaves the schedule as it is
    loaded: Schedule | Timeline | None = None
    entry: Entry | None = None
    size: tuple[int, int, int] = (0, 0, 0)  # ranks, microbatches, stages per rank
    options: Options = ()
    error: str = ""


def resolve_choices(request: CompareRequest, files: LoadedFiles) -> list[ResolvedChoice]:
    """Resolve the request's choices; Refusal for more actions than the page takes."""
    choices = [_resolve(n, choice, request, files) for n, choice in enumerate(request.schedules)]
    names = ", ".join(choice.title for choice in choices if choice.num_actions)
    field = "microbatches"
    try:
        PAGE.require_actions(sum(choice.num_base_actions for choice in choices), names)
        field = "weight_parts"
        PAGE.require_actions(sum(choice.num_actions for choice in choices), names, request.weight_parts or 1)
    except ConfigError as error:
        raise Refusal((field, str(error))) from None
    return choices


def count_work(choices: Sequence[ResolvedChoice]) -> int:
    """The number of actions to simulate: filling gaps simulates a schedule several times."""
    return sum(choice.num_actions * (FILL_SIMULATIONS if choice.weight_parts else 1) for choice in choices)


def _resolve(n: int, choice: Choice, size: SizeRequest, files: LoadedFiles) -> ResolvedChoice:
    if (choice.name is None) == (choice.file is None):
        raise Refusal((f"schedules.{n}", "a schedule is chosen by its name or by its file: use one of the two"))
    if choice.file is not None:
        loaded = files.get(choice.file)
        if loaded is None:
            raise Refusal((f"schedules.{n}.file", f"the file {choice.file!r} is not here any more: drop it again"))
        if isinstance(loaded, Timeline) and choice.simulate:
            loaded = loaded.schedule
        return _resolve_file(loaded, size.weight_parts)
    assert choice.name is not None
    try:
        return _resolve_entry(find(choice.name), size, choice)
    except ConfigError as error:
        return ResolvedChoice(choice.name, error=str(error))


def _resolve_file(loaded: Schedule | Timeline, weight_parts: int | None) -> ResolvedChoice:
    is_timeline = isinstance(loaded, Timeline)
    schedule, title = (loaded.schedule, loaded.title) if isinstance(loaded, Timeline) else (loaded, loaded.name)
    if is_timeline or schedule.problem.num_weight_parts > 1:
        weight_parts = None  # recorded, or filled by its author
    return ResolvedChoice(
        title, schedule.num_actions, num_actions_with_parts(schedule, weight_parts or 1), weight_parts, loaded
    )  # fmt: skip


def _resolve_entry(entry: Entry, size: SizeRequest, choice: Choice | None = None) -> ResolvedChoice:
    """Resolve a registered schedule. It has the size's stages per rank if it can, but must have the choice's own."""
    per_rank = choice.stages_per_rank if choice else None
    if per_rank is None:
        preferred = size.stages_per_rank
        per_rank = preferred if preferred in entry.stages_per_rank else entry.stages_per_rank[0]
    elif per_rank not in entry.stages_per_rank:
        build_entry(entry, ranks=1, microbatches=1, stages_per_rank=per_rank)  # raises the registry's own error
    slices = slices_of(choice.options) if choice else 1
    counted, split = (size.ranks, size.microbatches * slices, per_rank), entry.splits_backward
    return ResolvedChoice(
        entry.name, num_actions(split, *counted), num_actions(split, *counted, size.weight_parts or 1),
        size.weight_parts, entry=entry, size=(size.ranks, size.microbatches, per_rank),
        options=tuple(sorted(choice.options.items())) if choice else (),
    )  # fmt: skip


def _simulate(choice: ResolvedChoice, costs: Costs, per: Per) -> Timeline:
    if choice.error:
        raise ConfigError(choice.error)
    if isinstance(choice.loaded, Timeline):
        return choice.loaded
    schedule = choice.loaded or build_cached(choice.entry, *choice.size, choice.options)
    if choice.weight_parts:  # again: a user's schedule may have W without saying so in its entry
        PAGE.require_actions(num_actions_with_parts(schedule, choice.weight_parts), choice.title, choice.weight_parts)
    return compare([schedule], costs, weight_parts=choice.weight_parts, per=per)[0]


def build_cached(
    entry: Entry | None, ranks: int, microbatches: int, per_rank: int, options: Options
) -> Schedule:  # fmt: skip
    """Build a schedule; small ones are cached."""
    assert entry is not None
    microbatch_slices = microbatches * slices_of(dict(options))
    is_small = num_actions(entry.splits_backward, ranks, microbatch_slices, per_rank) <= MAX_CACHED_ACTIONS
    return (_build_small if is_small else _build)(entry, ranks, microbatches, per_rank, options)


def _build(entry: Entry, ranks: int, microbatches: int, per_rank: int, options: Options) -> Schedule:
    try:
        return build_entry(
            entry, ranks=ranks, microbatches=microbatches, stages_per_rank=per_rank, **dict(options)
        )  # fmt: skip
    except ConfigError:
        raise
    except Exception as error:  # a plug-in's own failure
        given = ", ".join(f"{name}={value!r}" for name, value in options)
        raise ConfigError(f"{entry.name} cannot be built with {given or 'these sizes'}: {error}") from error


_build_small = lru_cache(maxsize=128)(_build)


def _titles(choices: list[ResolvedChoice]) -> list[str]:
    """Each choice's name, with what distinguishes it from others of that name; as a last resort a number."""
    noted = [(choice.title, _notes(choice, choices)) for choice in choices]
    titles = []
    for n, (title, notes) in enumerate(noted):
        number = noted[: n + 1].count((title, notes))
        notes = [*notes, str(number)] if number > 1 else notes
        titles.append(f"{title} ({', '.join(notes)})" if notes else title)
    return titles


def _notes(choice: ResolvedChoice, choices: list[ResolvedChoice]) -> list[str]:
    same = [other for other in choices if other.title == choice.title]
    if len(same) == 1:
        return []
    notes = [f"{name}={value}" for name, value in choice.options]
    if choice.entry and len({other.size[2] for other in same if other.entry}) > 1:
        notes.insert(0, f"{choice.size[2]} per rank")
    if choice.loaded is not None:
        notes.append("recorded" if isinstance(choice.loaded, Timeline) else "file, simulated")
    return notes


def _field_of(message: str, default: str) -> str:
    """The costs' field for costs that do not fit a schedule's stages, else the schedule's."""
    field = cost_field(message)
    return field if field != "costs" and " entries" in message else default


def compare_figures(shown: list[ShownTimeline], per: Per) -> list[dict[str, Any]]:
    """The figures of each timeline, ranked within its group of comparable ones."""
    keys = [_group_key(one.timeline, per) for one in shown]
    groups = list(dict.fromkeys(keys))
    standings = {}
    for key in groups:
        members = [one.timeline for one, other in zip(shown, keys, strict=True) if other == key]
        standings[key] = iter(rank_timelines(members).standings)
    return [{**_figures(one), "group": groups.index(key), **next(standings[key])._asdict()}
            for one, key in zip(shown, keys, strict=True)]  # fmt: skip


def _group_key(timeline: Timeline, per: Per) -> tuple[Any, ...]:
    """Timelines with the same key are compared. With costs per stage, more stages are more work."""
    schedule = timeline.schedule
    stages = schedule.num_stages if per == "stage" else 0
    return schedule.num_ranks, schedule.num_microbatches, timeline.unit, stages


def _figures(shown: ShownTimeline) -> dict[str, Any]:
    n, t, recorded, filled = shown
    peak = max(t.peak_memory) if t.memory else None
    causes = [sum(column) / t.num_ranks for column in zip(*idle_times(t), strict=True)]
    return {
        "choice": n, "title": t.title, "schedule": t.schedule.name, "placement": t.schedule.placement.name,
        "measured": t.measured, "recorded": recorded, "num_ranks": t.num_ranks, "num_stages": t.schedule.num_stages,
        "num_microbatches": t.schedule.num_microbatches, "num_actions": t.schedule.num_actions,
        "num_weight_parts": t.schedule.problem.num_weight_parts, "filled": filled,
        "unit": t.unit, "memory_unit": t.memory_unit, "makespan": t.makespan,
        "idle_fraction": t.idle_fraction, "bubble": t.bubble, "bubble_to_ideal": t.bubble_to_ideal,
        "busy": sum(t.busy) / t.num_ranks,
        "idle": dict(zip(Idle._fields, causes, strict=True)),
        "peak_memory": peak, "peak_rank": None if peak is None else t.peak_memory.index(peak),
        "over_limit": list(t.over_limit),
        "copies": len(t.schedule.placement.copies),
        "advice": list(advice(t.schedule)),
    }  # fmt: skip


def resolve_chart(size: SizeRequest) -> list[ResolvedChoice]:
    """Resolve every registered schedule at a size; Refusal for more actions than the page takes."""
    choices = [_resolve_entry(entry, size) for entry in entries()]
    total = sum(choice.num_actions for choice in choices)
    try:
        PAGE.require_actions(total, f"all {len(choices)} schedules together", size.weight_parts or 1)
    except ConfigError as error:
        raise Refusal(("chart", str(error))) from None
    return choices


def chart_data(size: SizeRequest) -> dict[str, Any]:
    """Idle time and peak memory of every schedule that can be built at a size."""
    costs = create_costs(size.costs)
    points, errors = [], []
    for choice in resolve_chart(size):
        try:
            timeline = _simulate(choice, costs, size.per)
        except (ConfigError, ScheduleError) as error:
            errors.append({"field": choice.title, "message": str(error)})
            continue
        peak = max(timeline.peak_memory)
        points.append({
            "name": choice.title, "stages_per_rank": choice.size[2], "idle_fraction": timeline.idle_fraction,
            "bubble": timeline.bubble, "peak_memory": peak, "makespan": timeline.makespan,
            "over_limit": bool(timeline.over_limit),
        })  # fmt: skip
    fitting = [point for point in points if not point["over_limit"]]
    for point in points:  # a point over the memory limit dominates none and is never on the front
        point["pareto"] = point in fitting and not any(_dominates(other, point) for other in fitting)
    return {"points": points, "errors": errors, "unit": costs.unit, "memory_unit": costs.memory_unit}


def _dominates(a: dict[str, Any], b: dict[str, Any]) -> bool:
    """Whether `a` is no worse in both figures, and better in one by more than rounding."""
    tolerance = 1e-9
    time, memory = (
        b["idle_fraction"] - a["idle_fraction"],
        (b["peak_memory"] - a["peak_memory"]) / (b["peak_memory"] or 1.0),
    )
    return bool(time >= -tolerance and memory >= -tolerance and (time > tolerance or memory > tolerance))
