"""From a request to timelines and figures. Plain functions; nothing here is built before its size is known."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, NamedTuple

from zeropipe.app.errors import Refusal, cost_field
from zeropipe.app.models import Ask, Choice, CostsIn, Per, Size
from zeropipe.app.uploads import Files, Found
from zeropipe.core.explain import Idle, idle
from zeropipe.core.limits import PAGE, num_actions, num_cut, require_costs
from zeropipe.core.schedule import Schedule
from zeropipe.core.timeline import Timeline
from zeropipe.errors import ConfigError, ScheduleError
from zeropipe.schedules.advice import advice
from zeropipe.schedules.registry import Entry, build_entry, entries, find
from zeropipe.sim.compare import compare, ranking
from zeropipe.sim.costs import Costs, costs_from

Options = tuple[tuple[str, bool | int | float | str], ...]
FILLING = 7  # about as many simulations as `fill_gaps` takes


def costs_of(given: CostsIn) -> Costs:
    """The request's costs; a Refusal names the field."""
    data = given.model_dump()
    try:
        require_costs(data)
        return costs_from(data)
    except ConfigError as error:
        raise Refusal((cost_field(str(error)), str(error))) from None


class Shown(NamedTuple):
    """A choice, by its number, and what is drawn of it: simulated, or as it was recorded."""

    choice: int
    timeline: Timeline
    recorded: bool
    filled: bool  # by `fill_gaps`


def timelines_of(ask: Ask, files: Files) -> tuple[list[Shown], list[tuple[str, str]]]:
    """What can be shown, and what is wrong with the other choices. A Refusal if nothing is left."""
    costs = costs_of(ask.costs)
    planned = plans_of(ask, files)
    done, refused = [], []
    for n, (plan, title) in enumerate(zip(planned, _titles(planned), strict=True)):
        try:
            timeline = _timeline(plan, costs, ask.per).labelled(title)
            done.append(Shown(n, timeline, isinstance(plan.found, Timeline), plan.parts is not None))
        except (ConfigError, ScheduleError) as error:
            refused.append((f"schedules.{n}", str(error)))
    if not done:
        raise Refusal(*{_field_of(message, field): message for field, message in refused}.items())
    return done, refused


@dataclass(frozen=True)
class Plan:
    """What will be built for a choice: an entry at a size, or a file's schedule or timeline."""

    title: str
    whole: int = 0  # actions, every W being one
    count: int = 0  # actions, W in parts
    parts: int | None = None  # for `fill_gaps`; None leaves the schedule as it is
    found: Schedule | Timeline | None = None
    entry: Entry | None = None
    size: tuple[int, int, int] = (0, 0, 0)  # ranks, microbatches, stages per rank
    options: Options = ()
    error: str = ""


def plans_of(ask: Ask, files: Files) -> list[Plan]:
    """A plan per choice; a Refusal for more than the page takes."""
    plans = [_plan(n, choice, ask, files) for n, choice in enumerate(ask.schedules)]
    _require_total(plans, ask.weight_parts)
    return plans


def effort_of(plans: Sequence[Plan]) -> int:
    """How much work the plans are, in actions: filling gaps simulates a schedule several times."""
    return sum(plan.count * (FILLING if plan.parts else 1) for plan in plans)


def _plan(n: int, choice: Choice, size: Size, files: Files) -> Plan:
    if (choice.name is None) == (choice.file is None):
        raise Refusal((f"schedules.{n}", "a schedule is chosen by its name, or by its file: give one of the two"))
    if choice.file is not None:
        found: Found | None = files.get(choice.file)
        if found is None:
            raise Refusal((f"schedules.{n}.file", f"the file {choice.file!r} is not here any more: drop it again"))
        if isinstance(found, Timeline) and choice.simulate:
            found = found.schedule
        name = found.title if isinstance(found, Timeline) else found.name
        schedule = found.schedule if isinstance(found, Timeline) else found
        parts = size.weight_parts
        if isinstance(found, Timeline) or schedule.problem.num_weight_parts > 1:
            parts = None  # recorded, or filled by its maker
        return Plan(name, schedule.num_actions, num_cut(schedule, parts or 1), parts, found)
    assert choice.name is not None
    try:
        return plan_entry(find(choice.name), size, choice)
    except ConfigError as error:
        return Plan(choice.name, error=str(error))


