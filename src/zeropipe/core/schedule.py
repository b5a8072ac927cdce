"""The Schedule: a problem, a placement and one ordered row of steps per rank. A value: it never changes."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import overload

from zeropipe.core.action import Step, pack, unpack
from zeropipe.core.placement import Placement, Problem


class Rows(Sequence[tuple[Step, ...]]):
    """A tuple of steps per rank, decoded when asked for."""

    def __init__(self, codes: bytes, offsets: tuple[int, ...]) -> None:
        self._codes = memoryview(codes).cast("q")
        self._offsets = offsets

    def __len__(self) -> int:
        return len(self._offsets) - 1

    @overload
    def __getitem__(self, index: int) -> tuple[Step, ...]: ...
    @overload
    def __getitem__(self, index: slice) -> tuple[tuple[Step, ...], ...]: ...
    def __getitem__(self, index: int | slice) -> tuple[Step, ...] | tuple[tuple[Step, ...], ...]:
        if isinstance(index, slice):
            return tuple(self[i] for i in range(*index.indices(len(self))))
        if not -len(self) <= index < len(self):
            raise IndexError(f"rank {index} of {len(self)}")
        index %= len(self)
        return tuple(unpack(self._codes[self._offsets[index] : self._offsets[index + 1]]))

    def __repr__(self) -> str:
        return f"<rows of {len(self)} ranks, {self._offsets[-1]} actions>"


@dataclass(frozen=True)
class Lines:
    """Packed rows of all ranks back to back: rank r owns codes[offsets[r]:offsets[r + 1]]."""

    codes: bytes
    offsets: tuple[int, ...]

    @staticmethod
    def of(rows: Iterable[Iterable[int]]) -> Lines:
        """From one iterable of packed codes per rank."""
        from array import array

        codes, offsets = array("q"), [0]
        for row in rows:
            codes.extend(row)
            offsets.append(len(codes))
        return Lines(codes.tobytes(), tuple(offsets))


@dataclass(frozen=True, repr=False)
class Schedule:
    """Who runs what in which order. `rows[rank]` is a tuple of Action and Overlap; `str()` gives `0F0 ...`."""

    problem: Problem
    placement: Placement
    lines: Lines
    name: str = field(default="custom", compare=False)

    @staticmethod
    def of(problem: Problem, placement: Placement, rows: Iterable[Iterable[Step]], name: str = "custom") -> Schedule:
        """A schedule from rows of steps."""
        return Schedule(problem, placement, Lines.of(pack(row) for row in rows), name)

    @property
    def rows(self) -> Rows:
        return Rows(self.lines.codes, self.lines.offsets)

    @property
    def num_actions(self) -> int:
        return self.lines.offsets[-1]

    @property
    def num_ranks(self) -> int:
        return self.problem.num_ranks

    @property
    def num_stages(self) -> int:
        return self.problem.num_stages

    @property
    def num_microbatches(self) -> int:
        return self.problem.num_microbatches

    @property
    def split(self) -> int:
        """The first microbatch of the placement's second copy; beyond the last one where there is one copy."""
        return self.num_microbatches if self.placement.split is None else self.placement.split

    @property
    def sizes(self) -> str:
        """`4 ranks, 8 stages (vee), 12 microbatches`."""
        parts = self.problem.num_weight_parts
        return (
            f"{self.num_ranks} ranks, {self.num_stages} stages ({self.placement.name}), "
            f"{self.num_microbatches} microbatches" + (f", W in {parts} parts" if parts > 1 else "")
        )

    def __str__(self) -> str:
        return "\n".join(_row_text(row) for row in self.rows)

    def __repr__(self) -> str:
        return f"<Schedule {self.name}: {self.sizes}, {self.num_actions} actions>"


@dataclass(frozen=True, repr=False)
class Program:
    """A Schedule lowered with SEND and RECV: what an executor walks."""

    schedule: Schedule
    lines: Lines

    def __repr__(self) -> str:
        return f"<Program of {self.schedule!r}, {self.lines.offsets[-1]} steps>"

    @property
    def rows(self) -> Rows:
        return Rows(self.lines.codes, self.lines.offsets)

    def __str__(self) -> str:
        return "\n".join(_row_text(row) for row in self.rows)


def _row_text(row: Iterable[Step]) -> str:
    return " ".join(map(str, row))


def iter_codes(lines: Lines, rank: int) -> Iterator[int]:
    """The packed codes of one rank."""
    view = memoryview(lines.codes).cast("q")
    return iter(view[lines.offsets[rank] : lines.offsets[rank + 1]])
