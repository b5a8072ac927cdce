"""`list`, `show` and `draw`."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from zeropipe.cli import options as opt
from zeropipe.cli import output
from zeropipe.cli.progress import progress
from zeropipe.errors import ConfigError

if TYPE_CHECKING:
    from zeropipe.core.timeline import Timeline


@click.command("list")
@opt.json_option
def list_schedules(as_json: bool) -> None:
    """All schedules, with what they need and do."""
    from zeropipe.schedules.registry import entries

    if as_json:
        output.print_json([
            {
                "name": e.name, "aliases": e.aliases, "summary": e.summary, "placement": e.placement_name,
                "stages_per_rank": e.stages_per_rank, "splits_backward": e.splits_backward, "overlaps": e.overlaps,
                "options": dict(e.options), "limits": e.limits, "paper": e.paper,
            }
            for e in entries()
        ])  # fmt: skip
        return
    console = output.console()
    wide = console.width >= 110
    details = ("stages/rank", "placement", "backward") if wide else ()
    rows = output.table("name", *details, "what it is", left=("name", "placement", "backward", "what it is"))
    for e in entries():
        low, high = min(e.stages_per_rank), max(e.stages_per_rank)
        facts = (
            str(low) if low == high else f"{low}-{high}", e.placement_name, "I + W" if e.splits_backward else "B",
        )  # fmt: skip
        needs = f". Needs: {e.limits}" if e.limits else ""
        rows.add_row(e.name, *(facts if wide else ()), e.summary + needs)
    console.print(rows)


@click.command()
@click.argument("schedule")
@opt.size_options
@opt.json_option
@opt.cost_options
def show(
    schedule: str,
    ranks: int | None,
    microbatches: int | None,
    stages_per_rank: int | None,
    knobs: tuple[str, ...],
    as_json: bool,
    weight_parts: int | None,
    **costs: Any,
) -> None:
    """Draw a schedule in the terminal."""
    from zeropipe.core.json import to_json
    from zeropipe.viz import draw as picture

    with progress(1) as begin:
        begin(f"simulating {schedule}")
        timeline = _timeline(schedule, (ranks, microbatches, stages_per_rank, knobs), weight_parts, costs)
    if as_json:
        print(to_json(timeline))
    else:
        picture(timeline)


@click.command()
@click.argument("schedule")
@click.option(
    "-o", "--output", "out", required=True, help="x.html .svg .png .pdf .csv, or .json: a Perfetto trace we read back."
)
@opt.size_options
@click.option("--comms", is_flag=True, help="With .csv: add SEND and RECV (torch's compute_comms form).")
@click.option("--width", type=opt.Finite(100, 10000), help="Points of an .svg, .png or .pdf (72 to the inch).")
@click.option(
    "--theme",
    type=click.Choice(["light", "dark"]),
    help="Of a page or figure; without it a page follows the system, a figure is light.",
)
@click.option("--labels", type=click.Choice(["microbatch", "action", "none"]), help="What is written in the boxes.")
@opt.json_option
@opt.cost_options
def draw(
    schedule: str,
    out: str,
    ranks: int | None,
    microbatches: int | None,
    stages_per_rank: int | None,
    knobs: tuple[str, ...],
    comms: bool,
    width: float | None,
    theme: str | None,
    labels: str | None,
    as_json: bool,
    weight_parts: int | None,
    **costs: Any,
) -> None:
    """Write a schedule to a file: a picture, a page, a trace, or its text."""
    from zeropipe.core.csv import to_csv
    from zeropipe.core.lower import lower
    from zeropipe.viz import check_name
    from zeropipe.viz import draw as picture

    wished = {"width": width, "theme": theme, "labels": labels}
    looks = {name: value for name, value in wished.items() if value is not None}
    is_text = out.endswith(".csv")
    if is_text and looks:
        raise ConfigError(f"--{next(iter(looks))} is for pictures: {out} is text")
    if comms and not is_text:
        raise ConfigError(f"--comms is for .csv files: leave it out for {out}")
    if not is_text:
        check_name(out)
    sizes = (ranks, microbatches, stages_per_rank, knobs)
    with progress(2) as begin:
        begin(f"building {schedule}")
        if is_text:
            built, given, _ = opt.work_of(schedule, sizes, costs)
            built = opt.fill(built, given, weight_parts)
            begin(f"writing {out}")
            _write(out, to_csv(lower(built) if comms else built))
        else:
            timeline = _timeline(schedule, sizes, weight_parts, costs)
            begin(f"drawing {out}")
            picture(timeline, out, **looks)
    if as_json:
        output.print_json({"file": out, "bytes": Path(out).stat().st_size})
    else:
        output.print_written(out)


def _timeline(spec: str, sizes: tuple[Any, ...], weight_parts: int | None, costs: dict[str, Any]) -> Timeline:
    """A recorded timeline as it is unless something is asked of it, any other schedule simulated."""
    from zeropipe.sim.simulate import simulate

    schedule, given, recorded = opt.work_of(spec, sizes, costs)
    if recorded is not None and weight_parts is None and not any(sizes):
        return recorded
    return simulate(opt.fill(schedule, given, weight_parts), given)


def _write(path: str, text: str) -> None:
    try:
        Path(path).write_text(text)
    except OSError as error:
        raise ConfigError(f"cannot write {path}: {error.strerror}") from None
