"""The copies of activations between devices and their hosts in a Timeline, beside its computations."""

from __future__ import annotations

from array import array
from collections.abc import Iterator
from typing import NamedTuple

from zeropipe.core.action import Action, Kind
from zeropipe.core.packed import PackedRows, decode


class Offloading(NamedTuple):
    """OFFLOAD and RELOAD of every rank, in the order of its row: packed float64.

    `size` is the memory that each copies.
    """

    packed: PackedRows
    start: bytes
    end: bytes
    size: bytes

    def events(self, rank: int) -> Iterator[tuple[Action, float, float]]:
        """(action, start, end) of each copy of `rank`."""
        for code, start, end in self.packed.entries(rank, self.start, self.end):
            yield decode(code), start, end

    def peak_host_memory(self, rank: int) -> float:
        """The most that `rank` has on its host: from the start of an OFFLOAD to the end of its RELOAD."""
        begin, stop = self.packed.offsets[rank : rank + 2]
        sizes = memoryview(self.size).cast("d")[begin:stop]
        changes = sorted(
            (start, size) if action.kind is Kind.OFFLOAD else (end, -size)
            for (action, start, end), size in zip(self.events(rank), sizes, strict=True)
        )
        level = peak = 0.0
        for _, change in changes:
            level += change
            peak = max(peak, level)
        return peak


def offloading_of(packed: PackedRows, start: bytes, end: bytes, sizes: list[float]) -> Offloading:
    """The copies of packed rows. `sizes` are those of each stage."""
    column = array("d", (sizes[decode(code).stage] for code in packed.view))
    return Offloading(packed, start, end, column.tobytes())
