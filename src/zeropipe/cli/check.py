"""`check`: a schedule proven."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import click

from zeropipe.cli import options as opt
from zeropipe.cli import output
from zeropipe.cli.progress import progress
from zeropipe.core.units import count_text
from zeropipe.errors import ScheduleError

if TYPE_CHECKING:
    from zeropipe.cli.request import Request
    from zeropipe.core.schedule import Program, Schedule


@click.command(short_help="Prove a schedule.")
@click.argument("schedule")
@opt.size_options
@opt.json_option
def check(schedule: str, as_json: bool, **given: Any) -> None:
    """Prove a schedule: complete, placed, ordered, and free of deadlock also with rendezvous sends.

    \b
    zeropipe check mine.csv
    zeropipe check mine.py:my_schedule --ranks 4 --microbatches 8
    """
    from zeropipe.cli.request import request_of
    from zeropipe.core.action import SEND_B, SEND_F
    from zeropipe.core.packed import kind_of

    request = request_of([schedule], given)
    with progress(1) as begin:
        begin(f"checking {schedule}")
        proven, program = _proven(request)
    messages = sum(kind_of(code) in (SEND_F, SEND_B) for code in program.packed.view)
    if as_json:
        output.print_json({
            "ok": True, "schedule": proven.name, "num_ranks": proven.num_ranks, "num_stages": proven.num_stages,
            "num_microbatches": proven.num_microbatches, "num_actions": proven.num_actions,
            "num_messages": messages, "placement": proven.placement.name,
        })  # fmt: skip
        return
    print(
        f"{schedule}: ok. {proven.sizes}: {count_text(proven.num_actions, 'action')}, "
        f"{count_text(messages, 'message')}, complete, placed, no deadlock (eager and rendezvous)"
    )
    output.print_warnings(proven)


def _proven(request: Request) -> tuple[Schedule, Program]:
    """The schedule and its messages: those of the file, if it has any."""
    from zeropipe.core.check import check as prove
    from zeropipe.core.check import check_csv
    from zeropipe.core.files import has_suffix, read_text
    from zeropipe.core.limits import COMMAND_LINE
    from zeropipe.core.lower import lower
    from zeropipe.core.timeline import Timeline

    spec = request.specs[0]
    found = request.load(spec)
    schedule = found.schedule if isinstance(found, Timeline) else found
    try:
        prove(schedule)
        program = None
        if has_suffix(spec.name, ".csv"):
            program = check_csv(read_text(spec.name, COMMAND_LINE), schedule)
        return schedule, program or lower(schedule)
    except ScheduleError as error:
        raise type(error)(f"{spec.text}: {error}") from None
