"""`simulate`, `compare` and `check`."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from zeropipe.cli import options as opt
from zeropipe.cli import output
from zeropipe.cli.progress import progress
from zeropipe.errors import ConfigError, ScheduleError

if TYPE_CHECKING:
    from zeropipe.core.schedule import Program, Schedule
    from zeropipe.core.timeline import Timeline


@click.command()
@click.argument("schedule")
@opt.size_options
@opt.json_option
@opt.cost_options
def simulate(
    schedule: str,
    ranks: int | None,
    microbatches: int | None,
    stages_per_rank: int | None,
    knobs: tuple[str, ...],
    as_json: bool,
    weight_parts: int | None,
    **costs: Any,
) -> None:
    """Predict a schedule's time, bubble and memory. Costs are per stage."""
    from zeropipe.sim.simulate import simulate as run

    with progress(2) as begin:
        begin(f"building {schedule}")
        built, given, _ = opt.work_of(schedule, (ranks, microbatches, stages_per_rank, knobs), costs)
        begin(f"simulating {schedule}")
        timeline = run(opt.fill(built, given, weight_parts), given)
    if as_json:
        output.print_json(summary(timeline))
    else:
        _print_timeline(timeline)


def summary(timeline: Timeline) -> dict[str, Any]:
    """All metrics of a timeline as plain data."""
    from zeropipe.core.explain import critical_path, idle

    schedule = timeline.schedule
    return {
        "schedule": schedule.name,
        "num_ranks": schedule.num_ranks,
        "num_stages": schedule.num_stages,
        "num_microbatches": schedule.num_microbatches,
        "num_weight_parts": schedule.problem.num_weight_parts,
        "num_actions": schedule.num_actions,
        "placement": schedule.placement.name,
        "unit": timeline.unit,
        "makespan": timeline.makespan,
        "bubble": timeline.bubble,
        "rank_bubble": timeline.rank_bubble,
        "peak_memory": timeline.peak_memory,
        "memory_unit": timeline.memory_unit,
        "memory_limit": timeline.memory_limit,
        "busy": timeline.busy,
        "idle": [causes._asdict() for causes in idle(timeline)],
        "critical_path": [
            {"rank": span.rank, "action": str(span.action), "start": span.start, "end": span.end}
            for span in critical_path(timeline)
        ],
    }


def _print_timeline(timeline: Timeline) -> None:
    from zeropipe.core.explain import critical_path, idle

    console = output.console()
    console.print(output.problem_text(timeline), style="bold", markup=False)
    over = _over_limit(timeline)
    console.print(
        f"makespan {output.time_text(timeline.makespan, timeline.unit)}   bubble {output.percent(timeline.bubble)}   "
        f"peak memory {output.size_text(max(timeline.peak_memory), timeline.memory_unit)}{over}"
    )
    rows = output.table("rank", "busy", "warm-up", "data", "comm", "cool-down", "bubble", "peak memory")
    for rank, causes in enumerate(idle(timeline)):
        times = (timeline.busy[rank], *causes[:2], causes.communication + causes.other, causes.cool_down)
        rows.add_row(
            str(rank),
            *(output.time_text(time, timeline.unit) for time in times),
            output.percent(timeline.rank_bubble[rank]),
            output.size_text(timeline.peak_memory[rank], timeline.memory_unit),
        )
    console.print(rows)
    path = critical_path(timeline)
    inside = sum(span.end - span.start for span in path)
    console.print(
        f"critical path: {len(path)} actions, {output.time_text(inside, timeline.unit)} of work, "
        f"{output.time_text(timeline.makespan - inside, timeline.unit)} of waiting for messages; "
        f"from {path[0].action} on rank {path[0].rank} to {path[-1].action} on rank {path[-1].rank}"
    )


def _over_limit(timeline: Timeline) -> str:
    limit = timeline.memory_limit
    if limit is None:
        return ""
    over = map(str, timeline.over_limit)
    text = output.size_text(limit, timeline.memory_unit)
    return (
        f"   [red]over the limit {text} on rank {', '.join(over)}[/]" if timeline.over_limit else f"   (limit {text})"
    )


@click.command()
@click.argument("schedules", nargs=-1, required=True)
@opt.size_options
@click.option("-o", "--output", "out", help="Draw them all: x.html .svg .png .pdf, or .json: a Perfetto trace.")
@opt.json_option
@opt.cost_options
def compare(
    schedules: tuple[str, ...],
    ranks: int | None,
    microbatches: int | None,
    stages_per_rank: int | None,
    knobs: tuple[str, ...],
    out: str | None,
    as_json: bool,
    weight_parts: int | None,
    **costs: Any,
) -> None:
    """Simulate several schedules of one model side by side. Costs are per rank: a rank's stages share them.

    The name `all` stands for every schedule that can be built at this size, beside others that are named.
    """
    from zeropipe.sim.compare import compare as run

    given = opt.costs_of(**costs)
    specs = _without_all(schedules)
    timelines: list[Timeline] = []
    refused = []
    with progress(len(specs)) as begin:
        for spec in specs:
            begin(spec)
            try:
                built = opt.schedule_of(spec, ranks, microbatches, _fitting(spec, stages_per_rank), knobs)
            except ConfigError as error:
                if spec in schedules:
                    raise
                refused.append((spec, str(error)))
            else:
                timelines += run([built], given, weight_parts=weight_parts)
    if not timelines:
        raise ConfigError(f"none of the schedules can be built: {refused[0][1]}")
    if out:  # before the table: a mistake in the name is all that is printed then
        from zeropipe.viz import draw

        draw(timelines, out)
    if as_json:
        output.print_json(
            {"compared": [summary(t) for t in timelines], "refused": [{"schedule": n, "reason": r} for n, r in refused]}
        )
    else:
        _print_comparison(timelines, refused)
        if out:
            output.print_written(out)


