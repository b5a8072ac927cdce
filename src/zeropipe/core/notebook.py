"""How a notebook shows a Timeline. core draws nothing: the package, which knows all its parts, puts the drawing in."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

drawing: Callable[[Any], str] | None = None  # of a Timeline, as HTML
