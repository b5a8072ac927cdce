"""What is wrong with a field, in a line: its name, its value, the rule. Where the rule is a field's own, it is read off
the models."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Annotated, Any, get_args, get_origin

from pydantic import ValidationError
from pydantic.fields import FieldInfo

from zeropipe.errors import short
from zeropipe.train.config.overrides import all_names, choices_of, find_field, hint, kinds_of, tables

MOST_LINES = 6


def lines_of(error: ValidationError, overrides: Mapping[str, Any], path: str) -> list[str]:
    """A line for each mistake, at most a handful. Those of the command line are named as they were given."""
    found: dict[str, str] = {}
    for one in error.errors():  # plain dicts
        name = _name(one)
        found.setdefault(name, _line(one, name, overrides, path))
    lines = list(found.values())
    more = len(lines) - MOST_LINES
    return lines if more <= 0 else [*lines[:MOST_LINES], f"and {more} more"]


def _name(error: Mapping[str, Any]) -> str:
    """The dotted name of the field: what comes after it in a place is inside its value."""
    parts = [str(part) for part in error["loc"]]
    return ".".join(parts[:2])


def _line(error: Mapping[str, Any], name: str, overrides: Mapping[str, Any], path: str) -> str:
    field = find_field(name)
    if error["type"] == "missing":
        return f"{path}: {name} is missing: give it in the file, or as --{_missing(name)}"
    if error["type"] == "extra_forbidden":
        known = [*tables(), *all_names()]
        return f"{path}: unknown field {name}: {hint(name, known)}"
    if field is None:  # a whole table
        return f"{path}: {name}={short(error['input'])}: a table is needed, written as [{name}] and its fields"
    value = overrides.get(name, error["input"])
    where = f"--{name} {_plain(value)}" if name in overrides else f"{path}: {name}={short(value)}"
    return f"{where}: {rule_of(field, value)}"


def _missing(name: str) -> str:
    return f"{name} ..." if "." in name else f"{name}.{next(iter(tables()[name].model_fields))} ..."


def _plain(value: Any) -> str:
    """As it stands on a command line."""
    return ",".join(map(str, value)) if isinstance(value, list) else short(value).strip("'")


def rule_of(field: FieldInfo, value: Any = None) -> str:
    """What a field must be."""
    kinds = kinds_of(field)
    if choices_of(field):
        return f"give one of {', '.join(choices_of(field))}"
    if kinds == {bool}:
        return "true or false is needed"
    if kinds == {dict}:
        return "a table is needed, like {group_size = 4}"
    if tuple in kinds:
        if str in kinds:
            return "a text is needed, or a list of them"
        return _list_rule(field)
    if kinds & {int, float}:
        return f"{_range(_bounds(field), int in kinds, value)} is needed"
    return "a text is needed"


def _list_rule(field: FieldInfo) -> str:
    members = next(get_args(kind) for kind in _tuples(field.annotation))
    if Ellipsis in members:
        return f"a list of whole numbers from {_limits(members[0]).get('ge', 0)} on is needed, like [2, 3, 3, 2]"
    return f"{len(members)} numbers are needed, each {_range(_limits(members[0]), False).removeprefix('a number ')}"


def _tuples(annotation: Any) -> list[Any]:
    return [kind for kind in (annotation, *get_args(annotation)) if get_origin(kind) is tuple]


def _bounds(field: FieldInfo) -> dict[str, float]:
    found = _constraints(field.metadata)
    for member in get_args(field.annotation):
        found |= _limits(member)
    return found


def _limits(annotation: Any) -> dict[str, float]:
    """The constraints of an Annotated number."""
    if get_origin(annotation) is not Annotated:
        return {}
    found: dict[str, float] = {}
    for one in get_args(annotation)[1:]:
        found |= _constraints(one.metadata if isinstance(one, FieldInfo) else [one])
    return found


def _constraints(metadata: Sequence[Any]) -> dict[str, float]:
    names = ("gt", "ge", "lt", "le")
    return {name: getattr(one, name) for one in metadata for name in names if hasattr(one, name)}


def _range(limits: Mapping[str, float], whole: bool, value: Any = None) -> str:
    """`a whole number from 1 on`, `a number above 0`, `a number from 0 to 1`."""
    name = "a whole number" if whole else "a number"
    low = f"above {limits['gt']:g}" if "gt" in limits else f"from {limits['ge']:g}" if "ge" in limits else ""
    if "lt" in limits:
        return f"{name} {low} and below {limits['lt']:g}"
    if "le" in limits and (not whole or (isinstance(value, int) and value > limits["le"])):
        return f"{name} {low} {'to' if 'ge' in limits else 'and at most'} {_plain_number(limits['le'])}"
    return f"{name} {low}{' on' if 'ge' in limits else ''}".rstrip()


def _plain_number(value: float) -> str:
    return f"{int(value):,}" if value == int(value) else f"{value:g}"
