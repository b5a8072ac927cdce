"""The executors of an engine: one for each use and number of microbatches, over one set of connections."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import nn

from zeropipe.core.collectives import Collective, collectives
from zeropipe.core.lower import lower
from zeropipe.core.packed import unpack
from zeropipe.core.resize import resize
from zeropipe.core.schedule import Program, Schedule
from zeropipe.core.shard_actions import with_shards
from zeropipe.engine.backward.splitters import Splitter
from zeropipe.engine.comm.channels import Channel, Sender
from zeropipe.engine.comm.messages import ShapeCache
from zeropipe.engine.mesh.shards import Shards, require_one_dtype
from zeropipe.engine.options import Options
from zeropipe.engine.stages.contract import StageInfo
from zeropipe.engine.step.agreed import digest
from zeropipe.engine.step.executor import Executor, Watcher
from zeropipe.engine.step.finite import FiniteCheck
from zeropipe.engine.step.names import Names
from zeropipe.engine.step.plans import forward_only, forwards
from zeropipe.engine.step.recorder import Recorder

KEPT = 16  # executors kept for numbers of microbatches that were used before


@dataclass(frozen=True, eq=False)
class Parts:
    """What executors are made of."""

    schedule: Schedule
    rank: int
    stages: Mapping[int, StageInfo]
    outgoing: Mapping[int, Sender]
    wires: Mapping[tuple[int, int], Channel]
    shapes: ShapeCache
    device: torch.device
    splitter: Splitter
    shards: Mapping[int, Shards]
    parameters: list[nn.Parameter]
    options: Options


class Executors:
    """Makes executors when they are first needed, and keeps the latest."""

    def __init__(self, parts: Parts) -> None:
        self._parts, self._kept = parts, dict[tuple[str, int, bool], Executor]()
        self._digests: dict[tuple[bool, int, str], int] = {}  # of orders of collectives
        self._described: tuple[bytes, int] = (b"", 0)  # which sharded weights are trained, and a digest of all of them
        self.recorder: Recorder | None = None
        self.recorded: Schedule | None = None  # what the recorder saw last

    def get(self, use: str, number: int, alike: bool) -> Executor:
        """For "train", "record" or "forward", and a number of microbatches.

        `alike`: all pipelines have that number. Processes that share a stage must gather and reduce in one order, and
        only then do they run the same Program.
        """
        key = (use, number, alike)
        found = self._kept.pop(key, None) or self._make(*key)
        self._kept[key] = found  # the latest is the last
        if len(self._kept) > KEPT:
            self._kept.pop(next(iter(self._kept))).close()
        if use == "record":
            self.recorded = found.schedule
        return found

    def close(self) -> None:
        """Let go of all of them."""
        for executor in self._kept.values():
            executor.close()
        self._kept.clear()

    def _make(self, use: str, number: int, alike: bool) -> Executor:
        parts, program = self._parts, self._program(use, number, alike)
        watchers: list[Watcher] = [Names(program.schedule)]
        if parts.options.check_finite:
            watchers.append(FiniteCheck())
        if use == "record":
            self.recorder = self.recorder or Recorder(parts.device, parts.parameters, parts.splitter, parts.shards)
            watchers.append(self.recorder)
        return Executor(
            program, parts.rank, parts.stages, parts.outgoing, parts.wires,
            train=use != "forward", device=parts.device, splitter=parts.splitter, shards=parts.shards,
            recv_ahead=parts.options.recv_ahead, shapes=parts.shapes,
            dynamic_weights=parts.options.dynamic_weights, watchers=watchers,
            gauge=self.recorder.gauge if use == "record" and self.recorder else None,
        )  # fmt: skip

    def _program(self, use: str, number: int, alike: bool) -> Program:
        schedule = resize(self._parts.schedule, number)
        shards = self._policy(alike) if self._parts.shards else None
        return forward_only(schedule, shards) if use == "forward" else lower(schedule, shards)

    def _policy(self, alike: bool) -> str:
        if self._parts.options.regather:
            return "regather"
        return "keep" if alike else "ends"

    # the order of collectives

    def orders(self, use: str, number: int) -> tuple[int, int]:
        """What stands for this rank's sharded weights and the order in which it gathers and reduces them.

        The first one holds if all pipelines have that number of microbatches, the second one if not.
        """
        if not self._parts.shards:
            return (0, 0)
        flags = b"".join(shards.flags() for shards in self._parts.shards.values())
        if flags != self._described[0]:
            for stage, shards in self._parts.shards.items():
                require_one_dtype(stage, shards.module)
            self._described = (flags, digest(self._weights()))
        alike, unlike = (self._digest(use == "forward", number, self._policy(alike)) for alike in (True, False))
        return hash((alike, self._described[1])), hash((unlike, self._described[1]))  # of integers: alike everywhere

    def order_lines(self, use: str, number: int, alike: bool) -> list[str]:
        """What `orders` stands for, in words."""
        return [*self._weights(), *map(str, self._order(use == "forward", number, self._policy(alike)))]

    def _weights(self) -> list[str]:
        return [line for shards in self._parts.shards.values() for line in shards.describe()]

    def _digest(self, forward: bool, number: int, policy: str) -> int:
        key = (forward, number, policy)
        if key not in self._digests:
            self._digests[key] = digest(map(str, self._order(*key)))
        return self._digests[key]

    def _order(self, forward: bool, number: int, policy: str) -> list[Collective]:
        """Of the Program for that number of microbatches, without its messages: they change nothing."""
        schedule = resize(self._parts.schedule, number)
        rows = with_shards(forwards(schedule) if forward else schedule, policy)
        units = {stage: len(shards.units) for stage, shards in self._parts.shards.items()}
        row = tuple(unpack(rows.row(self._parts.rank)))
        return collectives(row, units, policy == "regather")
