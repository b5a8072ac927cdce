"""Writes the tables in docs/cli.md: `python docs/cli.py [file]`."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import click

from zeropipe.cli.command import SINGLE_COSTS, Option
from zeropipe.cli.main import app

FILE = Path(__file__).parent / "cli.md"
OLD_NAMES = (
    "They work as before, but `--help` omits them. The values `bf16` of `--dtype`, and `even` and `balanced` of "
    "`--layers`, are old, too: use `bfloat16`, and `--balance even` or `time`."
)
MARK = "<!-- from here on written by docs/cli.py -->\n"


class Use(NamedTuple):
    """An option of a command."""

    command: str
    option: Option


def commands(group: click.Group = app, prefix: str = "") -> Iterator[tuple[str, click.Command]]:
    """All commands with their names, like `trace compare`."""
    for name, command in group.commands.items():
        if isinstance(command, click.Group):
            yield from commands(command, f"{name} ")
        else:
            yield f"{prefix}{name}", command


def uses() -> list[Use]:
    """All options of all commands, but for hidden ones and `--help`."""
    found = []
    for name, command in commands():
        for param in command.params:
            if isinstance(param, click.Option) and not param.hidden:
                assert isinstance(param, Option), f"{name} {param.opts}: created without zeropipe.cli.options.option"
                found.append(Use(name, param))
    return found


def written() -> str:
    """Everything behind the mark."""
    by_name: dict[str, list[Use]] = {}
    for use in uses():
        by_name.setdefault(_new_name(use.option), []).append(use)
    options = {name: found for name, found in sorted(by_name.items()) if found[0].option.group != SINGLE_COSTS}
    costs = {name: found for name, found in by_name.items() if name not in options}
    with_costs = _code(dict.fromkeys(use.command for found in costs.values() for use in found))
    parts = [
        "## Options\n",
        "| option | value | default | training file | commands | |\n|---|---|---|---|---|---|",
        *(_row(found) for found in options.values()),
        f"\n## Single costs\n\nOf {with_costs}, where they override `--costs`.\n",
        "| option | value | |\n|---|---|---|",
        *(f"| {_names(one)} | {_value(one)} | {one.help} |" for (_, one), *_ in costs.values()),
        f"\n## Old names\n\n{OLD_NAMES}\n",
        "| old | new | commands |\n|---|---|---|",
        *_old_names(),
    ]  # fmt: skip
    return "\n".join(parts) + "\n"


def _row(found: list[Use]) -> str:
    option = found[0].option
    field = f"`{option.field}`" if option.field else ""
    names = _code(use.command for use in found)
    return f"| {_names(option)} | {_value(option)} | {_default(option)} | {field} | {names} | {option.help} |"


def _names(option: Option) -> str:
    both = [*option.opts, *option.secondary_opts]
    return ", ".join(f"`{name}`" for name in sorted(both, key=lambda name: not name.startswith("--")))


def _value(option: Option) -> str:
    if option.is_flag:
        return ""
    choices = getattr(option.type, "choices", None)
    return _code(choices) if choices else f"`{option.metavar or option.type.name.upper()}`"


def _default(option: Option) -> str:
    if option.is_flag and option.secondary_opts and isinstance(option.default, bool):
        return f"`{(option.opts if option.default else option.secondary_opts)[0]}`"
    has_default = option.show_default and option.default is not None and option.default is not False
    return f"`{option.default}`" if has_default else ""


def _code(names: object) -> str:
    return ", ".join(f"`{name}`" for name in names)  # type: ignore[attr-defined]


def _old_names() -> list[str]:
    found: dict[tuple[str, str], list[str]] = {}
    for command, option in uses():
        for old in option.old_names:
            found.setdefault((old, _new_name(option, old)), []).append(command)
    return [f"| `{old}` | `{new}` | {_code(names)} |" for (old, new), names in sorted(found.items())]


def _new_name(option: Option, old: str = "") -> str:
    """The long name of an option; of one that switches off, for an old name like `--no-memory`."""
    names = option.secondary_opts if old.startswith("--no-") and option.secondary_opts else option.opts
    return next(name for name in names if name.startswith("--"))


def main() -> None:
    target = Path(sys.argv[1]) if len(sys.argv) > 1 else FILE
    text = FILE.read_text().partition(MARK)[0]
    target.write_text(text + MARK + "\n" + written())


if __name__ == "__main__":
    main()
