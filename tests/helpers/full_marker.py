"""Parameters of which `make test` runs a part; `make test-full` runs the rest."""

from collections.abc import Callable, Iterable
from typing import Any

import pytest


def mark_rest_full(values: Iterable[Any], common: Callable[[Any], bool] | Iterable[Any]) -> list[Any]:
    """All values for `parametrize` (tuples for several parameters); those that are not common are marked `full`."""
    is_common = common if callable(common) else frozenset(common).__contains__
    return [
        pytest.param(
            *(value if isinstance(value, tuple) else (value,)), marks=() if is_common(value) else pytest.mark.full
        )
        for value in values
    ]
