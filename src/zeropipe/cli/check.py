"""`check`: whether a schedule is complete, ordered and free of deadlock."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import click

from zeropipe.cli import options as opt
from zeropipe.cli import output
from zeropipe.cli.progress import show_steps
from zeropipe.core.units import count_text
from zeropipe.errors import ScheduleError

if TYPE_CHECKING:
    from zeropipe.cli.request import Request
    from zeropipe.core.schedule import Program, Schedule


@opt.command(short_help="Check a schedule.")
@click.argument("schedule")
@opt.json
@opt.size
def check(schedule: str, as_json: bool, **values: Any) -> None:
    """Check that a schedule is complete, placed, ordered, and free of deadlock, also with rendezvous sends.

    \b
    zeropipe check mine.csv
    zeropipe check mine.py:my_schedule --ranks 4 --microbatches 8
    """
    from zeropipe.cli.request import create_request
    from zeropipe.core.action import SEND_B, SEND_F
    from zeropipe.core.packed import kind_of

    request = create_request([schedule], values)
    with show_steps(1) as begin:
        begin(f"checking {schedule}")
        checked, program = _check(request)
    num_messages = sum(kind_of(code) in (SEND_F, SEND_B) for code in program.packed.view)
    if as_json:
        output.print_json({
            "ok": True, "schedule": checked.name, "num_ranks": checked.num_ranks, "num_stages": checked.num_stages,
            "num_microbatches": checked.num_microbatches, "num_actions": checked.num_actions,
            "num_messages": num_messages, "placement": checked.placement.name,
        })  # fmt: skip
        return
    print(
        f"{schedule}: ok. {checked.sizes}: {count_text(checked.num_actions, 'action')}, "
        f"{count_text(num_messages, 'message')}, complete, placed, no deadlock (eager and rendezvous)"
    )
    output.print_warnings(checked)


def _check(request: Request) -> tuple[Schedule, Program]:
    """Check the schedule; returns it with its messages, which are the file's own if it has any."""
    from zeropipe.core.check import check as check_schedule
    from zeropipe.core.check import check_csv
    from zeropipe.core.files import has_suffix, read_text
    from zeropipe.core.limits import COMMAND_LINE
    from zeropipe.core.lower import lower

    spec = request.specs[0]
    schedule = request.load_schedule(spec)
    try:
        check_schedule(schedule)
        program = None
        if has_suffix(spec.name, ".csv"):
            program = check_csv(read_text(spec.name, COMMAND_LINE), schedule)
        return schedule, program or lower(schedule)
    except ScheduleError as error:
        raise type(error)(f"{spec.text}: {error}") from None
