"""`compare`: several schedules side by side, at one size or at several."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from itertools import product
from typing import TYPE_CHECKING, Any, NamedTuple

import click

from zeropipe.cli import options as opt
from zeropipe.cli import output
from zeropipe.cli.compare_grid import NUMBERS, print_grid, size_of
from zeropipe.cli.progress import show_steps
from zeropipe.core.units import count_text
from zeropipe.errors import ConfigError, ScheduleError

if TYPE_CHECKING:
    from zeropipe.cli.request import Request, Spec
    from zeropipe.core.ranking import Standing
    from zeropipe.core.timeline import Timeline
    from zeropipe.schedules.registry import Entry


@opt.command(short_help="Several schedules side by side.")
@click.argument("schedules", nargs=-1, required=True)
@opt.output()
@opt.option(
    "--grid",
    type=click.Choice(list(NUMBERS)),
    help="Print this number of all schedules and sizes in one table, instead of a table for each size.",
)
@opt.json
@opt.size
@opt.looks
@opt.costs
def compare(schedules: tuple[str, ...], out: str | None, grid: str | None, as_json: bool, **values: Any) -> None:
    """Simulate several schedules side by side.

    \b
    zeropipe compare 1f1b zbv dualpipev --ranks 8 --microbatches 32
    zeropipe compare all mine.csv -p 8 -m 32 --memory-limit 10 -o all.html
    zeropipe compare 1f1b interleaved:v=4:group_size=16 -p 8 -m 16,32,64
    zeropipe compare 1f1b zb-h1 zbv -p 4,8 -m 16,32,64 --grid idle

    `all` is every other schedule that can be built. NAME:v=4:OPTION=VALUE is a variant with its own settings. With
    several ranks, microbatches or stages per rank, all combinations are compared; -v and -O apply to the schedules that
    have them. The star marks the fastest schedule within the memory limit. -o draws all: .html, .svg, .png, .pdf, or
    .json, a Perfetto trace.
    """
    from zeropipe.cli.request import SIZES, create_request

    looks = opt.take_looks(values)
    if out:
        from zeropipe.viz import check_name

        check_name(out, **looks)
    elif looks:
        raise ConfigError(f"--{next(iter(looks))} is for a picture: pass -o FILE")
    request = create_request(schedules, values, several=("schedule", *SIZES))
    comparison = _compare(request)
    if out:  # before the table, so that an error is all that is printed
        from zeropipe.viz import draw

        draw(_label_sizes(comparison.timelines), out, **looks)
    if as_json:
        _print_json(comparison, request)
    else:
        _print_tables(comparison, request, grid)
        if out:
            output.print_written(out)


class Variant(NamedTuple):
    """One schedule at one size, to be built."""

    spec: Spec
    ranks: int | None
    microbatches: int | None
    stages_per_rank: int | None
    options: Mapping[str, Any]
    title: str


class Comparison(NamedTuple):
    """The simulated variants, and notes about the others."""

    timelines: list[Timeline]
    refused: list[tuple[str, str]]  # title and reason
    ignored: dict[str, list[str]]  # --option name -> schedules that do not have it
    recorded: list[str]  # files whose recorded times are not used
    own_sizes: dict[str, tuple[int, int]]  # of files that have another size than those asked for


def _compare(request: Request) -> Comparison:
    from zeropipe.cli.request import load
    from zeropipe.core.limits import COMMAND_LINE, num_actions_with_parts
    from zeropipe.core.timeline import Timeline
    from zeropipe.sim.compare import compare as simulate_all

    variants, ignored = _list_variants(request)
    named = {spec.name for spec in request.specs}
    has_sizes = len(request.ranks) > 1 or len(request.microbatches) > 1
    parts = request.weight_parts or 1
    timelines: list[Timeline] = []
    files: list[str] = []  # of each timeline; "" if it has none
    refused: list[tuple[str, str]] = []
    recorded: list[str] = []
    own_sizes: dict[str, tuple[int, int]] = {}
    total = 0
    with show_steps(len(variants)) as begin:
        for variant in variants:
            begin(variant.title)
            spec, title = variant.spec, variant.title
            try:
                found = load(spec, *variant[1:5])
                schedule = found.schedule if isinstance(found, Timeline) else found
                costs = request.source.stage_costs(schedule.problem, schedule.placement, schedule)
            except (ConfigError, ScheduleError) as error:
                if spec.is_file or (spec.name in named and not has_sizes):
                    raise
                if has_sizes and variant.ranks and variant.microbatches:
                    title += f" at {_size_text((variant.ranks, variant.microbatches))}"
                if (title, str(error)) not in refused:
                    refused.append((title, str(error)))
                continue
            if isinstance(found, Timeline) and not request.has_costs_file:
                recorded.append(spec.name)
            total += num_actions_with_parts(schedule, parts)
            COMMAND_LINE.require_actions(total, "this comparison", parts)
            try:
                (timeline,) = simulate_all([schedule], costs, weight_parts=request.weight_parts, per="stage")
            except ScheduleError as error:
                if spec.is_file or spec.name in named:
                    raise ScheduleError(f"{title}: {error}") from None
                refused.append((title, str(error)))
                continue
            size = size_of(timeline)
            is_asked = all(own in asked for own, asked in zip(size, (request.ranks, request.microbatches)) if asked)
            if spec.is_file and has_sizes and not is_asked:
                own_sizes[spec.name] = size
            timelines.append(timeline if title in (schedule.name, spec.name) else timeline.with_label(title))
            files.append(spec.name if spec.is_file else "")
    if not timelines:
        raise ConfigError(f"none of the schedules can be built: {refused[0][0]}: {refused[0][1]}")
    return Comparison(_label_files(timelines, files), refused, ignored, recorded, own_sizes)


def _label_files(timelines: list[Timeline], files: list[str]) -> list[Timeline]:
    """Label timelines of files by their paths, where several have the same title."""
    counts = Counter(timeline.title for timeline in timelines)
    return [
        timeline.with_label(file) if file and counts[timeline.title] > 1 else timeline
        for timeline, file in zip(timelines, files, strict=True)
    ]


def _list_variants(request: Request) -> tuple[list[Variant], dict[str, list[str]]]:
    """Every schedule at every size, in the order of the command line; and the schedules without an --option."""
    from zeropipe.schedules.user import entry_of

    specs = _expand_all(request.specs)
    entries = {spec.name: entry_of(spec.name) for spec in specs if not spec.is_file}
    ignored = {}
    for option in request.options:
        ignored[option] = [entry.name for entry in entries.values() if option not in entry.options]
        if len(ignored[option]) == len(entries):
            raise ConfigError(f"--option {option}: none of the compared schedules has an option of that name")
    sizes = list(product(request.ranks or (None,), request.microbatches or (None,)))
    variants = []
    for n, (ranks, microbatches) in enumerate(sizes):
        for spec in specs:
            if spec.is_file:  # it has one size of its own
                if n == 0:
                    size = (ranks, microbatches) if len(sizes) == 1 else (None, None)
                    variants.append(Variant(spec, *size, None, {}, spec.name))
                continue
            entry = entries[spec.name]
            title = entry.name + spec.text[len(spec.name) :]
            options = {name: value for name, value in request.options.items() if name in entry.options}
            stages = _choose_stages(spec, entry, request.stages_per_rank)
            for count in stages:
                full_title = f"{title}:v={count}" if len(stages) > 1 else title
                variants.append(Variant(spec, ranks, microbatches, count, options, full_title))
    return variants, ignored


def _expand_all(specs: tuple[Spec, ...]) -> list[Spec]:
    """Replace `all` by every schedule that is not named."""
    from zeropipe.cli.request import parse_spec
    from zeropipe.schedules.registry import find, names

    index = next((n for n, spec in enumerate(specs) if spec.text == "all"), None)
    if index is None:
        return list(specs)
    named = [spec for spec in specs if spec.text != "all"]
    known = {find(spec.name).name for spec in named if not spec.is_file and ".py:" not in spec.name}
    named[index:index] = [parse_spec(name) for name in names() if name not in known]
    return named


def _choose_stages(spec: Spec, entry: Entry, given: tuple[int, ...]) -> tuple[int | None, ...]:
    """Stages per rank: the variant's own, else those given that the schedule can have, else its default."""
    if spec.stages_per_rank is not None:
        return (spec.stages_per_rank,)
    return tuple(count for count in given if count in entry.stages_per_rank) or (None,)


