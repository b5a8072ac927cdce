"""Steps that were measured action by action, for the report."""

from __future__ import annotations

from zeropipe.core.timeline import Timeline
from zeropipe.train.config.models import RunConfig


class Records:
    """The recorded steps of a run."""

    def __init__(self, config: RunConfig, is_first: bool) -> None:
        self._config, self._is_first = config, is_first

    def add(self, step: int, timeline: Timeline, seconds: float) -> None:
        """A step that was recorded."""

    def write(self, final: bool = False) -> None:
        """The page of all of them."""
