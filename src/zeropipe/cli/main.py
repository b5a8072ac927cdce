"""`zeropipe`: the commands and how mistakes are told."""

from __future__ import annotations

import json
import sys

import click

from zeropipe import __version__
from zeropipe.cli import app as page
from zeropipe.cli import plan, run, see
from zeropipe.errors import ZeropipeError


@click.group(context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 110})
@click.version_option(__version__, prog_name="zeropipe", message="%(prog)s %(version)s")
def app() -> None:
    """Plan, see and run pipeline-parallel training.

    A SCHEDULE is a name (see `zeropipe list`), a .csv or .json file, or path/to/mine.py:my_schedule.
    """


for command in (see.list_schedules, see.show, plan.simulate, plan.compare, plan.check, see.draw, page.app, run.run):
    app.add_command(command)


def main(args: list[str] | None = None) -> None:
    """Run a command line; a user's mistake ends in one line and exit status 2."""
    given = sys.argv[1:] if args is None else args
    try:
        app.main(given or ["--help"], standalone_mode=False)
    except ZeropipeError as error:
        _fail(str(error), given)
    except click.ClickException as error:
        _fail(error.format_message().rstrip("."), given)
    except (KeyboardInterrupt, click.Abort):
        sys.exit(130)
    except BrokenPipeError:
        sys.stderr.close()  # the reader of our output left: not an error of ours


def _fail(message: str, args: list[str]) -> None:
    if "--json" in args:
        print(json.dumps({"error": message}))
    print(f"zeropipe: {message}", file=sys.stderr)
    sys.exit(2)
