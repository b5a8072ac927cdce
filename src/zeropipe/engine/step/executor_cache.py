"""The executors of an engine: one for each use and number of microbatches, over one set of connections."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Sequence
from dataclasses import replace
from itertools import pairwise, zip_longest

from zeropipe.core.action import Action, Kind, actions_of
from zeropipe.core.collectives import Collective, collectives
from zeropipe.core.gradient_policy import check_gradients
from zeropipe.core.lower import lower
from zeropipe.core.packed import unpack
from zeropipe.core.placement import Placement
from zeropipe.core.resize import resize
from zeropipe.core.schedule import Program, Schedule
from zeropipe.core.shard_actions import with_shards
from zeropipe.core.slices import slices_as_microbatches
from zeropipe.engine.backward.experts import find_divided
from zeropipe.engine.mesh.sharded_stage import require_one_dtype
from zeropipe.engine.step.executor import Executor, ExecutorContext
from zeropipe.engine.step.recorder import Recorder
from zeropipe.engine.step.watchers import FiniteCheck, ProfilerLabels, Watcher

MAX_EXECUTORS = 16


class ExecutorCache:
    """Creates executors when they are first needed, and keeps the latest."""

    def __init__(self, context: ExecutorContext) -> None:
        self._context, self._executors = context, dict[tuple[str, int, bool], Executor]()
        self._order_digests: dict[tuple[bool, int, str], int] = {}
        self._weights_digest: tuple[bytes, int] = (b"", 0)  # which sharded weights are trained, digest of all of them
        self.recorder: Recorder | None = None
        self.recorded: Schedule | None = None  # of the last recorded step

    def get(self, use: str, num_microbatches: int, is_uniform: bool) -> Executor:
        """The executor for "train", "record" or "forward" and a number of microbatches.

        `is_uniform`: all pipelines have that number. Processes that share a stage must gather and reduce in one order,
        and only then do they run the same Program.
        """
        key = (use, num_microbatches, is_uniform)
        found = self._executors.pop(key, None) or self._create(*key)
        self._executors[key] = found  # the latest is the last
        if len(self._executors) > MAX_EXECUTORS:
            self._executors.pop(next(iter(self._executors))).close()
        if use == "record":
            schedule = self._context.schedule
            is_sliced = schedule.num_slices > 1
            self.recorded = resize(schedule, num_microbatches // schedule.num_slices) if is_sliced else found.schedule
        return found

    def close(self) -> None:
        """Release all executors."""
        for executor in self._executors.values():
            executor.close()
        self._executors.clear()

    def _create(self, use: str, num_microbatches: int, is_uniform: bool) -> Executor:
        context, program = self._context, self._build_program(use, num_microbatches, is_uniform)
        watchers: list[Watcher] = [ProfilerLabels(program.schedule)]
        if context.options.check_finite:
            watchers.append(FiniteCheck())
        if use == "record":
            self.recorder = self.recorder or Recorder(
                context.device, context.parameters, context.splitter, context.shards, context.schedule.num_stages - 1,
                [number for number, stage in context.stages.items() if find_divided(stage.module)],
            )  # fmt: skip
            watchers.append(self.recorder)
        return Executor(context, program, use, watchers)

    def _build_program(self, use: str, num_microbatches: int, is_uniform: bool) -> Program:
        schedule = self._schedule_of(use == "forward", num_microbatches)
        policy = self._policy(is_uniform) if self._context.shards else None
        gradients = self._context.options.gradients
        program = lower(schedule, policy, gradients)
        if self._context.shards:
            check_gradients(program, gradients)
        return program

    def _schedule_of(self, is_forward: bool, num_microbatches: int) -> Schedule:
        """The schedule of a step. Slices count as microbatches; forwards alone run whole microbatches."""
        schedule = self._context.schedule
        if is_forward:
            return _select_forwards(resize(schedule, num_microbatches))
        return slices_as_microbatches(resize(schedule, num_microbatches // schedule.num_slices))

    def _policy(self, is_uniform: bool) -> str:
        """When sharded weights are gathered: see `with_shards`."""
        if self._context.options.regather:
            return "regather"
        return "keep" if is_uniform else "ends"

    # the order of collectives

    def order_digests(self, use: str, num_microbatches: int) -> tuple[int, int]:
        """Digests of this rank's sharded weights and the order in which it gathers and reduces them.

        The first one is for pipelines that all have that number of microbatches, the second one for others.
        """
        shards = self._context.shards
        if not shards:
            return (0, 0)
        flags = b"".join(sharded.trained_flags() for sharded in shards.values())
        if flags != self._weights_digest[0]:
            for stage, sharded in shards.items():
                require_one_dtype(stage, sharded.module)
            self._weights_digest = (flags, digest(self._describe_weights()))
        uniform, other = (
            self._order_digest(use == "forward", num_microbatches, self._policy(is_uniform))
            for is_uniform in (True, False)
        )
        weights = self._weights_digest[1]
        return hash((uniform, weights)), hash((other, weights))  # hashes of integers are the same in every process

    def describe_order(self, use: str, num_microbatches: int, is_uniform: bool) -> list[str]:
        """The lines whose digest `order_digests` returns."""
        order = self._order(use == "forward", num_microbatches, self._policy(is_uniform))
        return [*self._describe_weights(), *map(str, order)]

    def _describe_weights(self) -> list[str]:
        return [line for sharded in self._context.shards.values() for line in sharded.describe()]

    def _order_digest(self, is_forward: bool, num_microbatches: int, policy: str) -> int:
        key = (is_forward, num_microbatches, policy)
        if key not in self._order_digests:
            self._order_digests[key] = digest(map(str, self._order(*key)))
        return self._order_digests[key]

    def _order(self, is_forward: bool, num_microbatches: int, policy: str) -> list[Collective]:
        """The collectives of a Program, computed without its messages, which do not change them."""
        schedule = self._schedule_of(is_forward, num_microbatches)
        rows = with_shards(schedule, policy, self._context.options.gradients)
        units = {stage: len(sharded.units) for stage, sharded in self._context.shards.items()}
        row = tuple(unpack(rows.row(self._context.rank)))
        return collectives(row, units, policy == "regather")


def digest(lines: Iterable[str]) -> int:
    """64 bits of a hash of lines; the same in every process."""
    return int.from_bytes(hashlib.sha256("\n".join(lines).encode()).digest()[:8], "little")


def describe_difference(one: int, other: int, lines: Sequence[Sequence[str]]) -> str:
    """The first difference between the orders of two ranks that hold the same stages. `lines`: of all ranks."""
    pairs = zip_longest(lines[one], lines[other], fillvalue="nothing more")
    one_line, other_line = next(pair for pair in pairs if len(set(pair)) > 1)
    return (
        f"ranks {one} and {other} share stages and would not gather and reduce the same: rank {one} has '{one_line}' "
        f"where rank {other} has '{other_line}': shard and freeze the same weights on both"
    )


def find_edges(placement: Placement) -> set[tuple[int, int]]:
    """The directed pairs of ranks that exchange messages, for any number of microbatches."""
    neighbours = {pair for table in placement.copies for pair in pairwise(table) if pair[0] != pair[1]}
    return neighbours | {(b, a) for a, b in neighbours}


def _select_forwards(schedule: Schedule) -> Schedule:
    """The schedule's forwards in its own order; with slices, each microbatch where its first slice is."""
    rows: list[list[Action]] = [
        [
            action._replace(slice=None, checkpointed=False)
            for action in actions_of(row)
            if action.kind is Kind.F and not action.slice
        ]
        for row in schedule.rows
    ]
    return Schedule.of(replace(schedule.problem, num_slices=1), schedule.placement, rows, schedule.name)
