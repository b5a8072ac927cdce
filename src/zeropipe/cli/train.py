"""`train`: a model directory, files and a schedule in; a better model out."""

from __future__ import annotations

import dataclasses
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path

import click

from zeropipe.cli import options as opt
from zeropipe.cli import output
from zeropipe.cli.train_text import print_outcome, print_preview
from zeropipe.errors import ConfigError, MissingExtra

FILE = "run.toml"  # that --init writes


@click.command(
    short_help="Train a model.",
    context_settings={"ignore_unknown_options": True},
    options_metavar="[--TABLE.FIELD VALUE].. [OPTIONS]",
)
@click.argument("arguments", nargs=-1, type=click.UNPROCESSED, metavar="[RUN.TOML]")
@click.option("--dry-run", is_flag=True, help="Check everything and print the plan; start nothing.")
@click.option("--print", "shows", is_flag=True, help="Print all fields with their values; start nothing.")
@click.option("--init", is_flag=True, help="Write a training file that explains every field, to begin with.")
@opt.json_option
def train(arguments: tuple[str, ...], dry_run: bool, shows: bool, init: bool, as_json: bool) -> None:
    """Train the model of a training file; fields of it may be given or changed by their names.

    \b
    zeropipe train --init run.toml
    zeropipe train run.toml --dry-run
    zeropipe train run.toml --schedule.name zbv --mesh.pp 4 --engine.compile
    torchrun --nproc-per-node 8 -m zeropipe train run.toml --mesh.pp 8

    Starts local processes, or uses torchrun's. docs/configuration.md has all fields.
    """
    if find_spec("pydantic") is None:
        raise MissingExtra("pydantic", "train")
    from zeropipe.train.config.read import read_run
    from zeropipe.train.config.rules import check_run, torchrun_world_size

    path, overrides = _parted(arguments)
    if init:
        _init(path or FILE, overrides, as_json)
        return
    with _told_once():
        config = read_run(path, overrides)
    if shows:
        from zeropipe.train.config.write import to_toml

        print(config.model_dump_json(indent=2) if as_json else to_toml(config), end="\n" if as_json else "")
        return
    with _told_once():
        check_run(config, torchrun_world_size(), starts=not dry_run)
    if dry_run:
        from zeropipe.train.preview import preview

        print_preview(preview(config), as_json)
        return
    from zeropipe.engine import require_torch

    require_torch()
    from zeropipe.train.start import start

    outcome = start(config)
    if outcome is None:  # a rank of torchrun's that is not the first
        return
    if as_json:
        output.print_json(dataclasses.asdict(outcome))
    else:
        print_outcome(outcome, config.train.output)


@contextmanager
def _told_once() -> Iterator[None]:
    """All processes of torchrun's find the same mistakes: one on each machine tells them."""
    try:
        yield
    except ConfigError:
        if os.environ.get("LOCAL_RANK", "0") != "0":
            sys.exit(2)
        raise


def _init(path: str, overrides: list[str], as_json: bool) -> None:
    from zeropipe.core.files import write_whole
    from zeropipe.train.config.write import format_example

    if Path(path).exists():
        raise ConfigError(f"{path} is there already: name a new file, or remove it")
    write_whole(path, format_example(overrides, Path(path).parent))
    if as_json:
        output.print_json({"file": path})
    else:
        output.print_written(path, f"zeropipe train {path} --dry-run shows what it does")


def _parted(arguments: tuple[str, ...]) -> tuple[str | None, list[str]]:
    """The file and the fields, which may stand in any order."""
    from zeropipe.train.config.overrides import takes_value

    path: str | None = None
    overrides: list[str] = []
    rest = list(arguments)
    while rest:
        one = rest.pop(0)
        if one.startswith("-") and len(one) > 1:
            overrides.append(one)
            if rest and takes_value(one, rest[0]):
                overrides.append(rest.pop(0))
        elif path is None:
            path = one
        else:
            raise ConfigError(f"{one}: {path} is the training file already; fields are given like --mesh.pp 4")
    return path, overrides
