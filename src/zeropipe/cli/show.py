"""`list`, `show` and `draw`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from zeropipe.cli import options as opt
from zeropipe.cli import output
from zeropipe.cli.options import option
from zeropipe.cli.progress import show_steps
from zeropipe.errors import ConfigError

WIDE = 110  # characters of a terminal that has space for all columns of `list`


@opt.command("list", short_help="All schedules.")
@opt.json
def list_schedules(as_json: bool) -> None:
    """List all schedules with their properties and requirements."""
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
    is_wide = console.width >= WIDE
    details = ("stages/rank", "placement", "backward") if is_wide else ()
    table = output.create_table("name", *details, "summary", left=("name", "placement", "backward", "summary"))
    for e in entries():
        low, high = min(e.stages_per_rank), max(e.stages_per_rank)
        stages = str(low) if low == high else f"{low}-{high}"
        facts = (stages, e.placement_name, "I + W" if e.splits_backward else "B") if is_wide else ()
        table.add_row(e.name, *facts, e.summary + (f". Needs: {e.limits}" if e.limits else ""))
    console.print(table)


@opt.command(short_help="A schedule in the terminal.")
@click.argument("schedule")
@opt.json
@opt.size
@opt.costs
@opt.offload
@opt.checkpointing
@opt.overlaps
def show(schedule: str, as_json: bool, **values: Any) -> None:
    """Draw a schedule in the terminal.

    \b
    zeropipe show zbv --ranks 4 --microbatches 8
    zeropipe show measured.json       (a recorded timeline)
    """
    from zeropipe.cli.request import create_request
    from zeropipe.core.formats.json import to_json
    from zeropipe.viz import draw as draw_timeline

    request = create_request([schedule], values)
    with show_steps(1) as begin:
        begin(f"simulating {schedule}")
        priced = request.price()
        timeline = priced.recording or priced.simulate()
    if as_json:
        print(to_json(timeline))
        return
    draw_timeline(timeline)
    output.print_note(priced.describe_costs())
    output.print_warnings(timeline.schedule)


@opt.command(short_help="A schedule as a picture, page, trace or text file.")
@click.argument("schedule")
@opt.output(required=True)
@option("--comms", is_flag=True, help="With .csv: add SEND and RECV (torch's compute_comms format).")
@opt.json
@opt.size
@opt.looks
@opt.costs
@opt.offload
@opt.checkpointing
@opt.overlaps
def draw(schedule: str, out: str, comms: bool, as_json: bool, **values: Any) -> None:
    """Write a schedule to a file: a picture, a page, a trace, or its text.

    \b
    zeropipe draw zbv --ranks 4 --microbatches 8 -o zbv.html
    zeropipe draw zbv -p 4 -m 8 -o zbv.pdf --width 240 --no-legend --memory-curves
    zeropipe draw zbv -p 4 -m 8 -o zbv.csv --comms

    Formats: .html, .svg, .png, .pdf, .csv, and .json, a Perfetto trace that zeropipe reads, too.
    """
    from zeropipe.cli.request import create_request
    from zeropipe.core.files import has_suffix, require_writable, write_whole
    from zeropipe.core.formats.csv import to_csv
    from zeropipe.core.lower import lower
    from zeropipe.viz import check_name
    from zeropipe.viz import draw as draw_timeline

    looks = opt.take_looks(values)
    is_text = has_suffix(out, ".csv")
    if is_text and looks:
        raise ConfigError(f"--{next(iter(looks))} is for pictures, and {out} is text: leave it out")
    if comms and not is_text:
        raise ConfigError(f"--comms is for .csv files: leave it out for {out}")
    if is_text:
        require_writable(out)
    else:
        check_name(out, **looks)
    request = create_request([schedule], values)
    with show_steps(2) as begin:
        begin(f"simulating {schedule}")
        priced = request.price()
        if is_text:
            begin(f"writing {out}")
            write_whole(out, to_csv(lower(priced.schedule) if comms else priced.schedule))
        else:
            timeline = priced.recording or priced.simulate()
            begin(f"drawing {out}")
            draw_timeline(timeline, out, **looks)
    if as_json:
        output.print_json({"file": out, "bytes": Path(out).stat().st_size, "costs_per": priced.source.name})
        return
    output.print_written(out, "" if is_text else priced.describe_costs())
    output.print_warnings(priced.schedule)
