"""Fields of a training file by dotted name: their types, and the rule of each in words."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
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
    """The values of a field with a fixed set of them; else none."""
    literals = [kind for kind in _union_members(field.annotation) if get_origin(kind) is Literal]
    return get_args(literals[0]) if literals else ()


def _union_members(annotation: Any) -> list[Any]:
    if get_origin(annotation) is Annotated:
        return _union_members(get_args(annotation)[0])
    if get_origin(annotation) in (Union, UnionType):
        return [kind for member in get_args(annotation) for kind in _union_members(member)]
    return [annotation]


def describe_rule(field: FieldInfo, value: Any = None) -> str:
    """What a field must be: `a positive integer`, `one of a, b`. An upper limit is named if `value` exceeds it."""
    types = value_types(field)
    if choices_of(field):
        return f"one of {', '.join(choices_of(field))}"
    if types == {bool}:
        return "true or false"
    if types == {dict}:
        return "a table, like {group_size = 4}"
    if tuple in types and str in types:
        return "a string or a list of strings"
    if tuple in types:
        return _describe_list(field)
    if types & {int, float}:
        return _describe_number(_field_limits(field), int in types, value)
    return "a string"


def _describe_list(field: FieldInfo) -> str:
    annotations = (field.annotation, *get_args(field.annotation))
    members = next(get_args(kind) for kind in annotations if get_origin(kind) is tuple)
    if Ellipsis in members:
        number = _describe_number(_annotated_limits(members[0]), True).removeprefix("a ")
        return f"a list of {number}s, like [2, 3, 3, 2]"
    number = _describe_number(_annotated_limits(members[0]), False).removeprefix("a number ")
    return f"{len(members)} numbers {number}"


def _describe_number(limits: Mapping[str, float], is_integer: bool, value: Any = None) -> str:
    """`a positive integer`, `an integer of at least 2`, `a number above 0 and at most 1`."""
    lower = "gt" if "gt" in limits else "ge"
    low = limits.get(lower)
    over = "le" in limits and isinstance(value, (int, float)) and value > limits["le"]
    upper = "lt" if "lt" in limits else "le" if "le" in limits and (over or not is_integer) else None
    noun = "integer" if is_integer else "number"
    if upper is None and low is not None:
        if (lower, low) in (("gt", 0), ("ge", 1)):
            return f"a positive {noun}"
        return f"a non-negative {noun}" if low == 0 else f"an {noun} of at least {low:g}"
    article = "an" if is_integer else "a"
    if low is None or upper is None:
        return f"{article} {noun}"
    high = f"{limits[upper]:,.0f}" if limits[upper] == int(limits[upper]) else f"{limits[upper]:g}"
    if (lower, upper) == ("ge", "le"):
        return f"{article} {noun} from {low:g} to {high}"
    low_words = f"above {low:g}" if lower == "gt" else f"of at least {low:g}"
    return f"{article} {noun} {low_words} and {'below' if upper == 'lt' else 'at most'} {high}"


def _field_limits(field: FieldInfo) -> dict[str, float]:
    limits = _limits_in(field.metadata)
    for member in get_args(field.annotation):
        limits |= _annotated_limits(member)
    return limits


def _annotated_limits(annotation: Any) -> dict[str, float]:
    """The limits of an Annotated number."""
    limits: dict[str, float] = {}
    for one in get_args(annotation)[1:] if get_origin(annotation) is Annotated else ():
        limits |= _limits_in(one.metadata if isinstance(one, FieldInfo) else [one])
    return limits


def _limits_in(metadata: Sequence[Any]) -> dict[str, float]:
    names = ("gt", "ge", "lt", "le")
    return {name: getattr(one, name) for one in metadata for name in names if hasattr(one, name)}
