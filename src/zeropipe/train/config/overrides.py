"""Fields given on the command line, by their dotted names: --mesh.pp 4, --engine.compile, --schedule.layers=2,3,3,2."""

from __future__ import annotations

from collections.abc import Sequence
from difflib import get_close_matches
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from pydantic import BaseModel
from pydantic.fields import FieldInfo

from zeropipe.core.formats.parse import number_or_text, parse_toml
from zeropipe.errors import ConfigError, short
from zeropipe.train.config.models import RunConfig


def takes_value(flag: str, following: str) -> bool:
    """Whether what follows a flag on the command line is its value."""
    if "=" in flag or (following.startswith("--") and len(following) > 2):
        return False
    field = find_field(flag.removeprefix("--").replace("-", "_"))
    return field is None or kinds_of(field) != {bool} or following in ("true", "false")


def parse_overrides(given: Sequence[str]) -> dict[str, Any]:
    """{dotted name: value} of arguments."""
    values: dict[str, Any] = {}
    rest = list(given)
    while rest:
        flag, equals, text = rest.pop(0).partition("=")
        name = flag.removeprefix("--").replace("-", "_")
        if not flag.startswith("--") or not name:
            raise ConfigError(f"{short(flag)}: fields are given as --table.field value, like --mesh.pp 4")
        field = find_field(name)
        if field is None:
            raise ConfigError(f"unknown field {flag}: {hint(name, all_names(), '--')}")
        if name in values:
            raise ConfigError(f"{flag} is given twice: leave one of them out")
        kinds = kinds_of(field)
        if not equals:
            if rest and takes_value(flag, rest[0]):
                text = rest.pop(0)
            elif kinds == {bool}:
                text = "true"
            else:
                raise ConfigError(f"{flag} has no value: give it one, like {flag} {example(field)}")
        free = name.startswith("schedule.options.")
        values[name] = None if text == "none" and is_optional(field) else value_of(text, kinds, free)
    return values


def merged(table: dict[str, Any], overrides: dict[str, Any]) -> dict[str, Any]:
    """A file's table with other values; those in its way that are no tables are left for the models to refuse."""
    result = dict(table)
    for name, value in overrides.items():
        *path, last = name.split(".")
        place = result
        for part in path:
            inner = place.get(part, {})
            if not isinstance(inner, dict):
                break
            place[part] = dict(inner)
            place = place[part]
        else:
            place[last] = value
    return result


def tables() -> dict[str, type[BaseModel]]:
    """The tables of a file by name."""
    found = {}
    for name, field in RunConfig.model_fields.items():
        found[name] = next(kind for kind in _members(field.annotation) if kind is not NoneType)
    return found


def all_names() -> list[str]:
    """The dotted names of all fields."""
    return [f"{table}.{name}" for table, model in tables().items() for name in model.model_fields]


def find_field(name: str) -> FieldInfo | None:
    """The field of a dotted name; an option of the schedule counts as one of its table."""
    table, _, inner = name.partition(".")
    model = tables().get(table)
    if model is None:
        return None
    if table == "schedule" and inner.startswith("options.") and inner.count(".") == 1:
        inner = "options"
    return model.model_fields.get(inner)


def hint(name: str, known: Sequence[str], mark: str = "") -> str:
    """The nearest known name, also if only its last part was given."""
    near = get_close_matches(name, known, n=1) or [one for one in known if one.split(".")[-1] == name]
    if not near:
        lasts = {one.split(".")[-1]: one for one in known}
        near = [lasts[last] for last in get_close_matches(name.split(".")[-1], lasts, n=1)]
    return f"did you mean {mark}{near[0]}?" if near else "`zeropipe train --init` shows all"


def kinds_of(field: FieldInfo) -> set[Any]:
    """What a field may be, Annotated and None taken off: {int}, {str, tuple}, {bool}, {Literal}, ..."""
    return {get_origin(kind) or kind for kind in _members(field.annotation)} - {NoneType}


def is_optional(field: FieldInfo) -> bool:
    """Whether it may be without a value."""
    return NoneType in _members(field.annotation)


def choices_of(field: FieldInfo) -> tuple[str, ...]:
    """The words that it may be; none if it is no choice."""
    literals = [kind for kind in _members(field.annotation) if get_origin(kind) is Literal]
    return get_args(literals[0]) if literals else ()


def _members(annotation: Any) -> list[Any]:
    if get_origin(annotation) is Annotated:
        return _members(get_args(annotation)[0])
    if get_origin(annotation) in (Union, UnionType):
        return [kind for member in get_args(annotation) for kind in _members(member)]
    return [annotation]


def value_of(text: str, kinds: set[Any], free: bool = False) -> Any:
    """A value from its text. What cannot be read as the field's kind stays a text, which the models refuse."""
    if free or text[:1] in ("[", "{"):
        try:
            return parse_toml(f"value = {text}")["value"]
        except (ValueError, KeyError):
            return text
    if tuple in kinds:
        parts = [part.strip() for part in text.split(",")]
        if str in kinds:
            return text if len(parts) == 1 else parts
        return [number_or_text(part) for part in parts]
    if kinds & {int, float}:
        return number_or_text(text)
    if kinds == {bool}:
        return {"true": True, "false": False}.get(text, text)
    return text


def example(field: FieldInfo) -> str:
    """A value to show."""
    kinds = kinds_of(field)
    if choices_of(field):
        return choices_of(field)[0]
    return (
        "2,3,3,2" if tuple in kinds and str not in kinds else "4" if int in kinds else "0.1" if float in kinds else "x"
    )
