"""`train`: train a model as a training file says."""

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
from zeropipe.cli.options import option
from zeropipe.cli.train_output import print_outcome, print_preview
from zeropipe.core.mesh import parse_mesh
from zeropipe.errors import ConfigError, MissingExtra

DEFAULT_FILE = "run.toml"


@opt.command(
    short_help="Train a model.",
    context_settings={"ignore_unknown_options": True},
    options_metavar="[--TABLE.FIELD VALUE].. [OPTIONS]",
)
@click.argument("arguments", nargs=-1, type=click.UNPROCESSED, metavar="[RUN.TOML]")
@opt.dry_run
@option("--print", "print_fields", is_flag=True, help="Print all fields with their values; start nothing.")
@option("--init", is_flag=True, help="Write a training file that explains every field; start nothing.")
@opt.mesh
@opt.json
def train(
    arguments: tuple[str, ...], dry_run: bool, print_fields: bool, init: bool, mesh: str | None, as_json: bool
) -> None:
    """Train a model as a training file says. Options named after its fields override them.

    \b
    zeropipe train --init run.toml
    zeropipe train run.toml --dry-run
    zeropipe train run.toml --schedule.name zbv --mesh.pp 4 --engine.compile
    torchrun --nproc-per-node 8 -m zeropipe train run.toml --mesh.pp 8

    Starts local processes, or uses those of torchrun. docs/configuration.md describes all fields. --mesh pp=4,tp=2 is
    short for --mesh.pp 4 --mesh.tp 2.
    """
    if find_spec("pydantic") is None:
        raise MissingExtra("pydantic", "train")
    from zeropipe.train.config.read import read_run
    from zeropipe.train.config.rules import check_run, torchrun_world_size

    path, overrides = _separate(arguments)
    for name, size in parse_mesh(mesh) if mesh else ():
        overrides += [f"--mesh.{name}", str(size)]
    if init:
        _init(path or DEFAULT_FILE, overrides, as_json)
        return
    with _report_once():
        config = read_run(path, overrides)
    if print_fields:
        from zeropipe.train.config.write import to_toml

        print(config.model_dump_json(indent=2) if as_json else to_toml(config), end="\n" if as_json else "")
        return
    with _report_once():
        check_run(config, torchrun_world_size(), starts=not dry_run)
    if dry_run:
        from zeropipe.train.preview import preview

        print_preview(preview(config), as_json)
        return
    from zeropipe.engine import require_torch

    require_torch()
    from zeropipe.train.start import start

    outcome = start(config)
    if outcome is None:  # a rank of torchrun that is not the first
        return
    if as_json:
        output.print_json(dataclasses.asdict(outcome))
    else:
        print_outcome(outcome, config.train.output)


@contextmanager
def _report_once() -> Iterator[None]:
    """Report an error on one process of each machine: all processes of torchrun find the same."""
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
        raise ConfigError(f"{path} exists already: use another name, or remove it")
    write_whole(path, format_example(overrides, Path(path).parent))
    if as_json:
        output.print_json({"file": path})
    else:
        output.print_written(path, f"zeropipe train {path} --dry-run shows the plan")


def _separate(arguments: tuple[str, ...]) -> tuple[str | None, list[str]]:
    """Separate the training file from fields, in any order."""
    from zeropipe.train.config.overrides import takes_value

    path: str | None = None
    overrides: list[str] = []
    rest = list(arguments)
    while rest:
        argument = rest.pop(0)
        if argument.startswith("-") and len(argument) > 1:
            overrides.append(argument)
            if rest and takes_value(argument, rest[0]):
                overrides.append(rest.pop(0))
        elif path is None:
            path = argument
        else:
            raise ConfigError(f"{argument}: {path} is the training file already; write fields like --mesh.pp 4")
    return path, overrides
