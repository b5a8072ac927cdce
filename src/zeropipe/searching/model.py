"""A search's problem as flat tables for the kernels, and what a result looks like as a Schedule."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np

from zeropipe.core.action import F, I, W
from zeropipe.core.jit import compiled
from zeropipe.core.packed import PackedRows, encode, kind_of, microbatch_of, stage_of
from zeropipe.core.placement import Placement, Problem
from zeropipe.core.schedule import Schedule
from zeropipe.core.timeline import ROUNDING, Timeline
from zeropipe.core.units import size_text
from zeropipe.errors import ConfigError
from zeropipe.searching import kernels
from zeropipe.sim.costs import Costs

STEP = 1.06  # between two memory limits that are tried, where they are many

Array = np.ndarray[Any, np.dtype[Any]]


class Model(NamedTuple):
    """What the kernels need to know of a problem; `passes` are numbered along a microbatch's way (see kernels.py)."""

    num_microbatches: int
    parts: int  # of a W
    blocks: bool  # a sender waits for its transfers
    blocks_ends: bool  # it does so in its warm-up and cool-down
    begin: Array  # where each rank's row begins
    home: Array  # the rank of each pass
    mine: Array  # the passes of each rank, rank by rank
    lasts: Array  # the time of each pass
    lag: Array  # from the end of a pass to the arrival of its result
    holds: Array  # how long its message keeps the link, where links are serial
    edge: Array  # the link it takes; -1 where none is kept
    needs: Array  # memory a pass takes: an activation; or what an I leaves less what it frees
    weight: Array  # the time of one part of each stage's W
    frees: Array  # and the memory it frees
    limit: Array  # what is left for activations on each rank


class Work(NamedTuple):
    """Room for the kernels to work in."""

    arrived: Array
    queue: Array
    done: Array
    waits: Array
    link_free: Array
    clock: Array
    level: Array
    place: Array
    head: Array
    tail: Array
    stack: Array
    pen: Array
    steady: Array  # where the steady state of each rank begins, and where it ends
    first: Array
    last: Array
    spot: Array  # where each pass of each microbatch stands in the rows
    number_at: Array  # the microbatch that stands there
    waited: Array  # whether it waited for its input
    path: Array  # places of the passes that decide when all ends


