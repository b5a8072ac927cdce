"""Flags that several commands share. They reach a command as keywords, which `request_of` and `looks_of` understand."""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import partial
from typing import Any, TypeVar

import click
from click.core import ParameterSource

from zeropipe.core.formats.parse import parse_value
from zeropipe.core.placement import MAX_WEIGHT_PARTS
from zeropipe.errors import ConfigError, short

Command = TypeVar("Command", bound=Callable[..., Any])


def is_told(name: str) -> bool:
    """Whether an option of the running command is on the command line, rather than a default."""
    return click.get_current_context().get_parameter_source(name) is ParameterSource.COMMANDLINE


class Counts(click.ParamType):
    """Whole numbers from 1 on: one, or with `several` more of them like 16,32,64. Gives a tuple, each number once."""

    name = "n"

    def __init__(self, several: bool) -> None:
        self.several = several
        self.name = "n[,n..]" if several else "n"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        if isinstance(value, tuple):
            return value
        name = param.name if param else "size"
        try:
            numbers = tuple(dict.fromkeys(int(part) for part in value.split(",")))
        except ValueError:
            rule = "must be positive integers, like 16,32" if self.several else "must be a positive integer"
            raise ConfigError(f"{name}={short(value)}: {rule}") from None
        if min(numbers) < 1:
            raise ConfigError(f"{name}={min(numbers)}: must be a positive integer")
        if len(numbers) > 1 and not self.several:
            raise ConfigError(f"{name}={short(value)}: one is needed here; `zeropipe compare` takes several")
        return numbers


class Bytes(float):
    """An amount that was given with a unit of bytes."""


class Size(click.ParamType):
    """An amount of memory: a number, or one with a unit of bytes like 40GB or 32GiB."""

    name = "size"

    def __init__(self, of: str = "memory_limit") -> None:
        self._of = of

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        if not isinstance(value, str):
            return value
        match = re.fullmatch(r"\s*([0-9.eE+-]+)\s*(?:([KMGT]?)(i?)B)?\s*", value)
        try:
            amount = float(match[1]) if match else None
        except ValueError:
            amount = None
        if match is None or amount is None:
            raise ConfigError(f"{self._of}={short(value)}: a number is needed, or one of bytes like 40GB or 32GiB")
        if match[2] is None:
            return amount
        return Bytes(amount * (1024 if match[3] else 1000) ** " KMGT".index(match[2] or " "))


json_option = click.option("--json", "as_json", is_flag=True, help="Print JSON for machines.")

# flag -> (type, help); a str is one number or several
COSTS: dict[str, tuple[Any, str]] = {
    "f": (str, "Time of a forward: one number, one per part of the model like 1,1,2, or of some like 0=0.8."),
    "i": (str, "Time of an input gradient."),
    "w": (str, "Time of a weight gradient."),
    "b": (str, "Time of a whole backward; i + w by default."),
    "overlap": (str, "Time of an F and a B as one step; f + b by default."),
    "p2p": (float, "Latency of a message between ranks."),
    "bandwidth": (float, "Bytes per unit of time; no limit by default."),
    "message": (str, "Bytes of a message."),
    "node_size": (int, "Ranks per machine."),
    "inter_p2p": (float, "Latency between machines; p2p by default."),
    "inter_bandwidth": (float, "Bandwidth between machines; bandwidth by default."),
    "blocking": (bool, "A sender waits for its transfer."),
    "blocking_ends": (bool, "A sender waits for its transfer in warm-up and cool-down only, as in Megatron-LM."),
    "serial_links": (bool, "One transfer at a time in each direction of a link."),
    "activation": (str, "Memory a forward takes."),
    "stash": (str, "Memory kept from I until W; all of it by default."),
    "weights": (str, "Constant memory: parameters, gradients, optimizer."),
    "shards": (
        click.Choice(["keep", "regather"]),
        "Stages are sharded: weights are gathered once per step (keep), or for every microbatch.",
    ),
    "unshard": (str, "Time to gather a stage; whole_weights / shard_bandwidth by default."),
    "reduce": (str, "Time to sum a stage's gradients; whole_gradients / shard_bandwidth by default."),
    "whole_weights": (str, "Memory of gathered weights."),
    "whole_gradients": (str, "Memory of gradients until they are reduced."),
    "shard_bandwidth": (float, "Bytes per unit of time between ranks that share stages."),
    "units": (int, "Pieces in which a stage is gathered and reduced."),
    "memory_limit": (Size(), "Memory of a rank, like 40 or 40GB: what needs more cannot win."),
}


