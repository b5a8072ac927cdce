"""Actions as integers, so that rows of ten million of them stay small. The only file that knows their layout:

    bit 0       joined: this action and the next one are an Overlap
    bits 1-4    kind
    bits 5-20   stage
    bits 21-62  microbatch; in a schedule with slices, the slice's number among those of all microbatches:
                microbatch * num_slices + slice

Kernels (see jit.py) call the functions of a code, too. A code may also be a numpy array of codes.
"""

from __future__ import annotations

from array import array
from bisect import bisect_right
from collections.abc import Iterable, Iterator, Set
from dataclasses import dataclass
from operator import index
from typing import Any, SupportsIndex

from zeropipe.core.action import (
    MAX_MICROBATCHES,
    MAX_STAGES,
    OFFLOAD,
    SHARDING,
    Action,
    Kind,
    Overlap,
    Step,
    actions_of,
)
from zeropipe.errors import ConfigError, ScheduleError, short

JOINED = 1
_KIND_SHIFT, _STAGE_SHIFT, _MICROBATCH_SHIFT = 1, 5, 21
_KIND_MASK, _STAGE_MASK = 0xF, 0xFFFF

Code = Any  # an int, or a numpy array of them
Marks = Set[tuple[int, int]]  # stage, and microbatch as in a code: the F that are checkpointed, which codes do not say
NO_MARKS: frozenset[tuple[int, int]] = frozenset()


def encode(stage: Code, kind: Code, microbatch: Code, joined: int = 0) -> Code:
    """The code of an action."""
    return microbatch << _MICROBATCH_SHIFT | stage << _STAGE_SHIFT | kind << _KIND_SHIFT | joined


def is_joined(code: Code) -> Code:
    """1 for the first half of an Overlap, else 0."""
    return code & JOINED


def kind_of(code: Code) -> Code:
    """The kind of a code, as an integer."""
    return code >> _KIND_SHIFT & _KIND_MASK


def stage_of(code: Code) -> Code:
    """The stage of a code."""
    return code >> _STAGE_SHIFT & _STAGE_MASK


def microbatch_of(code: Code) -> Code:
    """The microbatch of a code; in a schedule with slices, the slice's number among those of all microbatches."""
    return code >> _MICROBATCH_SHIFT


def is_offloading(code: Code) -> Code:
    """Whether a code is an OFFLOAD or a RELOAD."""
    return kind_of(code) >= OFFLOAD


def with_kind(code: Code, kind: int) -> Code:
    """The code of another kind for the same stage and microbatch."""
    return encode(stage_of(code), kind, microbatch_of(code))


_KINDS = tuple(Kind)