def _label_sizes(timelines: list[Timeline]) -> list[Timeline]:
    """Add the size to the titles in a picture of several sizes."""
    if len({size_of(t) for t in timelines}) == 1:
        return timelines
    return [t.with_label(f"{t.title}, {_size_text(size_of(t))}") for t in timelines]


def _size_text(size: tuple[int, int]) -> str:
    return f"{count_text(size[0], 'rank')}, {count_text(size[1], 'microbatch')}"


def _print_json(comparison: Comparison, request: Request) -> None:
    from zeropipe.core.ranking import rank_timelines

    standings = rank_timelines(comparison.timelines).standings
    output.print_json({
        "compared": [
            {
                **output.timeline_data(t), **standing._asdict(),
                "layers": request.source.count_layers(t.schedule.problem, t.schedule.placement),
            }
            for t, standing in zip(comparison.timelines, standings, strict=True)
        ],
        "refused": [{"schedule": name, "reason": reason} for name, reason in comparison.refused],
        "ignored_options": comparison.ignored,
        "costs_per": request.source.name,
    })  # fmt: skip


def _print_tables(comparison: Comparison, request: Request, grid: str | None) -> None:
    """Print a table per size, since schedules of different sizes do different work, or one of a single number."""
    from zeropipe.core.limits import has_weight_gradients
    from zeropipe.core.ranking import rank_timelines

    standings = rank_timelines(comparison.timelines).standings
    everything = list(zip(comparison.timelines, standings, strict=True))
    groups: dict[tuple[int, int], list[tuple[Timeline, Standing]]] = {}
    for t, standing in everything:
        groups.setdefault(size_of(t), []).append((t, standing))
    if grid:
        print_grid(grid, f"{grid} at ranks × microbatches; {request.source.describe()}", everything)
    for size, rows in () if grid else groups.items():
        _print_table(f"{_size_text(size)}; {request.source.describe()}", rows)
    for option, names in comparison.ignored.items():
        if names:
            output.print_note(f"--option {option} is not an option of {', '.join(names)}: ignored there")
    if request.weight_parts:
        names = [t.title for t in comparison.timelines if not has_weight_gradients(t.schedule)]
        if names:
            output.print_note(f"no W to divide into parts: {', '.join(dict.fromkeys(names))}")
    for name, reason in comparison.refused:
        output.print_note(f"left out: {name}: {reason}")
    for name, size in comparison.own_sizes.items():
        output.print_note(f"{name} has its own size, {_size_text(size)}, and no other")
    for name in comparison.recorded:
        output.print_note(f"recorded times of {name} are not used: --costs {name} compares all by them")


