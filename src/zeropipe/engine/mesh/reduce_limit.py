"""How many reduces of a rank may run at the same time: the input of each is as large as the gradients of its unit."""

from __future__ import annotations

from typing import Any

from zeropipe.engine import fsdp_private


class ReduceLimit:
    """Makes computation wait for the oldest reduce of a rank where there would be one too many. None: no limit."""

    def __init__(self, limit: int | None) -> None:
        self._limit = limit
        self._pending: list[tuple[Any, Any]] = []  # unit, FSDP's record of its reduce

    def wait(self, room: int = 0) -> None:
        """Before new gradients: wait until there are few enough reduces, and `room` for others."""
        if self._limit is None:
            return
        self._pending = [(unit, state) for unit, state in self._pending if _is_pending(unit, state)]
        while len(self._pending) + room > self._limit:
            fsdp_private.wait_for_reduce(*self._pending.pop(0))

    def add(self, unit: Any) -> None:
        """Count a reduce that was started."""
        known = {id(state) for _, state in self._pending}
        if self._limit is not None:
            self._pending += [(unit, state) for state in fsdp_private.pending_reduces(unit) if id(state) not in known]


def _is_pending(unit: Any, state: Any) -> bool:
    return any(state is other for other in fsdp_private.pending_reduces(unit))


NO_LIMIT = ReduceLimit(None)