def decode(code: int, num_slices: int = 1, checkpointed: Marks = NO_MARKS) -> Action:
    """The action of a code of a schedule with that many slices."""
    kind, stage, microbatch = _KINDS[kind_of(code)], stage_of(code), microbatch_of(code)
    is_marked = kind is Kind.F and (stage, microbatch) in checkpointed
    if num_slices == 1 or kind in SHARDING:
        return Action(stage, kind, microbatch, None, is_marked)
    return Action(stage, kind, microbatch // num_slices, microbatch % num_slices, is_marked)


def find_marks(rows: Iterable[Iterable[Step]], num_slices: int = 1) -> frozenset[tuple[int, int]]:
    """The F of rows that are checkpointed; ScheduleError for another action that is."""
    found = set()
    for action in (action for row in rows for action in actions_of(row)):
        if action.checkpointed:
            if action.kind is not Kind.F:
                raise ScheduleError(f"{action} is marked c: only an F can be checkpointed")
            found.add((action.stage, action.microbatch * num_slices + (action.slice or 0)))
    return frozenset(found)


def pack(steps: Iterable[Step], num_slices: int = 1) -> list[int]:
    """The codes of steps of a schedule with that many slices; an Overlap has two."""
    codes: list[int] = []
    for step in steps:
        if isinstance(step, Overlap):
            codes.append(_encode_checked(step.forward, num_slices) | JOINED)
            codes.append(_encode_checked(step.backward, num_slices))
        elif isinstance(step, Action):
            codes.append(_encode_checked(step, num_slices))
        else:
            raise ConfigError(f"{short(step)}: must be an Action or an Overlap; use zp.from_csv for text like 0F0")
    return codes


def _encode_checked(action: Action, num_slices: int) -> int:
    """The code of a user's action; ConfigError if its numbers would overflow into other bits."""
    stage, kind, microbatch, slice_, _ = action
    if type(kind) is not Kind and not (isinstance(kind, int) and 0 <= kind < len(_KINDS)):
        raise ConfigError(f"kind={short(kind)}: must be a zp.Kind, like zp.Kind.F")
    if (
        _is_integer(stage)
        and _is_integer(microbatch)
        and 0 <= stage < MAX_STAGES
        and 0 <= microbatch < MAX_MICROBATCHES // num_slices
    ):
        if (num_slices == 1 or kind in SHARDING) and slice_ is None:
            return int(encode(index(stage), kind, index(microbatch)))
        return int(encode(index(stage), kind, index(microbatch) * num_slices + _checked_slice(action, num_slices)))
    raise ConfigError(
        f"stage {short(stage)}, microbatch {short(microbatch)}: must be non-negative integers, "
        f"below {MAX_STAGES} and {MAX_MICROBATCHES}"
    )


def _checked_slice(action: Action, num_slices: int) -> int:
    """The slice of an action of a schedule with slices; ScheduleError if it has none, or one that is not there."""
    if num_slices == 1:
        raise ScheduleError(f"{action} has a slice: the schedule has one slice per microbatch; leave it out")
    if action.slice is None:
        raise ScheduleError(f"{action} has no slice: microbatches have {num_slices} slices; write {action}.0 and so on")
    if not _is_integer(action.slice) or not 0 <= action.slice < num_slices:
        raise ScheduleError(f"{action} is out of range: slices 0 to {num_slices - 1}")
    return index(action.slice)


def _is_integer(value: Any) -> bool:
    # the check against a protocol takes twenty times as long
    return type(value) is int or isinstance(value, SupportsIndex)


def unpack(codes: Iterable[int], num_slices: int = 1, checkpointed: Marks = NO_MARKS) -> Iterator[Step]:
    """The steps of codes of a schedule with that many slices."""
    forward: Action | None = None
    for code in codes:
        action = decode(code, num_slices, checkpointed)
        if is_joined(code):
            forward = action
        elif forward is not None:
            yield Overlap(forward, action)
            forward = None
        else:
            yield action


def count_steps(codes: Iterable[int]) -> int:
    """The number of steps that end within the codes; an Overlap is one."""
    return sum(1 for code in codes if not is_joined(code))


@dataclass(frozen=True)
class PackedRows:
    """The codes of all ranks, concatenated: those of rank r are codes[offsets[r]:offsets[r + 1]]."""

    codes: bytes
    offsets: tuple[int, ...]

    @staticmethod
    def of(rows: Iterable[Iterable[int]]) -> PackedRows:
        """From the codes of each rank."""
        codes, offsets = array("q"), [0]
        for row in rows:
            codes.extend(row)
            offsets.append(len(codes))
        return PackedRows(codes.tobytes(), tuple(offsets))

    @property
    def num_codes(self) -> int:
        return self.offsets[-1]

    @property
    def view(self) -> memoryview[int]:
        """All codes as integers."""
        return memoryview(self.codes).cast("q")

    def row(self, rank: int) -> memoryview[int]:
        """The codes of one rank."""
        return self.view[self.offsets[rank] : self.offsets[rank + 1]]

    def entries(self, rank: int, *columns: bytes) -> Iterator[tuple[Any, ...]]:
        """Each code of one rank, with its entry in every column: packed float64 of all ranks."""
        begin, end = self.offsets[rank : rank + 2]
        return zip(self.row(rank), *(memoryview(column).cast("d")[begin:end] for column in columns), strict=True)

    def locate(self, index: int) -> tuple[int, int]:
        """(rank, step) of the code at `index`; an Overlap is one step."""
        rank = bisect_right(self.offsets, index) - 1
        return rank, count_steps(self.view[self.offsets[rank] : index])
