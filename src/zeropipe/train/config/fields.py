"""Fields of a training file by dotted name: their types, and the rule of each in words."""

from __future__ import annotations

from collections.abc import Sequence
from difflib import get_close_matches
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from pydantic import BaseModel
from pydantic.fields import FieldInfo

from zeropipe.train.config.tables import RunConfig


def tables() -> dict[str, type[BaseModel]]:
    """The tables of a training file by name."""
    return {
        name: next(kind for kind in _union_members(field.annotation) if kind is not NoneType)
        for name, field in RunConfig.model_fields.items()
    }


def field_names() -> list[str]:
    """The dotted names of all fields."""
    return [f"{table}.{name}" for table, model in tables().items() for name in model.model_fields]


def find_field(name: str) -> FieldInfo | None:
    """The field of a dotted name. An option of the schedule, schedule.options.x, counts as schedule.options."""
    table, _, inner = name.partition(".")
    model = tables().get(table)
    if model is None:
        return None
    if table == "schedule" and inner.startswith("options.") and inner.count(".") == 1:
        inner = "options"
    return model.model_fields.get(inner)


def suggest_field(name: str, known: Sequence[str], prefix: str = "") -> str:
    """The way out for an unknown name: the most similar known one, by its full name or by its last part."""
    by_last = {one.rpartition(".")[2]: one for one in reversed(known)}
    similar = get_close_matches(name, known, n=1) or [
        by_last[last] for last in get_close_matches(name.rpartition(".")[2], by_last, n=1)
    ]
    return f"did you mean {prefix}{similar[0]}?" if similar else "see `zeropipe train --init` for all fields"


def value_types(field: FieldInfo) -> set[Any]:
    """The types of a field's values, without Annotated and None: {int}, {str, tuple}, {bool}, {Literal}, ..."""
    return {get_origin(kind) or kind for kind in _union_members(field.annotation)} - {NoneType}


def is_optional(field: FieldInfo) -> bool:
    """Whether a field may be None."""
    return NoneType in _union_members(field.annotation)


def choices_of(field: FieldInfo) -> tuple[str, ...]:
    """The values of a field with a fixed set of words; else none."""
    return () if is_switch(field) else _words_of(field)


def is_switch(field: FieldInfo) -> bool:
    """Whether a field is true or false, or a word instead."""
    return value_types(field) <= {bool, Literal} and bool in value_types(field)


def switch_values(field: FieldInfo) -> dict[str, bool | str]:
    """The values of a switch by their text on the command line."""
    return {"true": True, "false": False} | {word: word for word in _words_of(field)}


def _words_of(field: FieldInfo) -> tuple[str, ...]:
    literals = [kind for kind in _union_members(field.annotation) if get_origin(kind) is Literal]
    return get_args(literals[0]) if literals else ()


def _union_members(annotation: Any) -> list[Any]:
    if get_origin(annotation) is Annotated:
        return _union_members(get_args(annotation)[0])
    if get_origin(annotation) in (Union, UnionType):
        return [kind for member in get_args(annotation) for kind in _union_members(member)]
    return [annotation]


def describe_rule(field: FieldInfo) -> str:
    """What a field must be, in words: `a positive integer`, `one of a, b`."""
    if choices_of(field):
        return f"one of {', '.join(choices_of(field))}"
    members = get_args(field.annotation) if is_optional(field) else ()
    metadata = [*field.metadata, *(one for member in members for one in get_args(member)[1:])]
    return next((one for one in metadata if isinstance(one, str)), "a string")