def _print_table(heading: str, rows: list[tuple[Timeline, Standing]]) -> None:
    from rich.markup import escape

    console = output.console()
    console.print(heading, style="bold", markup=False)
    table = output.create_table(
        "schedule", "stages", "makespan", "of\nbest", "idle", "to\nideal", "bubble\nrate", "peak\nmemory",
        left=("schedule",),
    )  # fmt: skip
    for t, standing in rows:
        peak = output.size_text(max(t.peak_memory), t.memory_unit)
        table.add_row(
            f"[bold green]{escape(t.title)} ★[/]" if standing.best_time else escape(t.title),
            str(t.schedule.num_stages),
            output.time_text(t.makespan, t.unit),
            f"{standing.of_best:.3f}",
            output.percent(t.idle_fraction),
            output.percent(t.bubble_to_ideal),
            output.percent(t.bubble),
            f"[red]{peak} over[/]" if not standing.fits
            else f"[bold green]{peak} ★[/]" if standing.best_memory else peak,
        )  # fmt: skip
    console.print(output.narrow_to_width(table, console))
    for text, titles in _notes(rows).items():
        output.print_note(f"{text}: {', '.join(titles)}")


def _notes(rows: list[tuple[Timeline, Standing]]) -> dict[str, list[str]]:
    """Notes, each with the titles of the schedules that it is about."""
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
        smallest = min(rows, key=lambda row: max(row[0].peak_memory))[0]
        limit, peak = (output.size_text(x, first.memory_unit) for x in (first.memory_limit, max(smallest.peak_memory)))
        notes[f"none fits the memory limit {limit}; {peak} is enough for"] = [smallest.title]
    return notes
