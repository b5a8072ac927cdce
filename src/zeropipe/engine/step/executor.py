"""Walks one rank's row of a Program: a flat list of callables, made once, called in order every step."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, Protocol

import torch

from zeropipe.core.action import SHARDING, Action, Kind, Overlap, Step, actions_of
from zeropipe.core.collectives import collectives, gathers_for_backward
from zeropipe.core.schedule import Program
from zeropipe.engine.backward.gradients import FirstGradients
from zeropipe.engine.backward.splitters import Splitter
from zeropipe.engine.comm.channels import Channel, Receiver, Sender
from zeropipe.engine.comm.messages import Message, ShapeCache, Spec
from zeropipe.engine.mesh.shards import Reduction, Shards
from zeropipe.engine.stages.contract import Microbatch, StageInfo
from zeropipe.engine.step.agreed import AgreedOrder
from zeropipe.engine.step.cells import Call, Cell
from zeropipe.engine.step.dynamic import Gap, movable
from zeropipe.engine.step.outputs import Buffers
from zeropipe.engine.step.passes import Finish, Passes, See
from zeropipe.engine.step.plans import reduced_within
from zeropipe.engine.step.streams import Streams


class Watcher(Protocol):
    """Wraps the computation of a step: the recorder, the search for NaN."""

    def watch(self, call: Call, actions: Sequence[Action], cells: Sequence[Cell]) -> Call: ...


class ShardWatcher(Protocol):
    """Wraps what the Program does for a sharded stage."""

    def watch(self, call: Call, action: Action) -> Call: ...


class Executor:
    """One rank's part of a Program, ready to run any number of times."""

    def __init__(
        self,
        program: Program,
        rank: int,
        stages: Mapping[int, StageInfo],
        outgoing: Mapping[int, Sender],
        wires: Mapping[tuple[int, int], Channel],
        *,
        train: bool,
        device: torch.device,
        splitter: Splitter,
        shards: Mapping[int, Shards],
        recv_ahead: int,
        shapes: ShapeCache,
        dynamic_weights: bool,
        watchers: Sequence[Watcher] = (),
        gauge: ShardWatcher | None = None,
    ) -> None:
        self._rank, self._outgoing = rank, outgoing
        self._splitter, self._shapes, self._watchers = splitter, shapes, watchers
        self.schedule = program.schedule
        self._passes = Passes(
            program.schedule.num_stages - 1, {stage: Buffers(info.module) for stage, info in stages.items()},
            train=train, device=device, shapes=shapes,
        )  # fmt: skip
        self._num_parts = program.schedule.problem.num_weight_parts
        self._parts: Counter[tuple[int, int]] = Counter()  # of a W: how many have a call
        self._shards = shards
        self._gauge = gauge
        self._reductions: dict[int, Reduction] = {}  # of stages whose last W has begun
        self._placement = program.schedule.placement
        row = program.rows[rank]
        units = {stage: len(some.units) for stage, some in shards.items()}
        self._regather = any(some.regather for some in shards.values())
        self._order = AgreedOrder(collectives(row, units, self._regather))
        self.cells: dict[tuple[int, int], Cell] = {}
        for action in actions_of(row):
            if action.kind is Kind.F:
                stage, microbatch = action.stage, action.microbatch
                info = stages[stage]
                self.cells[stage, microbatch] = Cell(stage, microbatch, info.module, info.pick)
        for (stage, microbatch), cell in self.cells.items():
            cell.before = self.cells.get((stage - 1, microbatch))
            cell.after = self.cells.get((stage + 1, microbatch))
        self._incoming, self._places = self._receives(row, wires, recv_ahead)
        self._streams = Streams(row, self.cells, stages, device)
        self._firsts = {
            stage: FirstGradients(shards[stage].accumulating if stage in shards else info.module.parameters)
            for stage, info in (stages.items() if train else ())
        }
        self._movable = movable(row, stages) if dynamic_weights and train else {}
        self._gap = Gap(device)
        self._ahead: dict[Action, Call] = {}  # what runs a W before its place
        self._calls: list[Call] = []
        self._labels: list[str] = []
        within = reduced_within(row)
        for at, step in enumerate(row):
            if isinstance(step, Action) and step.kind in SHARDING:
                self._add_sharding(step, row, at)
            else:
                self._add(step, reduces=at in within)
        self._labels.append("the last sends of the step")
        self._at = 0

    def run(
        self,
        microbatches: Sequence[Microbatch],
        kinds: Sequence[int],
        finish: Finish,
        see: See | None = None,
    ) -> None:
        """One step. `finish` takes the last stage's output and gives what backward starts from.

        Microbatches of one kind have the same shapes in all of the pipeline. `see` is shown the tensors of microbatches
        that need a gradient, before they get one.
        """
        self._passes.begin(microbatches, kinds, finish, see)
        self._order.begin()
        self._at = 0
        for cell in self.cells.values():
            cell.clear()
        for incoming in self._incoming.values():
            incoming.begin(self._passes.key_of, self._made)
        for shards in self._shards.values():
            shards.prepare(self._order.check)
        for firsts in self._firsts.values():
            firsts.begin_step()
        try:
            calls = self._calls
            for self._at, call in enumerate(calls):
                call()
            self._at = len(calls)
            self._order.end()
        finally:
            for shards in self._shards.values():
                shards.release()
        for outgoing in self._outgoing.values():
            outgoing.drain()
        self._passes.end()

    def close(self) -> None:
        """Let go of everything: the calls refer to this object, so it would live until it is collected."""
        self._calls.clear()
        self.cells.clear()
        self._incoming.clear()
        self._ahead.clear()
        self._firsts.clear()
        self._gap.forget()
        self._outgoing = {}

    @property
    def current_action(self) -> str:
        """The action being run."""
        return self._labels[self._at]

    def _made(self, message: Message) -> Spec | None:
        return self._passes.made(message, self.cells[message.stage, message.microbatch])

    # the list of callables

    def _receives(
        self, row: Sequence[Step], wires: Mapping[tuple[int, int], Channel], ahead: int
    ) -> tuple[dict[int, Receiver], dict[Message, tuple[int, int]]]:
        orders: dict[int, list[Message]] = {}
        places: dict[Message, tuple[int, int]] = {}
        for step in row:
            if isinstance(step, Action) and step.kind in (Kind.RECV_F, Kind.RECV_B):
                forward = step.kind is Kind.RECV_F
                peer = self._placement.peer_of(step)
                message = Message(forward, step.stage, step.microbatch)
                places[message] = (peer, len(orders.setdefault(peer, [])))
                orders[peer].append(message)
        incoming = {
            peer: Receiver(wires[peer, self._rank], order, ahead, self._shapes) for peer, order in orders.items()
        }
        return incoming, places

    def _add_sharding(self, action: Action, row: Sequence[Step], at: int) -> None:
        shards = self._shards.get(action.stage)
        if shards is None:  # this stage is whole on every rank
            return
        call: Call = shards.drop
        if action.kind is Kind.UNSHARD:
            call = partial(shards.gather, gathers_for_backward(row, at, self._regather))
        elif action.kind is Kind.REDUCE_GRAD:
            call = partial(self._reduce, action.stage)
        self._calls.append(call if self._gauge is None else self._gauge.watch(call, action))
        self._labels.append(str(action))

    def _reduce(self, stage: int) -> None:
        """What the stage's last B or W has not reduced already."""
        reduction = self._reductions.pop(stage, None) or Reduction(self._shards[stage], ())
        reduction.rest()

    def _add(self, step: Step, reduces: bool) -> None:
        if isinstance(step, Overlap):
            for action in step:
                self._add_take(action)
            cells = [self.cells[action.stage, action.microbatch] for action in step]
            together = self._streams.placed([self._compute(action) for action in step], cells)
            self._calls.append(self._watched(together, step, cells))
            self._labels.append(str(step))
            return
        cell = self.cells[step.stage, step.microbatch]
        if step.kind in (Kind.RECV_F, Kind.RECV_B):
            peer, place = self._places[Message(step.kind is Kind.RECV_F, step.stage, step.microbatch)]
            if self._incoming[peer].posts_in_order:  # else it is posted ahead of the take that waits for it
                self._calls.append(partial(self._incoming[peer].post_until, place))
                self._labels.append(str(step))
            return
        if step.kind in (Kind.SEND_F, Kind.SEND_B):
            outgoing = self._outgoing[self._placement.peer_of(step)]
            send = self._passes.send_forward if step.kind is Kind.SEND_F else self._passes.send_backward
            call = self._streams.beside(partial(send, cell, outgoing), cell)
        else:
            self._add_take(step)
            compute = self._reducing(step) if reduces and step.stage in self._shards else self._compute(step)
            call = self._watched(self._streams.placed((compute,), (cell,)), (step,), (cell,))
        self._calls.append(call)
        self._labels.append(str(step))

    def _add_take(self, action: Action) -> None:
        forward = action.kind is Kind.F
        place = self._places.get(Message(forward, action.stage, action.microbatch))
        if place is None or action.kind is Kind.W:
            return
        cell = self.cells[action.stage, action.microbatch]
        incoming = self._incoming[place[0]]
        if owed := self._movable.get(action):
            self._calls.append(partial(self._fill, owed, partial(incoming.has_arrived, place[1])))
            self._labels.append(f"W owed before {action}")
        take = self._passes.take_forward if forward else self._passes.take_backward
        self._calls.append(partial(take, cell, incoming, place[1]))
        self._labels.append(str(action))

    def _fill(self, owed: Sequence[Action], arrived: Callable[[], bool]) -> None:
        """Run Ws that are owed until a message is here."""
        self._gap.arrived = arrived
        for action in owed:
            if self._splitter.pending_parameters(action.stage, action.microbatch):
                if self._gap.over():
                    return
                if action not in self._ahead:
                    self._ahead[action] = self._ahead_of(action)
                self._ahead[action]()

    def _ahead_of(self, action: Action) -> Call:
        cell = self.cells[action.stage, action.microbatch]
        call = partial(self._splitter.run_early, action.stage, action.microbatch, self._num_parts, self._gap.over)
        return self._watched(self._streams.placed((call,), (cell,)), (action,), (cell,))

    def _compute(self, action: Action) -> Call:
        cell = self.cells[action.stage, action.microbatch]
        if action.kind is Kind.F:
            return self._passing(partial(self._passes.forward, cell), action)
        if action.kind in (Kind.B, Kind.I):
            run = self._splitter.backward if action.kind is Kind.B else self._splitter.backward_input
            return self._passing(partial(self._owning, partial(self._passes.backward, cell, run), action), action)
        part = self._parts[cell.stage, cell.microbatch]
        self._parts[cell.stage, cell.microbatch] += 1
        weights = partial(self._splitter.backward_weight, cell.stage, cell.microbatch, part, self._num_parts)
        return partial(self._owning, weights, action)

    def _owning(self, call: Callable[..., None], action: Action, **options: Any) -> None:
        """Backward; what it leaves behind shares no memory that others write to."""
        call(**options)
        self._firsts[action.stage].copy_shared()
        if action.kind is Kind.I:
            self._splitter.copy_shared(action.stage, action.microbatch)

    def _passing(self, call: Call, action: Action) -> Call:
        """An F, B or I, which uses the weights of its stage."""
        shards = self._shards.get(action.stage)
        if shards is None:
            return call

        def passing() -> None:
            with shards.passing(backward=action.kind is not Kind.F):
                call()

        return passing

    def _reducing(self, action: Action) -> Call:
        """The last B or W of a sharded stage: a unit is reduced as soon as its gradients are complete."""
        call, shards = self._compute(action), self._shards[action.stage]

        def backward() -> None:
            reduction = self._reductions[action.stage] = Reduction(shards, shards.trained)
            with shards.told(reduction.ran):
                call()
            reduction.rest()

        def weights() -> None:
            waiting = self._splitter.pending_parameters(action.stage, action.microbatch)
            reduction = self._reductions[action.stage] = Reduction(shards, waiting)
            call(on_product=reduction.ran)  # type: ignore[call-arg]
            reduction.rest()  # here also where all products ran before: processes must reduce at the same place

        return backward if action.kind is Kind.B else weights

    def _watched(self, call: Call, actions: Sequence[Action], cells: Sequence[Cell]) -> Call:
        for watcher in self._watchers:
            call = watcher.watch(call, actions, cells)
        return call
