"""The `zeropipe` command, and how it reports errors."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any, TextIO

import click

from zeropipe import __version__
from zeropipe.cli import app as page
from zeropipe.cli import check, checkpoint, compare, estimate, plan, profile, run, search, show, simulate, trace, train
from zeropipe.cli.command import Group
from zeropipe.cli.doctor import doctor
from zeropipe.errors import ZeropipeError

MAX_LINE_LENGTH = 600  # of an error, which may quote a megabyte of input


@click.group(cls=Group, context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 110})
@click.version_option(__version__, prog_name="zeropipe", message="%(prog)s %(version)s")
def app() -> None:
    """Plan, show and run pipeline-parallel training.

    A SCHEDULE is a name (see `zeropipe list`), a variant like interleaved:v=4, a .csv or .json file,
    path/to/mine.py:my_schedule, or a .toml file with schedule, sizes and costs.
    """


for command in (
    show.list_schedules, show.show, simulate.simulate, compare.compare, estimate.estimate, profile.profile,
    plan.plan, search.search, check.check, show.draw, page.app, run.run, train.train, trace.trace,
    checkpoint.checkpoint, doctor,
):  # fmt: skip
    app.add_command(command)


def main(args: list[str] | None = None) -> None:
    """Run a command line. A user's error is printed in one line, with exit status 2."""
    arguments = sys.argv[1:] if args is None else args
    for name in ("stdout", "stderr"):
        stream = getattr(sys, name)
        if stream is None:  # closed by the parent process
            setattr(sys, name, open(os.devnull, "w"))  # noqa: SIM115
        elif hasattr(stream, "reconfigure"):
            stream.reconfigure(errors="replace")  # a terminal that cannot show ★ shows ?
    try:
        app.main(arguments or ["--help"], standalone_mode=False)
        sys.stdout.flush()  # while a full disk can still be reported
    except ZeropipeError as error:
        _fail(str(error), arguments, error.json_fields)
    except click.ClickException as error:
        _fail(error.format_message().rstrip("."), arguments)
    except (KeyboardInterrupt, click.Abort):
        sys.exit(130)
    except MemoryError:
        _fail("not enough memory: use fewer ranks, stages or microbatches", arguments)
    except BrokenPipeError:
        _discard_buffer(sys.stdout)
        sys.exit(1)  # the reader of our output has ended; click exits with the same status
    except OSError as error:
        if error.filename is None:  # of print()
            _discard_buffer(sys.stdout)
        _fail(f"cannot write {error.filename or 'the output'}: {error.strerror or error}", arguments)


def _fail(message: str, args: Sequence[str], json_fields: Mapping[str, Any] | None = None) -> None:
    text = "\n".join(_shorten(line) for line in message.splitlines())
    try:
        if "--json" in args:
            print(json.dumps({"error": text, **(json_fields or {})}))
            sys.stdout.flush()
        print(f"zeropipe: {text}", file=sys.stderr, flush=True)
    except OSError:
        _discard_buffer(sys.stdout)
        _discard_buffer(sys.stderr)
    sys.exit(2)


def _shorten(line: str) -> str:
    half = MAX_LINE_LENGTH // 2
    return line if len(line) <= MAX_LINE_LENGTH else f"{line[:half]} ... {line[-half:]}"


def _discard_buffer(stream: TextIO) -> None:
    """Redirect a stream to the null device: else Python complains at exit about its buffer."""
    with suppress(OSError, ValueError):  # of a test: not a real file
        os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())
