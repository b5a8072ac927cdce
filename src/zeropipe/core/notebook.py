"""The hook through which a notebook draws a Timeline. core draws nothing: the top-level package sets it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

render_html: Callable[[Any], str] | None = None  # of a Timeline
