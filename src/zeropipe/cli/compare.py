"""`compare`: several schedules of one model side by side, at one size or at several."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from itertools import product
from typing import TYPE_CHECKING, Any, NamedTuple

import click

from zeropipe.cli import options as opt
from zeropipe.cli import output
from zeropipe.cli.progress import progress
from zeropipe.core.units import count_text
from zeropipe.errors import ConfigError, ScheduleError

if TYPE_CHECKING:
    from zeropipe.cli.request import Request, Spec
    from zeropipe.core.ranking import Standing
    from zeropipe.core.timeline import Timeline
    from zeropipe.schedules.registry import Entry


@click.command(short_help="Several schedules side by side.")
@click.argument("schedules", nargs=-1, required=True)
@opt.sweep_options
@click.option("-o", "--output", "out", help="Draw them all: x.html .svg .png .pdf, or .json: a Perfetto trace.")
@opt.look_options
@opt.json_option
@opt.cost_options
def compare(schedules: tuple[str, ...], out: str | None, as_json: bool, **given: Any) -> None:
    """Simulate several schedules of one model side by side.

    \b
    zeropipe compare 1f1b zbv dualpipev --ranks 8 --microbatches 32
    zeropipe compare all mine.csv -p 8 -m 32 --memory-limit 10 -o all.html
    zeropipe compare 1f1b interleaved:v=4:group_size=16 -p 8 -m 16,32,64

    `all` stands for every other schedule that can be built. NAME:v=4:OPTION=VALUE is a variant with settings of its
    own. Several numbers of ranks, microbatches or stages per rank are all compared; -v and -O hold for the schedules
    that know them. The star marks the fastest that keeps the memory limit.
    """
    from zeropipe.cli.request import request_of

    looks = opt.looks_of(given)
    if out:
        from zeropipe.viz import check_name

        check_name(out, **looks)
    elif looks:
        raise ConfigError(f"--{next(iter(looks))} is for a picture: give -o FILE")
    request = request_of(schedules, given, several=("schedule", "ranks", "microbatches", "stages_per_rank"))
    result = _compared(request)
    if out:  # before the table: a mistake is all that is printed then
        from zeropipe.viz import draw

        draw(_titled(result.timelines), out, **looks)
    if as_json:
        _print_json(result, request)
    else:
        _print_tables(result, request)
        if out:
            output.print_written(out)


class Wish(NamedTuple):
    """One schedule at one size, to be built."""

    spec: Spec
    ranks: int | None
    microbatches: int | None
    stages_per_rank: int | None
    options: Mapping[str, Any]
    title: str


class Result(NamedTuple):
    """What came of the wishes."""

    timelines: list[Timeline]
    refused: list[tuple[str, str]]  # title and reason
    ignored: dict[str, list[str]]  # -O name -> schedules that do not know it
    timed: list[str]  # files with times of their own, which do not count


def _compared(request: Request) -> Result:
    from zeropipe.cli.request import load
    from zeropipe.core.limits import COMMAND_LINE, num_actions_with_parts
    from zeropipe.core.timeline import Timeline
    from zeropipe.sim.compare import compare as run

    wishes, ignored = _wishes(request)
    named = {spec.name for spec in request.specs}
    several = len(request.ranks) > 1 or len(request.microbatches) > 1
    timelines: list[Timeline] = []
    files: list[str] = []  # of each, "" where it is none
    refused: list[tuple[str, str]] = []
    timed: list[str] = []
    total = 0
    with progress(len(wishes)) as begin:
        for wish in wishes:
            begin(wish.title)
            try:
                found = load(wish.spec, wish.ranks, wish.microbatches, wish.stages_per_rank, wish.options)
                schedule = found.schedule if isinstance(found, Timeline) else found
                costs = request.costs_of(schedule.problem, schedule.placement)
            except (ConfigError, ScheduleError) as error:
                if wish.spec.is_file or (wish.spec.name in named and not several):
                    raise
                title = wish.title
                if several and wish.ranks and wish.microbatches:
                    title += f" at {_size_text((wish.ranks, wish.microbatches))}"
                refused.append((title, str(error)))
                continue
            if isinstance(found, Timeline) and request.file_costs is None:
                timed.append(wish.spec.name)
            total += num_actions_with_parts(schedule, request.weight_parts or 1)
            COMMAND_LINE.require_actions(total, "this comparison", request.weight_parts or 1)
            try:
                (made,) = run([schedule], costs, weight_parts=request.weight_parts, per="stage")
            except ScheduleError as error:
                if wish.spec.is_file or wish.spec.name in named:
                    raise ScheduleError(f"{wish.title}: {error}") from None
                refused.append((wish.title, str(error)))
                continue
            timelines.append(made if wish.title in (schedule.name, wish.spec.name) else made.with_label(wish.title))
            files.append(wish.spec.name if wish.spec.is_file else "")
    if not timelines:
        raise ConfigError(f"none of the schedules can be built: {refused[0][0]}: {refused[0][1]}")
    return Result(_told_apart(timelines, files), refused, ignored, timed)


def _told_apart(timelines: list[Timeline], files: list[str]) -> list[Timeline]:
    """Files whose schedules have a name that is there twice go by their paths."""
    counts = Counter(timeline.title for timeline in timelines)
    return [
        timeline.with_label(file) if file and counts[timeline.title] > 1 else timeline
        for timeline, file in zip(timelines, files, strict=True)
    ]


def _wishes(request: Request) -> tuple[list[Wish], dict[str, list[str]]]:
    """Every schedule at every size, in the order of the command line; and who does not know which option."""
    from zeropipe.schedules.user import entry_of

    specs = _without_all(request.specs)
    entries = {spec.name: entry_of(spec.name) for spec in specs if not spec.is_file}
    ignored = {}
    for option in request.options:
        ignored[option] = [entry.name for entry in entries.values() if option not in entry.options]
        if len(ignored[option]) == len(entries):
            raise ConfigError(f"--option {option}: none of the schedules compared has an option of that name")
    sizes = list(product(request.ranks or (None,), request.microbatches or (None,)))
    wishes = []
    for n, (ranks, microbatches) in enumerate(sizes):
        for spec in specs:
            if spec.is_file:  # it has one size of its own
                if n == 0:
                    asked = (ranks, microbatches) if len(sizes) == 1 else (None, None)
                    wishes.append(Wish(spec, *asked, None, {}, spec.name))
                continue
            entry = entries[spec.name]
            title = entry.name + spec.text[len(spec.name) :]
            options = {name: value for name, value in request.options.items() if name in entry.options}
            stages = _stages(spec, entry, request.stages_per_rank)
            for count in stages:
                full = f"{title}:v={count}" if len(stages) > 1 else title
                wishes.append(Wish(spec, ranks, microbatches, count, options, full))
    return wishes, ignored


def _without_all(specs: tuple[Spec, ...]) -> list[Spec]:
    """What is named, and in place of `all` every other schedule there is."""
    from zeropipe.cli.request import spec_of
    from zeropipe.schedules.registry import find, names

    listed = list(specs)
    place = next((n for n, spec in enumerate(specs) if spec.text == "all"), None)
    if place is not None:
        own = [spec for spec in specs if spec.text != "all"]
        known = {find(spec.name).name for spec in own if not spec.is_file and ".py:" not in spec.name}
        listed = own
        listed[place:place] = [spec_of(name) for name in names() if name not in known]
    return listed


def _stages(spec: Spec, entry: Entry, wished: tuple[int, ...]) -> tuple[int | None, ...]:
    """The numbers of stages per rank: the variant's own, else those wished for that it can have, else its default."""
    if spec.stages_per_rank is not None:
        return (spec.stages_per_rank,)
    return tuple(count for count in wished if count in entry.stages_per_rank) or (None,)