@dataclass(frozen=True)
class Task:
    """A problem to be searched: sizes, where stages live, costs."""

    problem: Problem
    placement: Placement
    costs: Costs
    span: bool  # the longest rank's own span counts, not the makespan
    rank_limits: tuple[float, ...] | None = None  # memory of each rank; by default all have the costs' limit

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
    def serial(self) -> bool:
        """Whether a link takes one message at a time."""
        return self.costs.serial_links

    @property
    def num_actions(self) -> int:
        """F, I and every part of W."""
        return self.num_stages * self.num_microbatches * (2 + self.problem.num_weight_parts)

    @cached_property
    def plain(self) -> bool:
        """Whether neither whole B nor Overlaps can be better than F, I and W one after the other."""
        f, i, w, b, overlap = (np.array(self.costs.column(x, self.num_stages)) for x in ("f", "i", "w", "b", "overlap"))
        # a B's message is sent behind it, where a blocked sender may be done already
        return not self.costs.blocking and bool(np.all(b >= i + w) and np.all(overlap >= f + b))

    @property
    def totals(self) -> tuple[float, ...]:
        """The memory limit of each rank."""
        if self.rank_limits is not None:
            return self.rank_limits
        return (np.inf if self.costs.memory_limit is None else self.costs.memory_limit,) * self.num_ranks

    def with_limit(self, limit: float) -> Task:
        """The same task with at most so much memory on each rank."""
        return replace(self, rank_limits=tuple(min(limit, total) for total in self.totals))

    def fits(self, timeline: Timeline) -> bool:
        """Whether no rank is over its limit, by more than rounding."""
        return all(peak <= total * ROUNDING for peak, total in zip(timeline.peak_memory, self.totals))

    @cached_property
    def limits(self) -> Array:
        """Memory for activations on each rank."""
        room = np.array(self.totals)
        np.subtract.at(room, np.array(self.placement.copies[0]), self.costs.column("weights", self.num_stages))
        return room

    def require_room(self) -> None:
        """ConfigError where not even one microbatch at a time fits."""
        num_stages = self.num_stages
        takes, stash = (np.array(self.costs.column(name, num_stages)) for name in ("activation", "stash"))
        for rank in range(self.num_ranks):
            stages = list(self.placement.stages_of(rank))
            alive = np.cumsum(takes[stages])
            needs = float(max(alive.max(), (alive + stash[stages] - takes[stages]).max()))
            total, room = self.totals[rank], float(self.limits[rank])
            if needs > room * ROUNDING:
                limit, most = (size_text(size, self.costs.memory_unit) for size in (total, needs + total - room))
                raise ConfigError(
                    f"memory_limit={limit}: rank {rank} needs {most} for its weights and one microbatch; raise the "
                    "limit, or use more ranks"
                )

    @cached_property
    def first_stages(self) -> list[int]:
        """The first stage of each rank."""
        return [self.placement.stages_of(rank)[0] for rank in range(self.num_ranks)]

    @property
    def in_line(self) -> bool:
        """Whether each rank's first action is reached by first actions alone, so that none of them ever waits."""
        return sorted(self.first_stages) == list(range(self.num_ranks))

    @cached_property
    def model(self) -> Model:
        num_stages, parts = self.num_stages, self.problem.num_weight_parts
        column = {name: np.array(self.costs.column(name, num_stages)) for name in _COLUMNS}
        stage_rank = np.array(self.placement.copies[0], np.int64)
        home = np.concatenate([stage_rank, stage_rank[::-1]])
        passes = np.bincount(home, minlength=self.num_ranks)
        lag, holds, edge = _messages(home, column["message"], self.costs)
        both = column["stash"] - column["activation"]
        return Model(
            self.num_microbatches, parts, bool(self.costs.blocking), bool(self.costs.blocking_ends),
            np.concatenate([[0], np.cumsum(passes * self.num_microbatches)]), home, np.argsort(home, kind="stable"),
            np.concatenate([column["f"], column["i"][::-1]]), lag, holds, edge,
            np.concatenate([column["activation"], both[::-1]]),
            column["w"] / parts, column["stash"] / parts, self.limits * ROUNDING,
        )  # fmt: skip

    @cached_property
    def passes_by_rank(self) -> list[Array]:
        """The passes of each rank, along a microbatch's way."""
        return [np.flatnonzero(self.model.home == rank) for rank in range(self.num_ranks)]

    def work(self) -> Work:
        """Fresh room for one thread."""
        model, p = self.model, self.num_ranks
        passes, size = len(model.home), int(model.begin[-1])

        def ints(count: int) -> Array:
            return np.zeros(count, np.int64)

        return Work(
            np.zeros(passes * model.num_microbatches), ints(size // 2 * model.parts), ints(passes), ints(passes),
            np.zeros(int(model.edge.max(initial=-1)) + 1), np.zeros(p), np.zeros(p),
            ints(p), ints(p), ints(p), ints(p + 1), ints(p), ints(2 * p), np.zeros(p), np.zeros(p),
            ints(size), ints(size), ints(size), ints(size),
        )  # fmt: skip

    def schedule(self, rows: Array, share: Array, name: str = "searched") -> Schedule:
        """The rows with their W as a Schedule."""
        model = self.model
        out = np.full(int(model.begin[-1]) // 2 * (2 + model.parts), -1, np.int64)
        compiled(kernels.play)(model, self.work(), rows, share, out)
        offsets = (model.begin // 2 * (2 + model.parts)).tolist()
        passes = len(model.home)
        kind = np.where(out < passes // 2, F, np.where(out < passes, I, W))
        stage = np.where(out < passes // 2, out, np.where(out < passes, passes - 1 - out, out - passes))
        codes: Array = encode(stage, kind, _numbered(out, passes, model.parts))
        return Schedule(self.problem, self.placement, PackedRows(codes.tobytes(), tuple(offsets)), name)


_COLUMNS = ("f", "i", "w", "message", "activation", "stash")


def _numbered(out: Array, passes: int, parts: int) -> Array:
    """The microbatch of each action: how many equal ones come before it."""
    order = np.argsort(out, kind="stable")
    ranked = out[order]
    starts = np.flatnonzero(np.concatenate([[True], ranked[1:] != ranked[:-1]]))
    counts = np.diff(np.append(starts, len(out)))
    numbers = np.empty(len(out), np.int64)
    numbers[order] = np.arange(len(out)) - np.repeat(starts, counts)
    return np.where(out >= passes, numbers // parts, numbers)


def _messages(home: Array, message: Array, costs: Costs) -> tuple[Array, Array, Array]:
    """Of every pass: the lag of its result, how long its link is kept, and which link (-1: none is kept)."""
    size = len(home)
    lag, holds, edge = np.zeros(size), np.zeros(size), np.full(size, -1, np.int64)
    numbers: dict[tuple[int, int], int] = {}
    for x in range(size - 1):
        ends = int(home[x]), int(home[x + 1])
        if ends[0] == ends[1]:
            continue
        link = costs.link(*ends)
        # the gradient going back over a boundary is as large as the activation that crossed it
        boundary = x if x < size // 2 else size - 2 - x
        holds[x] = message[boundary] / link.bandwidth if link.bandwidth else 0.0
        lag[x] = link.p2p + holds[x]
        if costs.serial_links:
            edge[x] = numbers.setdefault(ends, len(numbers))
    return lag, holds, edge


def alone(model: Model) -> Array:
    """When each pass begins if a microbatch is alone."""
    return np.concatenate([[0.0], np.cumsum(model.lasts + model.lag)[:-1]])


def with_microbatches(task: Task, num_microbatches: int) -> Task:
    """The same task with another number of microbatches."""
    return replace(task, problem=replace(task.problem, num_microbatches=num_microbatches))


def pass_of(codes: Array, num_stages: int) -> Array:
    """The passes of some F, I and B."""
    passes: Array = np.where(kind_of(codes) == F, stage_of(codes), 2 * num_stages - 1 - stage_of(codes))
    return passes


def starts_of(timeline: Timeline) -> Array:
    """When each pass of each microbatch begins, pass by pass."""
    schedule = timeline.schedule
    starts = np.zeros((2 * schedule.num_stages, schedule.num_microbatches))
    codes = np.frombuffer(schedule.packed.codes, np.int64)
    passes = kind_of(codes) != W
    starts[pass_of(codes[passes], schedule.num_stages), microbatch_of(codes[passes])] = np.frombuffer(timeline.start)[
        passes
    ]
    return starts


def smaller_limits(task: Task) -> list[float]:
    """Memory limits below the task's own, the largest first.

    They do not depend on the task's own limit. A search that looks below its limit as well finds whatever one with
    less memory finds. There are none where ranks have limits of their own: less memory may be less on any of them.
    """
    unit = max(task.costs.column("activation", task.num_stages))
    if unit <= 0 or min(task.totals) < max(task.totals):
        return []
    weights = np.zeros(task.num_ranks)
    np.add.at(weights, np.array(task.placement.copies[0]), task.costs.column("weights", task.num_stages))
    base = float(weights.max())
    most = min(float(task.num_microbatches * task.problem.stages_per_rank), (max(task.totals) - base) / unit)
    counts, count = [], 1
    while count < most * (1 - 1e-9):
        counts.append(count)
        count = max(count + 1, round(count * STEP))
    return [base + count * unit for count in reversed(counts)]