def plan_entry(entry: Entry, size: Size, choice: Choice | None = None) -> Plan:
    """A registered schedule at a size. The size's stages per rank are a wish, the choice's own a demand."""
    per_rank = choice.stages_per_rank if choice else None
    if per_rank is None:
        wish = size.stages_per_rank
        per_rank = wish if wish in entry.stages_per_rank else entry.stages_per_rank[0]
    elif per_rank not in entry.stages_per_rank:
        build_entry(entry, ranks=1, microbatches=1, stages_per_rank=per_rank)  # raises, in its own words
    sizes, split = (size.ranks, size.microbatches, per_rank), entry.splits_backward
    return Plan(
        entry.name, num_actions(split, *sizes), num_actions(split, *sizes, size.weight_parts or 1), size.weight_parts,
        entry=entry, size=sizes,
        options=tuple(sorted(choice.options.items())) if choice else (),
    )  # fmt: skip


def _require_total(plans: Sequence[Plan], parts: int | None) -> None:
    """Refuse before building, beside the number that makes the request large."""
    names = ", ".join(plan.title for plan in plans if plan.count)
    field = "microbatches"
    try:
        PAGE.require_actions(sum(plan.whole for plan in plans), names)
        field = "weight_parts"
        PAGE.require_actions(sum(plan.count for plan in plans), names, parts or 1)
    except ConfigError as error:
        raise Refusal((field, str(error))) from None


def _timeline(plan: Plan, costs: Costs, per: Per) -> Timeline:
    if plan.error:
        raise ConfigError(plan.error)
    if isinstance(plan.found, Timeline):
        return plan.found
    schedule = plan.found or built(plan.entry, *plan.size, plan.options)
    if plan.parts:  # once more: a user's schedule may have W without saying so in its entry
        PAGE.require_actions(num_cut(schedule, plan.parts), plan.title, plan.parts)
    return compare([schedule], costs, weight_parts=plan.parts, per=per)[0]


@lru_cache(maxsize=128)
def _small(entry: Entry, ranks: int, microbatches: int, per_rank: int, options: Options) -> Schedule:
    return _build(entry, ranks, microbatches, per_rank, options)


def built(entry: Entry | None, ranks: int, microbatches: int, per_rank: int, options: Options) -> Schedule:
    """The schedule, from memory if it is small and was asked for before."""
    assert entry is not None
    small = num_actions(entry.splits_backward, ranks, microbatches, per_rank) <= 50_000
    return (_small if small else _build)(entry, ranks, microbatches, per_rank, options)


def _build(entry: Entry, ranks: int, microbatches: int, per_rank: int, options: Options) -> Schedule:
    try:
        return build_entry(
            entry, ranks=ranks, microbatches=microbatches, stages_per_rank=per_rank, **dict(options)
        )  # fmt: skip
    except ConfigError:
        raise
    except Exception as error:  # a schedule is a plug-in: its failure is its own, and told as such
        given = ", ".join(f"{name}={value!r}" for name, value in options)
        raise ConfigError(f"{entry.name} cannot be built with {given or 'these sizes'}: {error}") from error


def _titles(plans: list[Plan]) -> list[str]:
    """Each one's name, and what tells it from another choice of the same name: at last its number."""
    noted = [(plan.title, _notes(plan, plans)) for plan in plans]
    titles = []
    for n, (title, notes) in enumerate(noted):
        number = noted[: n + 1].count((title, notes))
        notes = [*notes, str(number)] if number > 1 else notes
        titles.append(f"{title} ({', '.join(notes)})" if notes else title)
    return titles


def _notes(plan: Plan, plans: list[Plan]) -> list[str]:
    twins = [other for other in plans if other.title == plan.title]
    if len(twins) == 1:
        return []
    notes = [f"{name}={value}" for name, value in plan.options]
    if plan.entry and len({other.size[2] for other in twins if other.entry}) > 1:
        notes.insert(0, f"{plan.size[2]} per rank")
    if plan.found is not None:
        notes.append("recorded" if isinstance(plan.found, Timeline) else "file, simulated")
    return notes


