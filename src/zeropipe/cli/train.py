"""`train`: a model directory, files and a schedule in; a better model out."""

from __future__ import annotations

import dataclasses
from importlib.util import find_spec

import click

from zeropipe.cli import options as opt
from zeropipe.cli import output
from zeropipe.errors import ConfigError, MissingExtra


@click.command(
    short_help="Train a model.",
    context_settings={"ignore_unknown_options": True},
    options_metavar="[--TABLE.FIELD VALUE].. [OPTIONS]",
)
@click.argument("arguments", nargs=-1, type=click.UNPROCESSED, metavar="[RUN.TOML]")
@opt.json_option
def train(arguments: tuple[str, ...], as_json: bool) -> None:
    """Train the model of a training file; fields of it may be given or changed by their names.

    \b
    zeropipe train run.toml
    zeropipe train run.toml --schedule.name zbv --mesh.pp 4 --engine.compile
    torchrun --nproc-per-node 8 -m zeropipe train run.toml --mesh.pp 8

    Starts local processes, or uses torchrun's.
    """
    if find_spec("pydantic") is None:
        raise MissingExtra("pydantic", "train")
    from zeropipe.train.config.read import read_run

    path, overrides = _parted(arguments)
    config = read_run(path, overrides)
    from zeropipe.engine import require_torch

    require_torch()
    from zeropipe.train.start import start

    outcome = start(config)
    if outcome is not None and as_json:
        output.print_json(dataclasses.asdict(outcome))


def _parted(arguments: tuple[str, ...]) -> tuple[str | None, list[str]]:
    """The file and the fields, which may stand in any order."""
    from zeropipe.train.config.overrides import takes_value

    path: str | None = None
    overrides: list[str] = []
    rest = list(arguments)
    while rest:
        one = rest.pop(0)
        if one.startswith("--"):
            overrides.append(one)
            if rest and takes_value(one, rest[0]):
                overrides.append(rest.pop(0))
        elif path is None:
            path = one
        else:
            raise ConfigError(f"{one}: {path} is the training file already; fields are given like --mesh.pp 4")
    return path, overrides
