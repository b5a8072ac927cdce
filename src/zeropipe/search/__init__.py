"""Schedules found for given costs and limits, and how far they are from the best possible."""

from __future__ import annotations

import sys
from types import ModuleType
from typing import Any


class _Callable(ModuleType):
    """`zp.search` is this folder and the function: it can be called however it was imported first."""

    def __call__(self, **options: Any) -> Any:
        from zeropipe.search.search import search

        return search(**options)


sys.modules[__name__].__class__ = _Callable
