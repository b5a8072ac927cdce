"""Writes one rank's row and numbers the microbatches by itself, so that a schedule reads as its pattern."""

from __future__ import annotations

import warnings
from array import array
from collections import deque
from collections.abc import Iterable
from itertools import pairwise
from operator import itemgetter
from typing import Any, NamedTuple

from zeropipe.core.action import Action, Kind
from zeropipe.core.packed import JOINED, encode, microbatch_of, pack
from zeropipe.core.placement import Placement, Problem
from zeropipe.errors import ScheduleError

# a code is a sum: the stage's, the kind's and the microbatch's
_F, _B, _I = (encode(0, kind, 0) for kind in (Kind.F, Kind.B, Kind.I))
_NEXT = encode(0, 0, 1)
_I_TO_W = encode(0, Kind.W, 0) - _I


class Beat(NamedTuple):
    """An action that returns every period: for the first of `microbatches` at time `offset`, and so on."""

    offset: int
    stage: int
    kind: Kind
    microbatches: range


class Lane:
    """One rank's row in the making. Each call appends the next microbatch of that stage, or the next slice of one.

    `f`, `b`, `i` take the microbatches of a stage in order; `w` takes the oldest I whose W is pending. With two
    copies of the model, a stage's microbatches are those of the copy this rank holds. With slices, `f` takes the slices
    of a microbatch in order, `b` and `i` in the opposite one. Other orders are written with `at`, `weave` and `repeat`,
    which name the microbatches.
    """

    def __init__(self, rank: int, problem: Problem, placement: Placement) -> None:
        self.rank = rank
        self.codes = array("q")
        self._pending: dict[int, deque[tuple[int, int]]] = {}  # stage -> (index in the row, code) of I without W
        self._next_f: dict[int, int] = {}
        self._next_b: dict[int, int] = {}
        self._problem, self._placement = problem, placement

    def f(self, stage: int, times: int = 1) -> None:
        """`times` forwards of `stage`."""
        first = self._take(self._next_f, stage, times) | _F
        if times == 1:
            self.codes.append(first)
        else:
            self.codes.extend(range(first, first + times * _NEXT, _NEXT))

    def b(self, stage: int, times: int = 1) -> None:
        """`times` full backwards of `stage`."""
        first = self._take(self._next_b, stage, times) | _B
        if times == 1:
            self.codes.append(self._turned(first))
        else:
            self.codes.extend(map(self._turned, range(first, first + times * _NEXT, _NEXT)))

    def i(self, stage: int, times: int = 1) -> None:
        """`times` input-gradient backwards of `stage`; each needs a `w` later."""
        first = self._take(self._next_b, stage, times) | _I
        pending = self._pending.setdefault(stage, deque())
        for code in range(first, first + times * _NEXT, _NEXT):
            turned = self._turned(code)
            pending.append((len(self.codes), turned))
            self.codes.append(turned)

    def w(self, stage: int | None = None, times: int = 1) -> None:
        """`times` weight gradients, oldest first, of `stage` or of whichever stage has the oldest."""
        for _ in range(times):
            if stage is None:
                queue = min(filter(None, self._pending.values()), key=itemgetter(0), default=None)
            else:
                queue = self._pending.get(stage)
            if not queue:
                of_stage = "" if stage is None else f" of stage {stage}"
                raise ScheduleError(f"rank {self.rank} writes a W{of_stage}, but there is no I it could belong to")
            self.codes.append(queue.popleft()[1] + _I_TO_W)

    def overlap(self, forward: int, backward: int) -> None:
        """The next forward of one stage together with the next full backward of another."""
        self.f(forward)
        self.codes[-1] |= JOINED
        self.b(backward)

    def pending_w(self, stage: int | None = None) -> int:
        """The number of I (of `stage`, or of all) that have no W yet."""
        return sum(len(queue) for owner, queue in self._pending.items() if stage in (None, owner))

    def __getattr__(self, name: str) -> Any:
        if name != "owed":
            raise AttributeError(f"Lane has no method {name!r}")
        warnings.warn("Lane.owed is deprecated: use pending_w", DeprecationWarning, stacklevel=2)
        return self.pending_w

    def at(self, stage: int, kind: Kind, microbatch: int, slice: int | None = None) -> None:
        """Append one action, with its microbatch, and its slice if there are several."""
        self._require_stage(stage)
        if microbatch < 0:
            raise ScheduleError(f"rank {self.rank} writes microbatch {microbatch}: must be non-negative")
        self.codes.extend(pack([Action(stage, kind, microbatch, slice)], self._problem.num_slices))

    def weave(self, *streams: tuple[int, array[int]]) -> None:
        """Append several streams of actions side by side: in turn t comes number t - lag of each (lag, stream)."""
        streams = tuple((lag, codes) for lag, codes in streams if codes)
        turns = sorted({lag for lag, _ in streams} | {lag + len(codes) for lag, codes in streams})
        # between two of these turns the same streams are running, so whole slices can be copied
        for begin, end in pairwise(turns):
            running = [(lag, codes) for lag, codes in streams if lag <= begin < lag + len(codes)]
            block = array("q", bytes(8 * len(running) * (end - begin)))
            for index, (lag, codes) in enumerate(running):
                block[index :: len(running)] = codes[begin - lag : end - lag]
            self.codes.extend(block)

    def repeat(self, beats: Iterable[Beat], period: int) -> None:
        """Append a building block repeated every `period`, in the order of time."""
        by_turn = sorted(beats, key=lambda beat: (beat.offset % period, beat.offset))
        self.weave(*((b.offset // period, run(b.stage, b.kind, b.microbatches)) for b in by_turn))

    def trim(self) -> None:
        """Leave out the microbatches beyond the last, after a pattern that needs a minimum of them."""
        end = self._problem.total_slices * _NEXT
        self.codes = array("q", (code for code in self.codes if code < end))

    def _take(self, following: dict[int, int], stage: int, times: int) -> int:
        """The code, but for the kind, of the next microbatch of `stage`; `times` of them are taken."""
        if times < 0:
            raise ScheduleError(f"rank {self.rank} writes stage {stage} times={times}: must be non-negative")
        first = following.get(stage, -1)
        if first < 0:
            first = encode(stage, 0, self._begin(stage))
        following[stage] = first + times * _NEXT
        return first

    def _begin(self, stage: int) -> int:
        """The first microbatch of `stage` on this rank."""
        self._require_stage(stage)
        copy = next((c for c, table in enumerate(self._placement.copies) if table[stage] == self.rank), 0)
        return 0 if copy == 0 else (self._placement.second_from or 0) * self._problem.num_slices

    def _turned(self, code: int) -> int:
        """The code of the backward that is as far from the microbatch's last slice as `code` is from its first one."""
        num_slices = self._problem.num_slices
        return code if num_slices == 1 else code + (num_slices - 1 - 2 * (microbatch_of(code) % num_slices)) * _NEXT

    def _require_stage(self, stage: int) -> None:
        """ScheduleError for a stage that is not there."""
        if not 0 <= stage < self._problem.num_stages:
            last, per_rank = self._problem.num_stages - 1, self._problem.stages_per_rank
            raise ScheduleError(
                f"rank {self.rank} writes stage {stage}: stages are 0 to {last}, {per_rank} per rank "
                "(as stages_per_rank= of @zp.register says)"
            )


def run(stage: int, kind: Kind, microbatches: range, num_slices: int = 1) -> array[int]:
    """The packed codes of one stage and kind for some microbatches; slices of backwards are in the opposite order."""
    if num_slices > 1:
        order = range(num_slices) if kind is Kind.F else range(num_slices - 1, -1, -1)
        return array("q", (encode(stage, kind, m * num_slices + slice) for m in microbatches for slice in order))
    action = encode(stage, kind, 0)
    start, stop, step = (n * _NEXT for n in (microbatches.start, microbatches.stop, microbatches.step))
    return array("q", range(action + start, action + stop, step))
