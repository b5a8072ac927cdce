"""`zeropipe`: the commands and how mistakes are told."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Sequence
from contextlib import suppress
from typing import TextIO

import click

from zeropipe import __version__
from zeropipe.cli import app as page
from zeropipe.cli import check, checkpoint, compare, estimate, plan, profile, run, search, see, simulate, trace, train
from zeropipe.errors import ZeropipeError

LONGEST = 600  # characters of a line of an error: what was given may be a megabyte


class Commands(click.Group):
    """In the order of use, not of the alphabet."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(self.commands)


@click.group(cls=Commands, context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 110})
@click.version_option(__version__, prog_name="zeropipe", message="%(prog)s %(version)s")
def app() -> None:
    """Plan, see and run pipeline-parallel training.

    A SCHEDULE is a name (see `zeropipe list`), a variant like interleaved:v=4, a .csv or .json file,
    path/to/mine.py:my_schedule, or a .toml file that holds schedule, sizes and costs together.
    """


for command in (
    see.list_schedules, see.show, simulate.simulate, compare.compare, estimate.estimate, profile.profile,
    plan.plan, search.search, check.check, see.draw, page.app, run.run, train.train, trace.trace,
    checkpoint.checkpoint,
):  # fmt: skip
    app.add_command(command)


def main(args: list[str] | None = None) -> None:
    """Run a command line; a user's mistake ends in one line and exit status 2."""
    given = sys.argv[1:] if args is None else args
    for name in ("stdout", "stderr"):
        stream = getattr(sys, name)
        if stream is None:  # closed by whoever started us
            setattr(sys, name, open(os.devnull, "w"))  # noqa: SIM115
        elif hasattr(stream, "reconfigure"):
            stream.reconfigure(errors="replace")  # a terminal without ★ shows ?
    try:
        app.main(given or ["--help"], standalone_mode=False)
        sys.stdout.flush()  # here, where a full disk can still be told
    except ZeropipeError as error:
        _fail(str(error), given)
    except click.ClickException as error:
        _fail(error.format_message().rstrip("."), given)
    except (KeyboardInterrupt, click.Abort):
        sys.exit(130)
    except MemoryError:
        _fail("there is not enough memory for this: take fewer ranks, stages or microbatches", given)
    except BrokenPipeError:
        _leave(sys.stdout)
        sys.exit(1)  # the reader of our output left; click ends in the same way where it notices first
    except OSError as error:
        if error.filename is None:  # print() names no file
            _leave(sys.stdout)
        _fail(f"cannot write {error.filename or 'the output'}: {error.strerror or error}", given)


def _fail(message: str, args: Sequence[str]) -> None:
    text = "\n".join(_shortened(line) for line in message.splitlines())
    try:
        if "--json" in args:
            print(json.dumps({"error": text}))
            sys.stdout.flush()
        print(f"zeropipe: {text}", file=sys.stderr, flush=True)
    except OSError:
        _leave(sys.stdout)
        _leave(sys.stderr)
    sys.exit(2)


def _shortened(line: str) -> str:
    return line if len(line) <= LONGEST else f"{line[: LONGEST // 2]} ... {line[-LONGEST // 2 :]}"


def _leave(stream: TextIO) -> None:
    """What is left in a stream's buffer goes nowhere: else Python complains about it when it ends."""
    with suppress(OSError, ValueError):  # of a test, it is not a real file
        os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())
