"""The executors of an engine: one for each use and number of microbatches, over one set of connections."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from zeropipe.core.lower import lower
from zeropipe.core.resize import resized
from zeropipe.core.schedule import Program, Schedule
from zeropipe.engine.backward.splitters import Splitter
from zeropipe.engine.comm.edges import Outgoing, Wire
from zeropipe.engine.mesh.shards import Shards
from zeropipe.engine.options import Options
from zeropipe.engine.stages.contract import Told
from zeropipe.engine.step.executor import Executor, Watcher
from zeropipe.engine.step.finite import FiniteCheck
from zeropipe.engine.step.names import Names
from zeropipe.engine.step.passes import Made
from zeropipe.engine.step.plans import forward_only
from zeropipe.engine.step.recorder import Recorder

KEPT = 16  # executors kept for numbers of microbatches that were used before


@dataclass(frozen=True, eq=False)
class Parts:
    """What executors are made of."""

    schedule: Schedule
    rank: int
    stages: Mapping[int, Told]
    outgoing: Mapping[int, Outgoing]
    wires: Mapping[tuple[int, int], Wire]
    device: torch.device
    splitter: Splitter
    shards: Mapping[int, Shards]
    parameters: list[nn.Parameter]
    options: Options


class Executors:
    """Makes executors when they are first needed, and keeps the latest."""

    def __init__(self, parts: Parts) -> None:
        self._parts, self._made, self._kept = parts, Made(), dict[tuple[str, int, bool], Executor]()
        self._present: dict[Any, tuple[bool, ...]] = {}  # which gradients of their inputs stages have sent
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

    def forget_shapes(self) -> None:
        """Kinds of microbatches are numbered anew."""
        self._made.clear()
        self._present.clear()
        for outgoing in self._parts.outgoing.values():
            outgoing.forget()
        for wire in self._parts.wires.values():
            wire.heard.clear()

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
            recv_ahead=parts.options.recv_ahead, dynamic=parts.options.shapes == "dynamic",
            dynamic_weights=parts.options.dynamic_weights, made=self._made, present=self._present, watchers=watchers,
            gauge=self.recorder.gauge if use == "record" and self.recorder else None,
        )  # fmt: skip

    def _program(self, use: str, number: int, alike: bool) -> Program:
        schedule, options, shards = resized(self._parts.schedule, number), self._parts.options, None
        if self._parts.shards:
            keeps = alike and options.split != "autograd"  # torch's W may read weights, ours do not
            shards = "regather" if options.regather else "keep" if keeps else "ends"
        return forward_only(schedule, shards) if use == "forward" else lower(schedule, shards)