def _without_all(schedules: tuple[str, ...]) -> list[str]:
    """What is named, and in place of `all` every other schedule there is."""
    from zeropipe.schedules.registry import names

    listed = list(schedules)
    if "all" in listed:
        place = listed.index("all")
        listed[place : place + 1] = [name for name in names() if name not in schedules]
    return listed


def _fitting(spec: str, stages_per_rank: int | None) -> int | None:
    """The wished number of stages where the schedule can have it, else the schedule's own."""
    from zeropipe.schedules.user import entry_of

    if stages_per_rank is None or spec.endswith((".csv", ".json")):
        return None
    return stages_per_rank if stages_per_rank in entry_of(spec).stages_per_rank else None


def _print_comparison(timelines: list[Timeline], refused: list[tuple[str, str]]) -> None:
    from rich.markup import escape

    console = output.console()
    first = timelines[0].schedule
    console.print(f"{first.num_ranks} ranks, {first.num_microbatches} microbatches", style="bold")
    fastest = min(t.makespan for t in timelines)
    leanest = min(max(t.peak_memory) for t in timelines)
    rows = output.table(
        "schedule", "makespan", "of best", "bubble", "peak memory", "adjusted", left=("schedule", "adjusted")
    )
    for t in timelines:
        peak = max(t.peak_memory)
        best = t.makespan == fastest
        rows.add_row(
            f"[bold green]{escape(t.title)} ★[/]" if best else escape(t.title),
            output.time_text(t.makespan, t.unit),
            f"{t.makespan / fastest:.3f}" if fastest else "-",
            output.percent(t.bubble),
            f"[red]{output.size_text(peak, t.memory_unit)} over[/]" if t.over_limit
            else f"[bold green]{output.size_text(peak, t.memory_unit)} ★[/]" if peak == leanest
            else output.size_text(peak, t.memory_unit),
            _adjusted(t, first),
        )  # fmt: skip
    console.print(rows)
    for name, reason in refused:
        console.print(f"left out: {name}: {reason}", style="dim")


def _adjusted(timeline: Timeline, first: Schedule) -> str:
    schedule = timeline.schedule
    notes = []
    if (schedule.num_ranks, schedule.num_microbatches) != (first.num_ranks, first.num_microbatches):
        notes.append(f"{schedule.num_ranks} ranks, {schedule.num_microbatches} microbatches")
    if schedule.num_stages != schedule.num_ranks:
        notes.append(f"{schedule.num_stages // schedule.num_ranks} stages per rank, costs shared out")
    if schedule.problem.num_weight_parts > 1:
        notes.append(f"W in {schedule.problem.num_weight_parts} parts")
    if len(schedule.placement.copies) > 1:
        notes.append("two copies of the weights")
    return "; ".join(notes)


@click.command()
@click.argument("file")
@opt.json_option
def check(file: str, as_json: bool) -> None:
    """Prove a schedule file: complete, placed, ordered, and free of deadlock also with rendezvous sends."""
    if not file.endswith((".csv", ".json")):
        raise ConfigError(f"cannot check {file!r}: give a .csv or .json file (see zeropipe draw -o x.csv)")
    with progress(1) as begin:
        begin(f"checking {file}")
        schedule, program = _proven(file)
    messages = (program.packed.num_codes - schedule.num_actions) // 2
    if as_json:
        output.print_json({
            "ok": True, "schedule": schedule.name, "num_ranks": schedule.num_ranks, "num_stages": schedule.num_stages,
            "num_microbatches": schedule.num_microbatches, "num_actions": schedule.num_actions,
            "num_messages": messages, "placement": schedule.placement.name,
        })  # fmt: skip
        return
    print(
        f"{file}: ok. {schedule.num_ranks} ranks, {schedule.num_stages} stages ({schedule.placement.name}), "
        f"{schedule.num_microbatches} microbatches: {schedule.num_actions} actions, {messages} messages, "
        "complete, placed, no deadlock (eager and rendezvous)"
    )


def _proven(file: str) -> tuple[Schedule, Program]:
    """The schedule of a file and its messages: those of the file, if it has any."""
    from zeropipe.core.check import check as prove
    from zeropipe.core.csv import has_messages, program_from_csv
    from zeropipe.core.lower import lower
    from zeropipe.core.timeline import Timeline
    from zeropipe.schedules.user import read_file

    found = read_file(file)
    schedule = found.schedule if isinstance(found, Timeline) else found
    try:
        prove(schedule)
        if file.endswith(".csv") and has_messages(text := Path(file).read_text()):
            program = program_from_csv(text, schedule.name)
            prove(program)
            return schedule, program
        return schedule, lower(schedule)
    except ScheduleError as error:
        raise type(error)(f"{file}: {error}") from None
