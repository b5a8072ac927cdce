"""Which values of a parameter `make test` runs; `make test-full` runs the rest."""

from collections.abc import Callable, Iterable
from typing import Any

import pytest


def partly(values: Iterable[Any], common: Callable[[Any], bool] | Iterable[Any]) -> list[Any]:
    """All values for parametrize (tuples for several parameters), those that are not common marked `full`."""
    chosen = common if callable(common) else frozenset(common).__contains__
    return [
        pytest.param(
            *(value if isinstance(value, tuple) else (value,)), marks=() if chosen(value) else pytest.mark.full
        )
        for value in values
    ]