def size_options(command: Command, several: bool = False) -> Command:
    """--ranks, --microbatches, --stages-per-rank and --option."""
    many = "; several are compared" if several else ""
    counts = Counts(several)
    return _with(
        command,
        click.option("--ranks", "-p", type=counts, help=f"Pipeline ranks{many}."),
        click.option("--microbatches", "-m", type=counts, help=f"Microbatches{many}."),
        click.option(
            "--stages-per-rank", "-v", type=counts, help=f"Stages on each rank; the schedule's own by default{many}."
        ),
        click.option(
            "--option", "-O", "pairs", multiple=True, metavar="NAME=VALUE", help="A schedule's own knob: group_size=4."
        ),
    )


sweep_options = partial(size_options, several=True)


def cost_options(command: Command) -> Command:
    """--costs FILE, --per, --weight-parts, the cut of a model whose layers have costs, and one flag per cost."""
    singles = []
    for name, (kind, text) in COSTS.items():
        flag = "--" + name.replace("_", "-")
        if kind is bool:
            singles.append(click.option(flag, name, is_flag=True, default=None, help=text))
        else:
            singles.append(click.option(flag, name, type=kind, metavar="X", help=text))
    return _with(
        command,
        click.option(
            "--costs", "costs_file", metavar="FILE",
            help="A .toml or .json file of costs, or a recorded timeline (run --timeline x.json); flags override it.",
        ),
        click.option(
            "--per", type=click.Choice(["rank", "stage"]),
            help="What costs are of: a rank's part of the model, shared out over its stages (the default), or a stage.",
        ),
        click.option(
            "--weight-parts", type=click.IntRange(1, MAX_WEIGHT_PARTS),
            help="Cut every W into parts and fill gaps with them.",
        ),
        click.option("--ac", help="Of costs of layers: those of this checkpointing, like full; the first by default."),
        click.option("--microbatch-size", type=click.IntRange(1), help="Of these: those of so many sequences."),
        click.option("--tp", type=click.IntRange(1), help="Of these: those of this tensor parallelism."),
        click.option(
            "--layers", metavar="N,N,..",
            help="Of these: layers of each stage, like 2,3,3,2, `even` (the default), or `balanced` by their times.",
        ),
        *singles,
    )  # fmt: skip


def look_options(command: Command) -> Command:
    """How a picture looks: --width, --theme, --labels, --memory, --legend, --title, --dpi."""
    return _with(
        command,
        click.option("--title", help="Of a page or figure."),
        click.option("--width", type=float, help="Points of an .svg, .png or .pdf (72 to the inch)."),
        click.option("--dpi", type=float, help="Dots per inch of a .png."),
        click.option(
            "--theme", type=click.Choice(["light", "dark"]),
            help="Of a page or figure; without it a page follows the system, a figure is light.",
        ),
        click.option("--labels", type=click.Choice(["microbatch", "action", "none"]), help="What the boxes say."),
        click.option("--memory/--no-memory", default=None, help="Memory curves."),
        click.option("--legend/--no-legend", default=None, help="Legend of a figure."),
    )  # fmt: skip


def _with(command: Command, *decorators: Callable[[Command], Command]) -> Command:
    """The command with these options, in this order in its help."""
    for decorate in reversed(decorators):
        command = decorate(command)
    return command


LOOKS = ("title", "width", "dpi", "theme", "labels", "memory", "legend")


def looks_of(given: dict[str, Any]) -> dict[str, Any]:
    """Takes out of a command's keywords what `zp.draw` is to be given."""
    looks = {name: given.pop(name) for name in LOOKS}
    return {name: value for name, value in looks.items() if value is not None}


def numbers(flag: str, text: str) -> float | tuple[float, ...] | dict[str, float]:
    """`1`, `1,1,2`, or a table of some: `0=0.8,default=2`."""
    parts = text.split(",")
    try:
        if "=" in text:
            pairs = [part.split("=") for part in parts]
            return {key.strip(): float(value) for key, value in pairs}
        values = tuple(map(float, parts))
    except ValueError:
        raise ConfigError(f"{flag} {short(text)}: write a number, several like 1,1,2, or some like 0=0.8") from None
    return values[0] if len(values) == 1 else values


def settings_of(pairs: tuple[str, ...], flag: str) -> dict[str, Any]:
    """`("group_size=4",)` as {"group_size": 4}."""
    settings: dict[str, Any] = {}
    for pair in pairs:
        name, equals, text = pair.partition("=")
        if not (equals and name and text):
            raise ConfigError(f"{flag} {short(pair)}: write it as name=value, like group_size=4")
        name = name.replace("-", "_")
        if name in settings:
            raise ConfigError(f"{flag} {short(pair)}: {name} is given twice; leave one of them out")
        settings[name] = parse_value(text)
    return settings
