"""The order of collectives that all processes which share stages have agreed on."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Sequence
from itertools import zip_longest

from zeropipe.core.collectives import Collective
from zeropipe.errors import EngineError


class AgreedOrder:
    """Checks every collective of a step before it is called: another one than agreed would be paired wrongly."""

    def __init__(self, order: Sequence[Collective]) -> None:
        self._order, self._next = order, 0

    def begin(self) -> None:
        """A step begins."""
        self._next = 0

    def check(self, collective: Collective) -> None:
        """EngineError unless this collective is the next one."""
        agreed = self._order[self._next] if self._next < len(self._order) else None
        if collective != agreed:
            raise EngineError(
                f"this rank was about to {collective}, and the processes that share its stages agreed to "
                f"{agreed or 'end the step'} next: please report this as a bug"
            )
        self._next += 1

    def end(self) -> None:
        """EngineError if a collective was left out."""
        if self._next < len(self._order):
            raise EngineError(
                "this rank was about to end its step, and the processes that share its stages agreed to "
                f"{self._order[self._next]} next: please report this as a bug"
            )


def digest(lines: Iterable[str]) -> int:
    """A number that other lines almost never have; the same in every process."""
    return int.from_bytes(hashlib.sha256("\n".join(lines).encode()).digest()[:8], "little")


def first_difference(one: int, other: int, lines: Sequence[Sequence[str]]) -> str:
    """What two ranks that hold the same stages do not have in common, in words. `lines`: of all ranks."""
    here, there = next(
        pair for pair in zip_longest(lines[one], lines[other], fillvalue="nothing more") if len(set(pair)) > 1
    )
    return (
        f"ranks {one} and {other} share stages and would not gather and reduce the same: rank {one} has '{here}' where "
        f"rank {other} has '{there}': shard and freeze the same weights on both"
    )
