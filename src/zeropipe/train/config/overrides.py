"""Fields on the command line, by their dotted names: --mesh.pp 4, --engine.compile, --schedule.layers=2,3,3,2."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from pydantic.fields import FieldInfo

from zeropipe.core.formats.parse import parse_number, parse_toml
from zeropipe.errors import ConfigError, short
from zeropipe.train.config.fields import (
    choices_of,
    field_names,
    find_field,
    is_optional,
    is_switch,
    suggest_field,
    switch_values,
    value_types,
)


def takes_value(flag: str, following: str) -> bool:
    """Whether the argument that follows a flag is its value."""
    if "=" in flag or (following.startswith("--") and len(following) > 2):
        return False
    field = find_field(_field_name(flag))
    return field is None or not is_switch(field) or following in switch_values(field)


def parse_overrides(arguments: Sequence[str]) -> dict[str, Any]:
    """Parse arguments into {dotted name: value}."""
    values: dict[str, Any] = {}
    rest = list(arguments)
    while rest:
        flag, equals, text = rest.pop(0).partition("=")
        name = _field_name(flag)
        if not flag.startswith("--") or not name:
            raise ConfigError(f"{short(flag)}: must be --table.field value, like --mesh.pp 4")
        field = find_field(name)
        if field is None:
            raise ConfigError(f"unknown field {flag}: {suggest_field(name, field_names(), '--')}")
        if name in values:
            raise ConfigError(f"{flag} appears twice; leave out one of them")
        if not equals:
            if rest and takes_value(flag, rest[0]):
                text = rest.pop(0)
            elif is_switch(field):
                text = "true"
            else:
                raise ConfigError(f"{flag} has no value; use it like {flag} {_example_value(field)}")
        if text == "none" and is_optional(field):
            values[name] = None
        else:
            values[name] = _parse_value(text, field, is_option=name.startswith("schedule.options."))
    return values


def merge_overrides(table: dict[str, Any], overrides: dict[str, Any]) -> dict[str, Any]:
    """A file's data with the values of overrides. One inside of a value that is not a table is dropped."""
    result = dict(table)
    for name, value in overrides.items():
        *path, last = name.split(".")
        inner = result
        for key in path:
            found = inner.get(key, {})
            if not isinstance(found, dict):  # the validation reports it
                break
            inner[key] = dict(found)
            inner = inner[key]
        else:
            inner[last] = value
    return result


def _field_name(flag: str) -> str:
    return flag.removeprefix("--").replace("-", "_")


def _parse_value(text: str, field: FieldInfo, is_option: bool) -> Any:
    """The value of a text. One that is not of the field's type stays a text, which the validation reports."""
    types = value_types(field)
    if is_option or text[:1] in ("[", "{"):
        try:
            return parse_toml(f"value = {text}")["value"]
        except (ValueError, KeyError):
            return text
    if tuple in types:
        items = [item.strip() for item in text.split(",")]
        if str in types:
            return text if len(items) == 1 else items
        return [parse_number(item) for item in items]
    if types & {int, float}:
        return parse_number(text)
    if is_switch(field):
        return switch_values(field).get(text, text)
    return text


def _example_value(field: FieldInfo) -> str:
    types = value_types(field)
    if choices_of(field):
        return choices_of(field)[0]
    if tuple in types and str not in types:
        return "2,3,3,2"
    return "4" if int in types else "0.1" if float in types else "x"