def _titled(timelines: list[Timeline]) -> list[Timeline]:
    """For a picture: those of several sizes say theirs."""
    sizes = {_size(t) for t in timelines}
    if len(sizes) == 1:
        return timelines
    return [t.with_label(f"{t.title}, {_size_text(_size(t))}") for t in timelines]


def _size(timeline: Timeline) -> tuple[int, int]:
    return timeline.num_ranks, timeline.schedule.num_microbatches


def _size_text(size: tuple[int, int]) -> str:
    return f"{count_text(size[0], 'rank')}, {count_text(size[1], 'microbatch')}"


def _print_json(result: Result, request: Request) -> None:
    from zeropipe.core.ranking import rank_timelines

    found = rank_timelines(result.timelines)
    output.print_json({
        "compared": [
            {
                **output.summary(t), **standing._asdict(),
                "layers": request.layers_of(t.schedule.problem, t.schedule.placement),
            }
            for t, standing in zip(result.timelines, found.standings, strict=True)
        ],
        "refused": [{"schedule": name, "reason": reason} for name, reason in result.refused],
        "ignored_options": result.ignored,
        "costs_per": request.per,
    })  # fmt: skip


def _print_tables(result: Result, request: Request) -> None:
    """A table per size: what has another number of ranks or microbatches does other work."""
    from zeropipe.core.limits import has_weight_gradients
    from zeropipe.core.ranking import rank_timelines

    standings = rank_timelines(result.timelines).standings
    groups: dict[tuple[int, int], list[tuple[Timeline, Standing]]] = {}
    for t, standing in zip(result.timelines, standings, strict=True):
        groups.setdefault(_size(t), []).append((t, standing))
    for size, rows in groups.items():
        _print_table(f"{_size_text(size)}; {output.costs_text(request.per, request.cut_text())}", rows)
    for option, names in result.ignored.items():
        if names:
            output.note(f"--option {option} is unknown to {', '.join(names)}: left as they are")
    if request.weight_parts:
        names = [t.title for t in result.timelines if not has_weight_gradients(t.schedule)]
        if names:
            output.note(f"no W, so none in parts: {', '.join(dict.fromkeys(names))}")
    for name, reason in result.refused:
        output.note(f"left out: {name}: {reason}")
    for name in result.timed:
        output.note(f"times in {name} do not count here: --costs {name} compares all by them")


