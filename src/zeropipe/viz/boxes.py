"""The one drawing model: a Timeline as columns of boxes. Every picture, file and the viewer read these columns."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from zeropipe.core.packed import is_joined, kind_of, microbatch_of, stage_of
from zeropipe.core.timeline import Timeline
from zeropipe.viz.colors import shade_table
from zeropipe.viz.columns import LOWER, UPPER, WHOLE, find_checkpointed


@dataclass(frozen=True)
class Boxes:
    """Rank r owns the boxes offsets[r] to offsets[r + 1]. Times count from the first start of the timeline."""

    offsets: NDArray[np.int64]
    start: NDArray[np.float64]
    end: NDArray[np.float64]
    kind: NDArray[np.int64]
    stage: NDArray[np.int64]
    microbatch: NDArray[np.int64]
    half: NDArray[np.int64]
    shade: NDArray[np.int64]
    num_shades: int
    makespan: float
    slice: NDArray[np.int64] | None = None  # None in a schedule without slices
    checkpointed: frozenset[int] = frozenset()  # the boxes of F that are

    @property
    def num_ranks(self) -> int:
        return len(self.offsets) - 1

    def label(self, i: int) -> str:
        """The microbatch of a box, `3`, or with its slice, `3.1`; that of a checkpointed F, `3c`."""
        of_slice, mark = "" if self.slice is None else f".{self.slice[i]}", "c" if i in self.checkpointed else ""
        return f"{self.microbatch[i]}{of_slice}{mark}"

    @property
    def longest_label(self) -> int:
        """The length of the longest label."""
        longest = len(str(self.microbatch.max(initial=0))) + bool(self.checkpointed)
        return longest if self.slice is None else longest + 1 + len(str(self.slice.max(initial=0)))

    def names(self) -> list[str]:
        """The actions as text, like `2F0` or `2F0.3`."""
        kinds = self.kind.tolist()
        return [f"{stage}{'FBIW'[kinds[i]]}{self.label(i)}" for i, stage in enumerate(self.stage.tolist())]


def boxes(timeline: Timeline) -> Boxes:
    """The boxes of a timeline."""
    codes = np.frombuffer(timeline.schedule.packed.codes, np.int64)
    joined = is_joined(codes)
    half = joined * UPPER
    half[1:] += joined[:-1] * LOWER
    kind, stage, microbatch = kind_of(codes), stage_of(codes), microbatch_of(codes)
    num_slices = timeline.schedule.num_slices
    microbatch, slice_ = (microbatch, None) if num_slices == 1 else np.divmod(microbatch, num_slices)
    shades = np.array(shade_table(timeline.schedule.placement), np.int64)
    copy = (microbatch >= timeline.schedule.second_from).astype(np.int64)
    start = np.frombuffer(timeline.start, np.float64) - timeline.first_start
    end = np.frombuffer(timeline.end, np.float64) - timeline.first_start
    return Boxes(
        np.array(timeline.schedule.packed.offsets, np.int64), start, end, kind, stage, microbatch, half,
        shades[copy, stage], int(shades.max(initial=0)) + 1, timeline.makespan, slice_,
        frozenset(find_checkpointed(timeline.schedule)),
    )  # fmt: skip


def kinds_with_room(model: Boxes, needed: float) -> frozenset[tuple[int, bool]]:
    """(kind, is it half of an Overlap) of the boxes that get labels: nine in ten of them last at least `needed`.

    All boxes of a kind have labels, or none: otherwise those without would look like another kind.
    """
    enough = model.end - model.start >= needed * (1 - 1e-9)
    alike = model.kind * 2 + (model.half != WHOLE)
    return frozenset(
        (int(look) // 2, bool(look % 2)) for look in np.unique(alike) if enough[alike == look].mean() >= 0.9
    )
