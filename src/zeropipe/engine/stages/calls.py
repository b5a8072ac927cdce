"""The tensors in the call of a layer, by their place among its arguments."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from torch import Tensor

Place = tuple[Any, ...]  # ("args", 0), ("kwargs", "residual"), and on into tuples, lists and dicts
Call = tuple[tuple[Any, ...], dict[str, Any]]


def tensors_in(args: Any, kwargs: Any) -> dict[Place, Tensor]:
    """All tensors of a call."""
    return {place: value for place, value in _walk((), _named(args, kwargs)) if isinstance(value, Tensor)}


def replaced(args: Any, kwargs: Any, values: Mapping[Place, Tensor]) -> Call:
    """The same call with other values at some places."""
    call = _replace((), _named(args, kwargs), values)
    return call["args"], call["kwargs"]


def _named(args: Any, kwargs: Any) -> dict[str, Any]:
    return {"args": tuple(args), "kwargs": dict(kwargs)}


def _walk(place: Place, value: Any) -> Iterator[tuple[Place, Any]]:
    yield place, value
    for key, inner in _parts(value):
        yield from _walk((*place, key), inner)


def _replace(place: Place, value: Any, values: Mapping[Place, Tensor]) -> Any:
    if place in values:
        return values[place]
    if not any(other[: len(place)] == place for other in values):
        return value
    if isinstance(value, dict):
        return {key: _replace((*place, key), inner, values) for key, inner in value.items()}
    return type(value)(_replace((*place, key), inner, values) for key, inner in _parts(value))


def _parts(value: Any) -> Iterator[tuple[Any, Any]]:
    if type(value) is dict:
        yield from value.items()
    elif type(value) in (tuple, list):
        yield from enumerate(value)