def _print_table(heading: str, rows: list[tuple[Timeline, Standing]]) -> None:
    from rich.markup import escape

    console = output.console()
    console.print(heading, style="bold", markup=False)
    lines = output.table(
        "schedule", "stages", "makespan", "of\nbest", "bubble", "to\nideal", "peak\nmemory", left=("schedule",)
    )
    for t, standing in rows:
        peak = output.size_text(max(t.peak_memory), t.memory_unit)
        lines.add_row(
            f"[bold green]{escape(t.title)} ★[/]" if standing.best_time else escape(t.title),
            str(t.schedule.num_stages),
            output.time_text(t.makespan, t.unit),
            f"{standing.of_best:.3f}",
            output.percent(t.bubble),
            output.percent(t.bubble_to_ideal),
            f"[red]{peak} over[/]" if not standing.fits
            else f"[bold green]{peak} ★[/]" if standing.best_memory else peak,
        )  # fmt: skip
    console.print(output.fitted(lines, console))
    for text, titles in _notes(rows).items():
        output.note(f"{text}: {', '.join(titles)}")


def _notes(rows: list[tuple[Timeline, Standing]]) -> dict[str, list[str]]:
    """What is to be known about some of them, and about whom."""
    from zeropipe.schedules.advice import advice

    notes: dict[str, list[str]] = {}
    for t, _ in rows:
        if t.schedule.problem.num_weight_parts > 1:
            notes.setdefault(f"W in {t.schedule.problem.num_weight_parts} parts", []).append(t.title)
        if len(t.schedule.placement.copies) > 1:
            notes.setdefault("two copies of the weights", []).append(t.title)
        if advice(t.schedule):
            notes.setdefault("warning: fewer microbatches than stages, so ranks may be idle", []).append(t.title)
    first = rows[0][0]
    if first.memory_limit is not None and not any(standing.fits for _, standing in rows):
        least = min(rows, key=lambda row: max(row[0].peak_memory))[0]
        limit, peak = (output.size_text(x, first.memory_unit) for x in (first.memory_limit, max(least.peak_memory)))
        notes[f"none keeps the memory limit {limit}, so none wins; {peak} would be enough for"] = [least.title]
    return notes
