"""The Schedule: a problem, a placement and one ordered row of steps per rank. It is immutable."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import overload

from zeropipe.core.action import Action, Step
from zeropipe.core.packed import NO_MARKS, Marks, PackedRows, decode, find_marks, is_offloading, pack, unpack
from zeropipe.core.placement import Placement, Problem, require_problem
from zeropipe.core.units import count_text
from zeropipe.errors import ConfigError, ScheduleError, short


class Rows(Sequence[tuple[Step, ...]]):
    """A tuple of steps per rank, decoded on access."""

    def __init__(self, packed: PackedRows, num_slices: int = 1, checkpointed: Marks = NO_MARKS) -> None:
        self._packed, self._num_slices, self._checkpointed = packed, num_slices, checkpointed

    def __len__(self) -> int:
        return len(self._packed.offsets) - 1

    @overload
    def __getitem__(self, index: int) -> tuple[Step, ...]: ...
    @overload
    def __getitem__(self, index: slice) -> tuple[tuple[Step, ...], ...]: ...
    def __getitem__(self, index: int | slice) -> tuple[Step, ...] | tuple[tuple[Step, ...], ...]:
        if isinstance(index, slice):
            return tuple(self[i] for i in range(*index.indices(len(self))))
        if not -len(self) <= index < len(self):
            raise IndexError(f"rank {index} of {len(self)}")
        return tuple(unpack(self._packed.row(index % len(self)), self._num_slices, self._checkpointed))

    def __eq__(self, other: object) -> bool:
        if isinstance(other, Rows):
            mine, others = ((one._packed, one._num_slices, one._checkpointed) for one in (self, other))
            return mine == others
        return tuple(self) == other if isinstance(other, tuple) else NotImplemented

    def __hash__(self) -> int:
        return hash(tuple(self))

    def __repr__(self) -> str:
        return f"<rows of {count_text(len(self), 'rank')}, {count_text(self._packed.num_codes, 'action')}>"


@dataclass(frozen=True, repr=False)
class Schedule:
    """The order of actions on every rank. `rows[rank]` is a tuple of Action and Overlap; `str()` gives `0F0 ...`.

    `packed` has the computations only, in the same order as `rows`. `checkpointed` has the stage and the microbatch (of
    slices, the number among those of all microbatches) of each F that is checkpointed.
    """

    problem: Problem
    placement: Placement
    packed: PackedRows
    name: str = field(default="custom", compare=False)
    rebuild: Callable[[int], Schedule] | None = field(default=None, compare=False)  # by number of microbatches
    offloading: PackedRows | None = None  # the rows with their OFFLOAD and RELOAD; None without any
    checkpointed: frozenset[tuple[int, int]] = NO_MARKS

    @staticmethod
    def of(problem: Problem, placement: Placement, rows: Iterable[Iterable[Step]], name: str = "custom") -> Schedule:
        """A schedule from rows of steps."""
        require_problem(problem)
        if not isinstance(placement, Placement):
            raise ConfigError(f"placement={short(placement)}: must be a zp.Placement, like zp.linear(problem)")
        listed = [list(row) for row in rows]
        packed = PackedRows.of(pack(row, problem.num_slices) for row in listed)
        return Schedule.of_packed(problem, placement, packed, name, find_marks(listed, problem.num_slices))

    @staticmethod
    def of_packed(
        problem: Problem, placement: Placement, rows: PackedRows, name: str = "custom",
        checkpointed: frozenset[tuple[int, int]] = NO_MARKS,
    ) -> Schedule:  # fmt: skip
        """A schedule from packed rows, which may have OFFLOAD and RELOAD."""
        if not any(map(is_offloading, rows.view)):
            return Schedule(problem, placement, rows, name, checkpointed=checkpointed)
        if problem.num_slices > 1:
            raise ScheduleError("OFFLOAD and RELOAD are of whole microbatches: leave them out, or use one slice")
        ranks = range(len(rows.offsets) - 1)
        computations = PackedRows.of([code for code in rows.row(rank) if not is_offloading(code)] for rank in ranks)
        return Schedule(problem, placement, computations, name, offloading=rows, checkpointed=checkpointed)

    @property
    def rows(self) -> Rows:
        return Rows(self.offloading or self.packed, self.num_slices, self.checkpointed)

    @property
    def num_actions(self) -> int:
        return self.packed.num_codes

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
    def num_slices(self) -> int:
        return self.problem.num_slices

    @property
    def second_from(self) -> int:
        """The first microbatch of the placement's second copy; the number of microbatches if there is one copy."""
        second_from = self.placement.second_from
        return self.num_microbatches if second_from is None else second_from

    @property
    def second_slice_from(self) -> int:
        """The number of the first slice of `second_from`, among the slices of all microbatches."""
        return self.second_from * self.num_slices

    def decode(self, code: int) -> Action:
        """The action of a code of this schedule."""
        return decode(code, self.num_slices, self.checkpointed)

    def is_checkpointed(self, action: Action) -> bool:
        """Whether the F of an action's stage and microbatch is checkpointed."""
        return (action.stage, action.microbatch * self.num_slices + (action.slice or 0)) in self.checkpointed

    @property
    def sizes(self) -> str:
        """`4 ranks, 8 stages (vee), 12 microbatches`."""
        parts, slices = self.problem.num_weight_parts, self.num_slices
        return (
            f"{count_text(self.num_ranks, 'rank')}, {count_text(self.num_stages, 'stage')} ({self.placement.name}), "
            f"{count_text(self.num_microbatches, 'microbatch')}"
            + (f" of {slices} slices" if slices > 1 else "")
            + (f", W in {parts} parts" if parts > 1 else "")
        )

    def __str__(self) -> str:
        return "\n".join(_row_text(row) for row in self.rows)

    def __repr__(self) -> str:
        return f"<Schedule {self.name}: {self.sizes}, {count_text(self.num_actions, 'action')}>"


def require_schedule(value: object) -> None:
    """ConfigError unless `value` is a Schedule."""
    if not isinstance(value, Schedule):
        raise ConfigError(f"{short(value)}: must be a Schedule; use zp.build, zp.from_csv or zp.from_json")


@dataclass(frozen=True, repr=False)
class Program:
    """A Schedule lowered with SEND and RECV, for an executor."""

    schedule: Schedule
    packed: PackedRows

    def __repr__(self) -> str:
        return f"<Program of {self.schedule!r}, {count_text(self.packed.num_codes, 'step')}>"

    @property
    def rows(self) -> Rows:
        return Rows(self.packed, self.schedule.num_slices, self.schedule.checkpointed)

    def __str__(self) -> str:
        return "\n".join(_row_text(row) for row in self.rows)


def _row_text(row: Iterable[Step]) -> str:
    return " ".join(map(str, row))