def _field_of(message: str, default: str) -> str:
    """Costs that do not fit a schedule's stages belong to the costs' field; anything else to the schedule."""
    field = cost_field(message)
    return field if field != "costs" and " entries" in message else default


def results(shown: list[Shown], per: Per) -> list[dict[str, Any]]:
    """The figures of the comparison. Only what does the same work, in the same unit, is held against each other."""
    groups: dict[Any, list[Timeline]] = {}
    for one in shown:
        groups.setdefault(_work_of(one.timeline, per), []).append(one.timeline)
    numbers = {work: n for n, work in enumerate(groups)}
    standings = {work: iter(ranking(timelines).standings) for work, timelines in groups.items()}
    works = [_work_of(one.timeline, per) for one in shown]
    return [{**_figures(one), "group": numbers[work], **next(standings[work])._asdict()}
            for one, work in zip(shown, works, strict=True)]  # fmt: skip


def _work_of(timeline: Timeline, per: Per) -> tuple[Any, ...]:
    """Timelines of which this is equal compete. With costs per stage, more stages are more work."""
    schedule = timeline.schedule
    stages = schedule.num_stages if per == "stage" else 0
    return schedule.num_ranks, schedule.num_microbatches, timeline.unit, stages


def _figures(shown: Shown) -> dict[str, Any]:
    n, t, recorded, filled = shown
    peak = max(t.peak_memory) if t.memory else None
    causes = [sum(column) / t.num_ranks for column in zip(*idle(t), strict=True)]
    return {
        "choice": n, "title": t.title, "schedule": t.schedule.name, "placement": t.schedule.placement.name,
        "measured": t.measured, "recorded": recorded, "num_ranks": t.num_ranks, "num_stages": t.schedule.num_stages,
        "num_microbatches": t.schedule.num_microbatches, "num_actions": t.schedule.num_actions,
        "num_weight_parts": t.schedule.problem.num_weight_parts, "filled": filled,
        "unit": t.unit, "memory_unit": t.memory_unit, "makespan": t.makespan,
        "bubble": t.bubble, "bubble_to_ideal": t.bubble_to_ideal, "busy": sum(t.busy) / t.num_ranks,
        "idle": dict(zip(Idle._fields, causes, strict=True)),
        "peak_memory": peak, "peak_rank": None if peak is None else t.peak_memory.index(peak),
        "over_limit": list(t.over_limit),
        "copies": len(t.schedule.placement.copies),
        "advice": list(advice(t.schedule)),
    }  # fmt: skip


def chart_plans(size: Size) -> list[Plan]:
    """Every schedule at a size; a Refusal for more than the page takes."""
    plans = [plan_entry(entry, size) for entry in entries()]
    total = sum(plan.count for plan in plans)
    try:
        PAGE.require_actions(total, f"all {len(plans)} schedules together", size.weight_parts or 1)
    except ConfigError as error:
        raise Refusal(("chart", str(error))) from None
    return plans


def chart(size: Size) -> dict[str, Any]:
    """Bubble and peak memory of every schedule that can be built at a size."""
    costs = costs_of(size.costs)
    points, refused = [], []
    for plan in chart_plans(size):
        try:
            timeline = _timeline(plan, costs, size.per)
        except (ConfigError, ScheduleError) as error:
            refused.append({"field": plan.title, "message": str(error)})
            continue
        peak = max(timeline.peak_memory)
        points.append({
            "name": plan.title, "stages_per_rank": plan.size[2], "bubble": timeline.bubble, "peak_memory": peak,
            "makespan": timeline.makespan, "over_limit": bool(timeline.over_limit),
        })  # fmt: skip
    fitting = [point for point in points if not point["over_limit"]]
    for point in points:  # what is over the limit beats nothing, and is beaten by all
        point["pareto"] = point in fitting and not any(_dominates(other, point) for other in fitting)
    return {"points": points, "errors": refused, "unit": costs.unit, "memory_unit": costs.memory_unit}


def _dominates(a: dict[str, Any], b: dict[str, Any]) -> bool:
    """No worse in both, and better in one by more than rounding."""
    slack = 1e-9
    time, memory = b["bubble"] - a["bubble"], (b["peak_memory"] - a["peak_memory"]) / (b["peak_memory"] or 1.0)
    return bool(time >= -slack and memory >= -slack and (time > slack or memory > slack))
