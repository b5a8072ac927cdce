"""Options with old names, and commands whose `--help` shows their options in groups."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import click

SINGLE_COSTS = "Single costs"  # the group that `--help` lists by name only; `--help-costs` describes it


class Option(click.Option):
    """An option of one meaning in all commands.

    `group` is its heading in `--help`. `field` is the field of the training file with the same meaning. `old_names` are
    accepted, but not shown; a name that has another meaning in other commands has a note, which is printed on stderr.
    """

    def __init__(
        self, *args: Any, group: str = "", field: str = "", old_names: Mapping[str, str] | None = None, **settings: Any
    ) -> None:
        super().__init__(*args, **settings)
        if self.metavar is None and isinstance(self.type, (click.IntRange, click.FloatRange)):
            self.metavar = "N" if isinstance(self.type, click.IntRange) else "X"  # click writes INTEGER RANGE
        self.group, self.field, self.old_names = group, field, dict(old_names or {})

    def add_to_parser(self, parser: Any, ctx: click.Context) -> None:
        shown = self.opts, self.secondary_opts
        off = [name for name in self.old_names if name.startswith("--no-") and self.secondary_opts]
        self.opts = [*self.opts, *(name for name in self.old_names if name not in off)]
        self.secondary_opts = [*self.secondary_opts, *off]
        super().add_to_parser(parser, ctx)
        self.opts, self.secondary_opts = shown

    def print_note(self, args: list[str]) -> None:
        """Print the note of an old name among the arguments."""
        for name, note in self.old_names.items():
            if note and any(arg == name or arg.startswith(f"{name}=") for arg in args):
                print(f"zeropipe: {name}: {note}", file=sys.stderr)


class Command(click.Command):
    """A command with options in groups."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        before = list(args[: args.index("--")] if "--" in args else args)
        rest = super().parse_args(ctx, args)
        for option in self.params:
            if isinstance(option, Option):
                option.print_note(before)
        return rest

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        groups: dict[str, list[click.Parameter]] = {}
        for param in self.get_params(ctx):
            if not isinstance(param, click.Argument):
                groups.setdefault(getattr(param, "group", ""), []).append(param)
        for group, params in groups.items():
            if group != SINGLE_COSTS:
                _write_group(ctx, formatter, group or "Options", params)
        if SINGLE_COSTS in groups:
            names = [param.opts[0] for param in groups[SINGLE_COSTS]]
            with formatter.section(f"{SINGLE_COSTS}, which override --costs; see --help-costs"):
                for line in _fill(names, formatter.width - formatter.current_indent):
                    formatter.write_text(line)


class Group(click.Group):
    """A group of commands, listed in the order in which they are used."""

    command_class = Command

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(self.commands)


def print_cost_help(ctx: click.Context, param: click.Parameter, value: bool) -> None:
    """Describe the options of single costs, and exit."""
    if not value or ctx.resilient_parsing:
        return
    formatter = ctx.make_formatter()
    costs = [param for param in ctx.command.get_params(ctx) if getattr(param, "group", "") == SINGLE_COSTS]
    _write_group(ctx, formatter, SINGLE_COSTS, costs)
    click.echo(formatter.getvalue().rstrip())
    ctx.exit()


def _write_group(
    ctx: click.Context, formatter: click.HelpFormatter, title: str, params: list[click.Parameter]
) -> None:  # fmt: skip
    records = [record for param in params if (record := param.get_help_record(ctx)) is not None]
    if records:
        with formatter.section(title):
            formatter.write_dl(records)


def is_set(name: str) -> bool:
    """Whether an option of the running command is on the command line, rather than a default."""
    source = click.get_current_context().get_parameter_source(name)
    return source is click.core.ParameterSource.COMMANDLINE


def _fill(words: Sequence[str], width: int) -> Iterator[str]:
    """Lines of whole words: others would be divided at their hyphens."""
    line = ""
    for word in words:
        if line and len(line) + 1 + len(word) > width:
            yield line
            line = ""
        line = f"{line} {word}".lstrip()
    if line:
        yield line
