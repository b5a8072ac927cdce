"""`list`, `show` and `draw`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from zeropipe.cli import options as opt
from zeropipe.cli import output
from zeropipe.cli.progress import progress
from zeropipe.errors import ConfigError


@click.command("list", short_help="All schedules.")
@opt.json_option
def list_schedules(as_json: bool) -> None:
    """All schedules, with what they need and do."""
    from zeropipe.schedules.registry import entries

    if as_json:
        output.print_json([
            {
                "name": e.name, "aliases": e.aliases, "summary": e.summary, "placement": e.placement_name,
                "stages_per_rank": e.stages_per_rank, "splits_backward": e.splits_backward, "overlaps": e.overlaps,
                "options": e.plain_options, "limits": e.limits, "paper": e.paper,
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


@click.command(short_help="A picture in the terminal.")
@click.argument("schedule")
@opt.size_options
@opt.json_option
@opt.cost_options
def show(schedule: str, as_json: bool, **given: Any) -> None:
    """Draw a schedule in the terminal.

    \b
    zeropipe show zbv --ranks 4 --microbatches 8
    zeropipe show measured.json       (a recorded timeline, as it was)
    """
    from zeropipe.cli.request import request_of
    from zeropipe.core.formats.json import to_json
    from zeropipe.viz import draw as picture

    request = request_of([schedule], given)
    with progress(1) as begin:
        begin(f"simulating {schedule}")
        priced = request.priced()
        timeline = priced.recorded or priced.simulated()
    if as_json:
        print(to_json(timeline))
        return
    picture(timeline)
    output.note(output.costs_text(priced.per, request.cut_text(priced.layers)))
    output.print_warnings(timeline.schedule)


@click.command(short_help="A picture, a page, a trace, or text, in a file.")
@click.argument("schedule")
@click.option(
    "-o", "--output", "out", required=True, help="x.html .svg .png .pdf .csv, or .json: a Perfetto trace we read back."
)
@opt.size_options
@click.option("--comms", is_flag=True, help="With .csv: add SEND and RECV (torch's compute_comms form).")
@opt.look_options
@opt.json_option
@opt.cost_options
def draw(schedule: str, out: str, comms: bool, as_json: bool, **given: Any) -> None:
    """Write a schedule to a file: a picture, a page, a trace, or its text.

    \b
    zeropipe draw zbv --ranks 4 --microbatches 8 -o zbv.html
    zeropipe draw zbv -p 4 -m 8 -o zbv.pdf --width 240 --no-legend --memory
    zeropipe draw zbv -p 4 -m 8 -o zbv.csv --comms
    """
    from zeropipe.cli.request import request_of
    from zeropipe.core.files import has_suffix, require_writable, write_whole
    from zeropipe.core.formats.csv import to_csv
    from zeropipe.core.lower import lower
    from zeropipe.viz import check_name
    from zeropipe.viz import draw as picture

    looks = opt.looks_of(given)
    is_text = has_suffix(out, ".csv")
    if is_text and looks:
        raise ConfigError(f"--{next(iter(looks))} is for pictures: {out} is text")
    if comms and not is_text:
        raise ConfigError(f"--comms is for .csv files: leave it out for {out}")
    if is_text:
        require_writable(out)
    else:
        check_name(out, **looks)
    request = request_of([schedule], given)
    with progress(2) as begin:
        begin(f"simulating {schedule}")
        priced = request.priced()
        if is_text:
            begin(f"writing {out}")
            write_whole(out, to_csv(lower(priced.schedule) if comms else priced.schedule))
        else:
            timeline = priced.recorded or priced.simulated()
            begin(f"drawing {out}")
            picture(timeline, out, **looks)
    if as_json:
        output.print_json({"file": out, "bytes": Path(out).stat().st_size, "costs_per": priced.per})
        return
    output.print_written(out, "" if is_text else output.costs_text(priced.per, request.cut_text(priced.layers)))
    output.print_warnings(priced.schedule)
